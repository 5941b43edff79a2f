"""PPO against the numbers recorded from TRL 1.12, through the public trainer."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from kedge import PPOConfig, PPOTrainer
from kedge.testing import ScriptedRollouts
from tests.e2e.small import QUIET

# TRL averages these over padding, so that they are targets only where there is none.
OVER_PADDING = {"policy/approxkl_avg", "policy/entropy_avg", "val/ratio", "val/ratio_var"}
# The key part of this bias has no gradient; Adam turns its rounding noise into steps.
NOISE = "attention.query_key_value.bias"


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    models = {n: AutoModelForCausalLM.from_pretrained(folder / n) for n in ("policy", "ref")}
    for name in ("reward", "value"):
        models[name] = AutoModelForSequenceClassification.from_pretrained(
            folder / name, num_labels=1
        )
    return json.loads((folder / "record.json").read_text()), models


def train(folder: Path, **changes: Any) -> tuple[dict[str, Any], PPOTrainer]:
    from transformers import AutoTokenizer

    record, models = load(folder)
    config = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": record["batch_size"],
        "total_episodes": record["batch_size"] * len(record["steps"]),
        "response_length": record["response_length"],
        "seed": record["seed"],
        "shuffle_dataset": False,
        "max_grad_norm": 0.0,
        "score_position": "after_last",
        **QUIET,
        "stop_token": None,
        **record["config"],
    }
    trainer = PPOTrainer(
        PPOConfig(**config | changes),
        AutoTokenizer.from_pretrained(folder / "tokenizer"),
        models["policy"],
        models["ref"],
        models["reward"],
        [{"input_ids": q} for step in record["steps"] for q in step["queries"]],
        models["value"],
        rollout_engine=ScriptedRollouts([step["responses"] for step in record["steps"]]),
    )
    trainer.train()
    return record, trainer


def wrong_statistics(record: dict[str, Any], trainer: PPOTrainer, skip: set[str]) -> list[str]:
    rows = [row for row in trainer.state.log_history if "objective/scores" in row]
    assert len(rows) == len(record["steps"])
    return [
        f"step {i} {name}: {row[name]} instead of {want}"
        for i, (step, row) in enumerate(zip(record["steps"], rows, strict=True))
        for name, want in step["metrics"].items()
        if name not in skip and row[name] != pytest.approx(want, rel=2e-4, abs=1e-4)
    ]


def wrong_weights(sums: dict[str, list[float]], model: nn.Module) -> list[str]:
    own = {
        name.replace("embed_out", "lm_head"): p.detach().double()  # renamed within transformers 5
        for name, p in model.named_parameters()
    }
    return [
        name
        for name, want in sums.items()
        if NOISE not in name
        and [float(own[name].sum()), float(own[name].abs().sum())]
        != pytest.approx(want, rel=1e-5, abs=2e-4)
    ]


@pytest.mark.parametrize(
    ("case", "skip"), [("default", {"eps", *OVER_PADDING}), ("no_eos", {"eps"})]
)
def test_statistics_and_weights(case: str, skip: set[str], shared: Path) -> None:
    record, trainer = train(shared / "golden" / "ppo_v2" / case)
    assert wrong_statistics(record, trainer, skip) == []
    assert wrong_weights(record["final_policy"], trainer.model) == []
    assert trainer.value_model is not None
    assert wrong_weights(record["final_value"], trainer.value_model) == []


def test_micro_batches_change_nothing(shared: Path) -> None:
    folder = shared / "golden" / "ppo_v2" / "default"
    record, trainer = train(folder, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert wrong_statistics(record, trainer, {"eps", *OVER_PADDING}) == []
    assert wrong_weights(record["final_policy"], trainer.model) == []


@pytest.mark.parametrize(
    "change",
    [
        {"score_position": "last"},
        {"temperature": 0.8},
        {"cliprange": 0.3},
        {"cliprange_value": 0.3},
        {"lam": 0.9},
        {"kl_coef": 0.1},
        {"kl_estimator": "k3"},
        {"whiten_rewards": True},
        {"whiten_advantages": False},
        {"max_grad_norm": 0.1},
    ],
    ids=str,
)
def test_another_setting_gives_other_numbers(change: dict[str, Any], shared: Path) -> None:
    record, trainer = train(shared / "golden" / "ppo_v2" / "default", **change)
    assert wrong_weights(record["final_policy"], trainer.model)
