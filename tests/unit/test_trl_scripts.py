"""What programs written for TRL import, parse and read of a run, under the same names."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import HfArgumentParser, TrainerCallback

import kedge
from kedge import (
    GRPOTrainer,
    ModelConfig,
    RLOOTrainer,
    ScriptArguments,
    TrlParser,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from kedge.ext.trl import GRPOConfig, PPOConfig, RLOOConfig
from kedge.loop.metrics import TRL_NAMES
from kedge.records.errors import ConfigError
from kedge.testing import tiny_policy
from kedge.trainers.spec import trl_names
from kedge.verifiers import accuracy_reward, think_format_reward
from tests.e2e.small import PROMPTS
from tests.e2e.test_groups import make


@pytest.mark.parametrize("config", [PPOConfig, RLOOConfig, GRPOConfig])
def test_the_three_parse_together(config: Any, tmp_path: Path) -> None:
    flags = f"--output_dir {tmp_path} --dataset_name d --use_peft --lora_r 4 --use_cpu"
    flags += " --model_name_or_path m --lora_target_modules q_proj v_proj --dtype bfloat16"
    parser = HfArgumentParser((ScriptArguments, config, ModelConfig))
    script, training, model = parser.parse_args_into_dataclasses(flags.split())
    assert (script.dataset_name, script.dataset_test_split) == ("d", "test")
    assert training.output_dir == str(tmp_path)
    assert (model.torch_dtype, model.trust_remote_code) == ("bfloat16", False)
    adapter = get_peft_config(model)
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (4, 32, 0.05)
    assert adapter.target_modules == {"q_proj", "v_proj"}


@pytest.mark.parametrize("name", ["ModelConfig", "ScriptArguments"])
def test_names_and_defaults_are_trls(name: str) -> None:
    trl = pytest.importorskip("trl")
    theirs = {f.name: f.default for f in fields(getattr(trl, name))}
    ours = {f.name: f.default for f in fields(getattr(kedge, name)) if f.init}
    assert ours == theirs | ({"torch_dtype": None} if name == "ModelConfig" else {})


def test_adapters_and_quantization() -> None:
    assert get_peft_config(ModelConfig()) is None
    assert get_quantization_config(ModelConfig()) is None
    whole = ModelConfig(use_peft=True, lora_target_modules=["all-linear"])
    assert get_peft_config(whole).target_modules == "all-linear"
    four = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="bfloat16"))
    assert four is not None
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_compute_dtype) == ("nf4", torch.bfloat16)
    assert get_quantization_config(ModelConfig(load_in_8bit=True)).load_in_8bit
    with pytest.raises(ConfigError, match="load_in_8bit and load_in_4bit are both set"):
        ModelConfig(load_in_8bit=True, load_in_4bit=True)
    if not torch.cuda.is_available():
        assert get_kbit_device_map() is None


def test_a_file_gives_defaults_that_flags_override(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KEDGE_TEST_ENV", "before")
    file = tmp_path / "run.yaml"
    file.write_text("lora_r: 4\nuse_peft: true\ndtype: bfloat16\nenv:\n  KEDGE_TEST_ENV: 7\n")
    parse = TrlParser((ScriptArguments, ModelConfig)).parse_args_and_config
    _, model = parse(["--config", str(file), "--lora_r", "8"])
    assert (model.lora_r, model.use_peft, model.dtype) == (8, True, "bfloat16")
    assert os.environ["KEDGE_TEST_ENV"] == "7"
    file.write_text("lora_rank: 4\n")
    again = TrlParser((ScriptArguments, ModelConfig)).parse_args_and_config
    with pytest.raises(ConfigError, match="unknown options: lora_rank"):
        again(["--config", str(file)])
    *_, rest = again(["--config", str(file), "--x", "1"], return_remaining_strings=True)
    assert rest == ["--lora_rank", "4", "--x", "1"]
    for wrong in ("- 1\n", "a: [\n"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"run\.yaml (must map names|is not valid YAML)"):
            again(["--config", str(file)])


BARE = ("bf16", "tf32", "disable_tqdm", "log_completions", "normalize_advantage", "push_to_hub")


@pytest.mark.parametrize("config", [PPOConfig, RLOOConfig, GRPOConfig])
def test_a_command_line_of_trl_0_12_to_0_22_parses(config: Any, tmp_path: Path) -> None:
    """``--torch_dtype``, and options that are True or False without a value."""
    names = [name for name in BARE if hasattr(config, name) and name != "tf32"]
    parser = TrlParser((ScriptArguments, config, ModelConfig))
    flags = f"--output_dir {tmp_path} --use_cpu --torch_dtype bfloat16"
    for name in names:
        flags += f" --{name}"
    *_, training, model = parser.parse_args_and_config(flags.split())
    assert (model.dtype, model.torch_dtype) == ("bfloat16", "bfloat16")
    assert [getattr(training, name) for name in names] == [True] * len(names)
    file = tmp_path / "run.yaml"
    file.write_text("torch_dtype: bfloat16\n")
    *_, model = TrlParser((config, ModelConfig)).parse_args_and_config(
        ["--config", str(file), "--output_dir", str(tmp_path), "--use_cpu"]
    )
    assert model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match="torch_dtype='float16' is another name of dtype, but"):
        ModelConfig(dtype="bfloat16", torch_dtype="float16")


def test_a_file_may_use_every_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\ntorchdynamo: eager\n")
    ours = TrlParser((PPOConfig,))
    for config in (
        *ours.parse_args_and_config(["--config", str(file)]),
        *ours.parse_yaml_file(file),
        *HfArgumentParser((PPOConfig,)).parse_yaml_file(file),
    ):
        assert config.torch_compile_backend == "eager"


def test_rewards_of_the_scripts() -> None:
    texts = [
        "<think>a</think>b",
        "<think>a",
        "a</think>b",
        "<think><think>a</think>",
        " <think></think>",
    ]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert think_format_reward(chats) == [1, 0, 0, 0, 0]
    chat = [[{"role": "assistant", "content": "so it is $\\boxed{4}$"}]] * 2
    assert accuracy_reward(chat, solution=["$4$", "$5$"]) == [1, 0]


# Logged by TRL 1.16 in every row of training; its extremes over micro-batches are left out.
OF_TRL = {
    *("loss", "grad_norm", "learning_rate", "num_tokens", "reward", "reward_std", "step_time"),
    *("rewards/long/mean", "rewards/long/std", "frac_reward_zero_std", "entropy", "mine"),
    *(f"completions/{k}_length" for k in ("mean", "min", "max")),
    "completions/clipped_ratio",
    *(f"clip_ratio/{k}_mean" for k in ("low", "high", "region")),
}


def long(completions: Any, log_metric: Any, **_: Any) -> list[float]:
    log_metric("mine", 3.0)
    return [float(len(text)) for text in completions]


def made(kind: str, folder: Path, **options: Any) -> Any:
    sizes = {"max_steps": 3, "total_episodes": None, "logging_steps": 2, "output_dir": str(folder)}
    sizes |= {"per_device_train_batch_size": 4, "num_generations": 2, "response_length": 4}
    parts: dict[str, Any] = {"beta": 0.1, "reward_funcs": long, "model": tiny_policy(vocab_size=32)}
    parts["eval_dataset"] = {"a": PROMPTS[:2], "b": PROMPTS[2:5]}
    kinds = {"rloo": (RLOOTrainer, RLOOConfig), "grpo": (GRPOTrainer, GRPOConfig)}[kind]
    return make(*kinds, **sizes | parts | options)


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_a_run_and_its_evaluation_have_trls_names(kind: str, tmp_path: Path) -> None:
    trainer = made(kind, tmp_path, entropy_coef=0.01)
    assert trainer.entropy_coef == 0.01
    done = trainer.train()
    rows, last = trainer.state.log_history, trainer.state.log_history[-1]
    assert [row["step"] for row in rows] == [2, 3]  # the last interval is unfinished
    for row in rows:
        assert {*OF_TRL, "kl"} <= row.keys()
        assert row["reward"] == row["rewards/long/mean"] == row["objective/scores"]
        assert row["reward_std"] == pytest.approx(row["objective/scores_std"] * (4 / 3) ** 0.5)
        assert row["reward_std"] == pytest.approx(row["rewards/long/std"])
        assert (row["mine"], row["learning_rate"]) == (3.0, row["lr"])
        assert row["loss"] == pytest.approx(row["policy_loss"] - 0.01 * row["entropy"])
        assert row["entropy_coef"] == 0.01
        assert row.get("val/clipfrac_avg") == (0.0 if kind == "rloo" else None)
    assert rows[1]["num_tokens"] > rows[0]["num_tokens"] > 2 * 4 * 3
    loss = (2 * rows[0]["loss"] + rows[1]["loss"]) / 3
    assert last["train_loss"] == done.training_loss == pytest.approx(loss)
    totals = {k: x for k, x in last.items() if k.startswith("train_") or k == "epoch"}
    assert len(totals) == 5
    assert totals.items() <= done.metrics.items()
    assert last["train_samples_per_second"] == pytest.approx(12 / last["train_runtime"])
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert logged["train_loss"] == last["train_loss"]

    found = trainer.evaluate()
    for name in ("a", "b"):
        # Scores are lengths: minus the score, and 0.1 per nat of KL.
        penalty = 0.1 * found[f"eval_{name}_objective/kl"]
        want = penalty - found[f"eval_{name}_objective/scores"]
        assert found[f"eval_{name}_loss"] == pytest.approx(want)
        assert found[f"eval_{name}_reward"] == found[f"eval_{name}_rewards/long/mean"]
    assert "eval_loss" in trainer.evaluate(PROMPTS[:2])


def test_aliases_by_hand() -> None:
    row = {
        "objective/scores_std": 1.0,
        "rollout/dropped_rows": 2.0,
        "objective/kl": 6.0,
        "completions/mean_length": 3.0,
        "loss": 0.5,
        "log/loss": 9.0,
    }
    found = trl_names(row, rows=6, token_kl=False)
    assert found == {"reward_std": pytest.approx((4 / 3) ** 0.5), "kl": 2.0}
    assert set(TRL_NAMES) & set(TRL_NAMES.values()) == set()


def test_cosmetic_options_never_stop_a_run(tmp_path: Path, caplog: Any) -> None:
    cosmetic = {
        **{"num_completions_to_print": 1, "log_unique_prompts": True, "log_multimodal": False},
        **{"pad_to_multiple_of": 8, "use_transformers_continuous_batching": True},
        **{"dataloader_num_workers": 2, "vllm_group_port": 1, "use_liger_kernel": True},
    }
    trainer = made("grpo", tmp_path, **cosmetic)
    said = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert sorted(text.split("=")[0] for text in said) == [
        *("dataloader_num_workers", "log_multimodal", "pad_to_multiple_of", "use_liger_kernel"),
        *("use_transformers_continuous_batching", "vllm_group_port"),
    ]
    shown: list[list[dict[str, object]]] = []
    trainer._run.callbacks.tracker.table = lambda name, rows, step: shown.append(rows)
    rows = trainer.generate_completions()
    assert len(rows) == len(shown[0]) == 2
    trainer._run.evaluations.show_table([rows[0], rows[1], rows[0]], "x")
    assert shown[1] == rows
    trainer.args.log_unique_prompts = False
    trainer._run.evaluations.show_table([rows[0], rows[0], rows[1]], "x", most=2)
    assert shown[2] == rows  # another prompt before another answer
    assert trainer.aux_loss_enabled is False
    assert trainer.reward_processing_classes == [None]


def test_a_batch_without_any_reward_teaches_nothing_and_ends_nothing(
    tmp_path: Path, caplog: Any
) -> None:
    calls: list[int] = []

    def sometimes(completions: Any, **_: Any) -> list[float | None]:
        calls.append(1)
        if len(calls) > 1:
            return [None] * len(completions)
        return [float(len(text)) for text in completions]

    adaptive = {"kl_coef": 0.1, "adaptive_kl": True, "kl_horizon": 8}
    trainer = made("grpo", tmp_path, reward_funcs=sometimes, learning_rate=1e-2, **adaptive)
    trainer.args.logging_steps = 1
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}

    class Watch(TrainerCallback):
        moved: ClassVar[list[bool]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = dict(trainer.model.named_parameters())
            self.moved.append(any(not torch.equal(now[n], p) for n, p in before.items()))
            before.update({n: p.detach().clone() for n, p in now.items()})

    trainer.add_callback(Watch)
    trainer.train()
    assert Watch.moved == [True, False, False]
    rows = trainer.state.log_history[:3]
    assert [row["rollout/dropped_rows"] for row in rows] == [0, 4, 4]
    assert ["reward" in row for row in rows] == [True, False, False]
    assert caplog.text.count("could be scored: every reward is None") == 1
    assert trainer.engine.kl.value == pytest.approx(0.1 * (1 - 0.2 * 4 / 8))  # of the first alone
