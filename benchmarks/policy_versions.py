"""What each version of large policies costs on 64 GPUs, estimated as bytes / speed.

    python -m benchmarks.policy_versions

32 learners on four machines and 32 GPUs that sample; PPO with a value model of the policy's size,
a reference and a reward function, in bf16, ``deepspeed_stage=3``, gradient checkpointing, one row
of 2,048 tokens a micro-batch.  Models are built without weights.  Prints the table of
docs/explain/scaling.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from kedge.config.rollout_engines import assume_all_packages
from kedge.ext.open_instruct.command import parse_options
from kedge.ext.plan import command as plan

HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, tuple[Any, int]] = {  # configuration, and GPUs of each engine
    "8B": (
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14_336,
        ),
        1,
    ),
    "32B": (
        Qwen3Config(
            vocab_size=151_936,
            hidden_size=5120,
            num_hidden_layers=64,
            intermediate_size=25_600,
            **HEADS,
        ),
        2,
    ),
    "70B": (
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=8192,
            num_hidden_layers=80,
            intermediate_size=28_672,
            **HEADS,
        ),
        4,
    ),
}
GPUS = LEARNERS = 32  # that sample, and that learn
OTHERS = 24  # learners on other machines than the first
# Assumed bytes per second: a NIC of 400 Gbit/s, pinned memory over PCIe 4, one thread that copies.
NETWORK, BUS, MEMORY = 50e9, 25e9, 10e9
IN_ORDER: tuple[str, ...] = ()
AS_COMPLETED = ("--rollout_schedule", "as_completed", "--max_lag", "4")


def write(config: Any, folder: Path) -> None:
    """The configuration, and a tokenizer of two tokens."""
    config.architectures = [f"{config.model_type.capitalize()}ForCausalLM"]
    config.max_position_embeddings, config.pad_token_id = 4096, 1
    config.eos_token_id = config.bos_token_id = 0
    config.save_pretrained(folder)
    core = Tokenizer(models.WordLevel({"<eos>": 0, "<pad>": 1}, unk_token="<pad>"))
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": "{{ messages }}"}
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)


def command(folder: Path, engine: int, *more: str) -> list[str]:
    """Of the run on 64 GPUs."""
    return [
        *("--model_name_or_path", str(folder), "--reward_funcs", f"{__name__}:no_reward"),
        *("--value_source", "copy", "--total_episodes", "512", "--bf16", "True", "--use_cpu"),
        *("--actor_num_gpus_per_node", "8", "8", "8", "8", "--deepspeed_stage", "3"),
        "--gradient_checkpointing",
        *("--vllm_num_engines", str(GPUS // engine), "--vllm_tensor_parallel_size", str(engine)),
        *("--per_device_train_batch_size", "1", "--local_rollout_batch_size", "16"),
        *("--max_prompt_length", "1024", "--response_length", "1024", *more),
    ]


def no_reward(completions: list[str]) -> list[float]:
    """A reward that is never called."""
    return [0.0] * len(completions)


def version_parts(sent: float, broadcasts: int) -> list[tuple[str, float, float, str]]:
    """Name, bytes, seconds, and who waits, of each part of a version of ``sent`` bytes."""
    gather = max(sent * OTHERS / LEARNERS / NETWORK, sent / BUS)
    learners, engines = "all learners", "engines"
    sampling = "in-order" if broadcasts == 1 else "as-completed"
    name = f"broadcast over NCCL, {sampling} sampling"
    return [
        ("gather on the first learner", sent * (LEARNERS - 1) / LEARNERS, gather, learners),
        ("copy to the host", sent, sent / BUS + sent / MEMORY, learners),
        (name, broadcasts * sent, broadcasts * (sent / BUS + sent / NETWORK), engines),
        ("verification", 2 * sent, 2 * sent / BUS, f"{engines}; the first learner slows down"),
    ]


def table() -> list[str]:
    """The lines of the table: a column for each model."""
    columns = []
    for name, (config, engine) in MODELS.items():
        column = {"": f"{name}, {GPUS // engine} engines of {engine} GPU{'s' * (engine > 1)}"}
        with tempfile.TemporaryDirectory() as folder, assume_all_packages():
            write(config, Path(folder))
            for flags in (IN_ORDER, AS_COMPLETED):
                options = parse_options(command(Path(folder), engine, *flags))
                options.config.use_cpu = False  # this process has no GPU, but the run has
                _, _, found = plan.plan(options, LEARNERS)
                parts = version_parts(2.0 * found[0].trained, GPUS // engine if flags else 1)
                waits = {"learners": 0.0, "engines": 0.0}
                for part, size, seconds, who in parts:
                    column[f"{part} | {who}"] = f"{plan.human(size)}, {seconds:.1f} s"
                    waits["learners" if "all learners" in who else "engines"] += seconds
                rule = f"{'as-completed' if flags else 'in-order'} sampling"
                column[f"total wait of engines, {rule} | "] = f"{sum(waits.values()):.0f} s"
            column["total wait of learners | "] = f"{waits['learners']:.1f} s"
        columns.append(column)
    names = list(dict.fromkeys(name for column in columns for name in column if name))
    heads = " | ".join(column[""] for column in columns)
    lines = [f"| part | who waits | {heads} |", "|---|---|" + "---|" * len(columns)]
    return lines + [f"| {name} | {' | '.join(x[name] for x in columns)} |" for name in names]


if __name__ == "__main__":
    print("\n".join(table()))
