"""The classic trainer against the numbers recorded from TRL 0.11.4, through ``step``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kedge.ext.trl.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from kedge.ext.trl.classic.stats_recorder import KEYS
from tests.classic_models import letters

pytestmark = pytest.mark.filterwarnings("ignore:no dataset was given")

# The key part of this bias has no gradient; Adam turns its rounding noise into steps.
NOISE = "attn.c_attn.bias"
PER_TOKEN = {"objective/logprobs", "objective/ref_logprobs"}
TRAINED = {"ppo/policy/advantages", "ppo/policy/ratio"}


def train(folder: Path, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]], PPOTrainer]:
    from safetensors.torch import load_file

    record = json.loads((folder / "record.json").read_text())
    model, ref = (
        AutoModelForCausalLMWithValueHead.from_pretrained(folder / "model") for _ in range(2)
    )
    model.pretrained_model.load_state_dict(load_file(folder / "policy.safetensors"), strict=False)
    model.v_head.load_state_dict(load_file(folder / "v_head.safetensors"))
    config = PPOConfig(
        **{"batch_size": 8, "mini_batch_size": 8, "learning_rate": record["lr"]}
        | record["config"]
        | changes
    )
    trainer = PPOTrainer(config, model, ref, letters(64))
    found = [
        trainer.step(
            [torch.tensor(q) for q in step["queries"]],
            [torch.tensor(r) for r in step["responses"]],
            [torch.tensor(s) for s in step["scores"]],
        )
        for step in record["steps"]
    ]
    return record, found, trainer


def response_grid(step: dict[str, Any]) -> np.ndarray:
    width = max(len(q) + len(r) for q, r in zip(step["queries"], step["responses"], strict=True))
    mask = np.zeros((8, width - 1), dtype=bool)
    for row, q, r in zip(mask, step["queries"], step["responses"], strict=True):
        row[len(q) - 1 : len(q) - 1 + len(r)] = True
    return mask


def near(own: Any, want: Any) -> bool:
    return bool(np.allclose(np.asarray(own, dtype=float), want, rtol=2e-4, atol=1e-4))


def wrong_statistics(record: dict[str, Any], found: list[dict[str, Any]]) -> list[str]:
    bad = []
    for i, (step, own) in enumerate(zip(record["steps"], found, strict=True)):
        assert set(own) == set(KEYS)
        mask = response_grid(step)
        for name, want in step["stats"].items():
            if name.startswith("time/") or name in TRAINED:
                continue
            mine, theirs = own[name], np.asarray(want)
            if name in PER_TOKEN:
                assert mine.shape == theirs.shape
                mine, theirs = mine[mask], theirs[mask]
            if not near(mine, theirs):
                bad.append(f"step {i} {name}: {own[name]} instead of {want}")
    return bad


def wrong_weights(record: dict[str, Any], trainer: PPOTrainer) -> list[str]:
    own = {n: p.detach().double() for n, p in trainer.model.named_parameters()}
    return [
        name
        for name, want in record["final_param_sums"].items()
        if NOISE not in name
        and [float(own[name].sum()), float(own[name].abs().sum())]
        != pytest.approx(want, rel=1e-5, abs=2e-4)
    ]


CASES = ["default", "kl_abs", "kl_full"]


@pytest.mark.parametrize("case", CASES)
def test_statistics_and_weights(case: str, shared: Path) -> None:
    record, found, trainer = train(shared / "golden" / "classic" / case)
    assert wrong_statistics(record, found) == []
    assert wrong_weights(record, trainer) == []


@pytest.mark.parametrize("case", CASES)
def test_advantages_of_each_token(case: str, shared: Path) -> None:
    """TRL logs whole padded rows in the order of its shuffles; ours are the trained tokens."""
    record, found, trainer = train(shared / "golden" / "classic" / case)
    step, own = record["steps"][-1], found[-1]
    mask, evidence, advantage_output = (
        response_grid(step),
        trainer._recorder.advantage_inputs,
        trainer._recorder.advantage_output,
    )
    assert evidence is not None
    assert advantage_output is not None
    rows = [
        a[m].numpy()
        for a, m in zip(advantage_output.advantages, evidence.rollout.loss_mask, strict=True)
    ]
    epochs = record["config"].get("ppo_epochs", 4)
    theirs = np.asarray(step["stats"]["ppo/policy/advantages"]).reshape(epochs, *mask.shape)
    for one_pass in theirs:
        matches = [
            [near(row, x[m]) for row, m in zip(rows, mask, strict=True)].index(True)
            for x in one_pass
        ]
        assert sorted(matches) == list(range(8))
    assert near(
        np.sort(own["ppo/policy/advantages"]), np.sort(np.tile(np.concatenate(rows), epochs))
    )
    first = own["ppo/policy/ratio"][: int(mask.sum())]
    assert near(first, np.ones(len(first)))


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (1, 8)], ids=str)
def test_micro_batches_change_nothing(sizes: tuple[int, int], shared: Path) -> None:
    rows, passes = sizes
    record, found, trainer = train(
        shared / "golden" / "classic" / "default",
        mini_batch_size=rows,
        gradient_accumulation_steps=passes,
    )
    assert wrong_statistics(record, found) == []
    assert wrong_weights(record, trainer) == []


@pytest.mark.filterwarnings("ignore:the KL to the reference")
@pytest.mark.parametrize(
    "change",
    [
        {"kl_penalty": "mse"},
        {"cliprange": 0.3},
        {"cliprange_value": 0.3},
        {"lam": 0.9},
        {"gamma": 0.99},
        {"vf_coef": 0.2},
        {"init_kl_coef": 0.1},
        {"whiten_rewards": True},
        {"score_clip": 1.0},
        {"use_score_scaling": True},
        {"max_grad_norm": 0.01},
        {"ratio_threshold": 1.00001},
        {"early_stopping": True, "target_kl": 1e-6},
        {"ppo_epochs": 3},
        {"mini_batch_size": 4},
        {"horizon": 10.0},
    ],
    ids=str,
)
def test_another_setting_gives_other_numbers(change: dict[str, Any], shared: Path) -> None:
    record, _, trainer = train(shared / "golden" / "classic" / "default", **change)
    assert wrong_weights(record, trainer)
