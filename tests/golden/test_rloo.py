"""RLOO against the numbers recorded from TRL 0.17, through the public trainer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kedge import RLOOConfig, RLOOTrainer
from kedge.ext import trl
from kedge.testing import ScriptedRollouts
from tests.e2e.small import QUIET
from tests.golden.test_ppo_v2 import load, wrong_statistics, wrong_weights

# TRL averages these over padding, and the ratio over tokens; the last is always 0 there.
NO_TARGET = {"eps", "policy/entropy_avg", "val/ratio", "val/ratio_var", "val/clipfrac_avg"}
ENTROPY = "objective/entropy"  # TRL 0.17 counts each padding token as -1 nat


def by_prompt(rows: list[Any], k: int) -> list[Any]:
    """Rows of one prompt next to one another; the record holds all first responses first."""
    return [row for i in range(len(rows) // k) for row in rows[i :: len(rows) // k]]


def train(folder: Path, *, newer: bool = False, **changes: Any) -> tuple[Any, RLOOTrainer]:
    record, models = load(folder)
    record["final_policy"]["lm_head.weight"] = record["final_policy"].pop("embed_out.weight")
    k, steps = record["config"]["rloo_k"], record["steps"]
    prompts = [by_prompt(step["queries"], k)[::k] for step in steps]
    config = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": record["batch_size"],
        "total_episodes": record["batch_size"] * len(steps),
        "response_length": record["response_length"],
        "seed": record["seed"],
        "shuffle_dataset": False,
        "max_grad_norm": 0.0,
        **QUIET,
        "stop_token": None,
        **record["config"],
    }
    config["num_generations"] = config.pop("rloo_k")
    if newer:
        config["max_completion_length"] = config.pop("response_length")
        config |= {"num_iterations": 4, "temperature": 0.7, "beta": 0.05, "epsilon": 0.2}
        names = ("args", "model", "ref_model", "reward_funcs")
    else:
        names = ("config", "policy", "ref_policy", "reward_model")
    kind = trl.RLOOConfig if newer else RLOOConfig
    given = (kind(**config | changes), *(models[n] for n in ("policy", "ref", "reward")))
    trainer = RLOOTrainer(
        **dict(zip(names, given, strict=True)),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        train_dataset=[{"input_ids": q} for step in prompts for q in step],
        rollout_engine=ScriptedRollouts([by_prompt(step["responses"], k) for step in steps]),
    )
    trainer.train()
    return record, trainer


@pytest.mark.parametrize("newer", [False, True], ids=["older names", "newer names"])
def test_statistics_and_weights(newer: bool, shared: Path) -> None:
    record, trainer = train(shared / "golden" / "rloo" / "default", newer=newer)
    assert wrong_statistics(record, trainer, NO_TARGET | {ENTROPY}) == []
    for step, row in zip(record["steps"], trainer.state.log_history, strict=False):
        padding = record["response_length"] - row["completions/mean_length"]
        assert row[ENTROPY] - padding == pytest.approx(step["metrics"][ENTROPY], rel=2e-4)
    assert wrong_weights(record["final_policy"], trainer.model) == []


def test_micro_batches_change_nothing(shared: Path) -> None:
    folder = shared / "golden" / "rloo" / "default"
    record, trainer = train(folder, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert wrong_statistics(record, trainer, NO_TARGET | {ENTROPY}) == []
    assert wrong_weights(record["final_policy"], trainer.model) == []


@pytest.mark.parametrize(
    "change",
    [
        {"cliprange": 0.3},
        {"ratio_level": "token"},
        {"kl_coef": 0.1},
        {"temperature": 0.8},
        {"missing_eos_penalty": 2.0},
        {"num_generations": 4},
        {"normalize_reward": True},
        {"reward_clip_range": 1.0},
        {"normalize_advantage": True},
        {"token_level_kl": True},
    ],
    ids=str,
)
def test_another_setting_gives_other_numbers(change: dict[str, Any], shared: Path) -> None:
    record, trainer = train(shared / "golden" / "rloo" / "default", **change)
    assert wrong_weights(record["final_policy"], trainer.model)
