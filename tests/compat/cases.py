"""The programs, and how each is called; only models, data sets and sizes are ours."""

from __future__ import annotations

from dataclasses import dataclass, field

_PPO = (
    *("--output_dir", "out/trl", "--per_device_train_batch_size", "4"),
    *("--gradient_accumulation_steps", "2", "--total_episodes", "16", "--response_length", "12"),
    *("--model_name_or_path", "EleutherAI/pythia-1b-deduped"),
    *("--sft_model_path", "EleutherAI/pythia-1b-deduped", "--reward_model_path", "reward"),
    *("--missing_eos_penalty", "1.0", "--num_sample_generations", "0", "--learning_rate", "3e-6"),
    *("--report_to", "none", "--use_cpu"),
)
_STYLE = (
    *("--dataset_name", "trl-internal-testing/descriptiveness-sentiment-trl-style"),
    *("--dataset_train_split", "descriptiveness"),
)
_TLDR = (
    *("--dataset_name", "trl-internal-testing/tldr-preference-sft-trl-style"),
    *("--dataset_test_split", "validation"),
)
_SENTIMENT = (
    *("--model_name", "gpt2", "--query_dataset", "imdb", "--batch_size", "16"),
    *("--mini_batch_size", "8", "--reward_model", "sentiment-analysis:lvwerra/distilbert-imdb"),
)


@dataclass(frozen=True)
class Case:
    """One program."""

    name: str
    program: str  # as the page names it
    source: str  # tag and path in TRL's repository, or "-m module"
    arguments: tuple[str, ...] = ()
    compat: tuple[str, ...] = ()  # options of ``kedge.compat run``
    environment: str = "trl"
    packages: tuple[str, ...] = ("trl", "transformers", "torch", "accelerate", "datasets", "peft")
    note: str = ""
    expect: tuple[str, ...] = ()  # files that it writes
    variables: dict[str, str] = field(default_factory=dict)


def _trl(tag: str, path: str, *arguments: str, **more: object) -> Case:
    name = f"trl-{tag[1:]}-{path.removesuffix('.py').replace('/', '-')}"
    return Case(name, f"TRL {tag[1:]}", f"{tag}:{path}", arguments, **more)  # type: ignore[arg-type]


_SCRIPTS = "examples/scripts"
_REPLACE = "`ModelConfig` of the installed TRL lacks an option"
_RLOO = "the installed TRL has another `RLOOTrainer`"
_LLAMAFACTORY = ("--api", "trl-0.11", "--replace", "--report-version", "0.9.6", "-m")
_SWIFT = (
    *("--rlhf_type", "ppo", "--model", "gpt2", "--model_type", "llama", "--template", "default"),
    *("--reward_model", "reward", "--reward_model_type", "llama", "--dataset", "swift.jsonl"),
    *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"),
    *("--max_completion_length", "12", "--num_train_epochs", "1", "--max_length", "256"),
    *("--use_cpu", "true", "--torch_dtype", "float32", "--fp16", "false", "--bf16", "false"),
    *("--report_to", "none", "--save_steps", "1", "--logging_steps", "1"),
    *("--num_sample_generations", "0", "--split_dataset_ratio", "0", "--add_version", "false"),
)
_MODEL = ("out/trl/model.safetensors",)

CASES = (
    _trl("v0.11.4", "examples/hello_world.py"),
    _trl("v0.11.4", f"{_SCRIPTS}/ppo.py", *_SENTIMENT),
    _trl(
        *("v0.11.4", f"{_SCRIPTS}/ppo/ppo.py", *_PPO),
        compat=("--replace",),
        note=_REPLACE,
        expect=_MODEL,
    ),
    _trl(
        *("v0.11.4", f"{_SCRIPTS}/ppo/ppo_tldr.py", *_PPO),
        compat=("--replace", "--transformers-4"),
        note=f"{_REPLACE}; `apply_chat_template` returns ids",
        expect=_MODEL,
    ),
    _trl(
        *("v0.11.4", f"{_SCRIPTS}/rloo/rloo.py", *_PPO, "--rloo_k", "2"),
        compat=("--replace",),
        note=_RLOO,
        expect=_MODEL,
    ),
    _trl(
        *("v0.17.0", f"{_SCRIPTS}/ppo/ppo.py", *_STYLE, *_PPO),
        compat=("--replace",),
        note=_REPLACE,
        expect=_MODEL,
    ),
    _trl(
        *("v0.17.0", f"{_SCRIPTS}/ppo/ppo_tldr.py", *_TLDR, *_PPO),
        compat=("--replace", "--transformers-4"),
        note=f"{_REPLACE}; `apply_chat_template` returns ids",
        expect=_MODEL,
    ),
    _trl(
        *("v0.17.0", f"{_SCRIPTS}/rloo/rloo.py", *_STYLE, *_PPO, "--rloo_k", "2"),
        compat=("--replace",),
        note=_RLOO,
        expect=_MODEL,
    ),
    _trl("v1.9.0", f"{_SCRIPTS}/ppo/ppo.py", *_STYLE, *_PPO, expect=_MODEL),
    _trl(
        *("v1.9.0", f"{_SCRIPTS}/ppo/ppo_tldr.py", "--dataset_name", "trl-lib/tldr"),
        *("--dataset_test_split", "validation", *_PPO),
        expect=_MODEL,
    ),
    *(
        Case(
            f"llamafactory-{name}",
            "LLaMA-Factory",
            "-m llamafactory.cli",
            ("train", f"llamafactory/{name}.yaml"),
            _LLAMAFACTORY,
            environment,
            ("llamafactory", "trl", "transformers", "torch", "accelerate", "datasets", "peft"),
            note,
            (f"out/llamafactory_{name}/value_head.safetensors",),
            {"DISABLE_VERSION_CHECK": "1"},
        )
        for name, environment, note in (
            ("lora", "llamafactory", "LoRA policy, full reward model"),
            ("full", "llamafactory", "all weights"),
            (
                *("lora_reward", "llamafactory-peft"),
                "LoRA policy and LoRA reward model; with peft 0.18 its optimizer lacks the adapter",
            ),
        )
    ),
    *(
        Case(
            f"ms-swift-{tuner}",
            "ms-swift",
            "-m swift.cli.rlhf",
            (*_SWIFT, "--tuner_type", tuner, "--output_dir", f"out/swift_{tuner}"),
            ("--api", "ms-swift", "--replace", "-m"),
            "ms-swift",
            ("ms_swift", "trl", "transformers", "torch", "accelerate", "datasets", "peft"),
            f"`--tuner_type {tuner}`",
            (f"out/swift_{tuner}/checkpoint-3/manifest.json",),
            {"USE_HF": "1"},
        )
        for tuner in ("full", "lora")
    ),
)
