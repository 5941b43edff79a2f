"""Which steps of PPO are called when a subclass overrides them, and with which arguments.

An override that returns what it would have returned leaves the weights as they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kedge.classic import PPOTrainer
from kedge.classic.stats_recorder import KEYS
from kedge.classic.steps import STEPS
from tests.classic_models import gpt2, moved, samples, t5, watching

pytestmark = pytest.mark.filterwarnings("ignore:the KL to the reference")
CALLS = {  # of one step: two forward passes before, and two epochs of two mini-batches
    "_step_safety_checker": 1,
    "prepare_model_inputs": 1,
    "batched_forward_pass": 6,
    "compute_rewards": 1,
    "_kl_penalty": 8,
    "compute_advantages": 1,
    "loss": 4,
    "train_minibatch": 4,
    "_early_stop": 2,
    "record_step_stats": 1,
    "gather_stats": 0,  # on several processes: tests/e2e/test_classic_ranks.py
    "optional_peft_ctx": 0,  # with an adapter: see below
}


def test_the_table_of_steps_is_whole() -> None:
    assert set(CALLS) == set(STEPS)


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    held: dict[str, Any] = {}
    for make in (gpt2, t5):
        change, _, stats = moved(None, make, early_stopping=True, target_kl=100.0)
        held[make.__name__] = (change, stats)
    return held


@pytest.mark.parametrize("make", [gpt2, t5])
@pytest.mark.parametrize("name", STEPS)
def test_an_override_is_called_and_changes_nothing_by_itself(
    name: str, make: Any, usual: dict[str, Any]
) -> None:
    calls: list[Any] = []
    change, found, stats = moved(watching(name, calls), make, early_stopping=True, target_kl=100.0)
    assert len(calls) == 2 * CALLS[name]  # two updates
    want, fast = usual[make.__name__]
    # An overridden loss counts as in TRL: the mean of the mini-batches' means.  Exact: see below.
    if name == "loss":
        assert (change - want).norm() < 0.2 * want.norm()
    else:
        assert torch.allclose(change, want, atol=1e-5)
    assert list(stats) == list(KEYS)
    assert found.current_step == 2
    assert found.kl_ctl.value == pytest.approx(trainer_kl(fast, found), rel=1e-4)
    for key in ("objective/kl", "ppo/mean_scores", "ppo/policy/approxkl", "ppo/val/error"):
        near = 0.1 if name == "loss" else 0.05
        assert stats[key] == pytest.approx(fast[key], rel=near, abs=1e-4), key
    assert stats["objective/logprobs"].shape == fast["objective/logprobs"].shape


def trainer_kl(stats: dict[str, Any], found: PPOTrainer) -> float:
    error = max(-0.2, min(0.2, stats["objective/kl"] / found.config.target - 1))
    return float(stats["objective/kl_coef"] * (1 + error * 8 / found.config.horizon))


def test_arguments_are_those_of_trl() -> None:
    """Shapes of TRL 0.11.4: B = 8 rows of S - 1 = 10 tokens, mini-batches of 4."""
    queries, responses, _ = samples(seed=1)
    width = max(len(q) + len(r) for q, r in zip(queries, responses, strict=True)) - 1
    whole, mini, vocabulary = (8, width), (4, width), 28
    every: dict[str, list[Any]] = {name: [] for name in STEPS}
    methods = {name: vars(watching(name, calls))[name] for name, calls in every.items()}
    moved(type("Watching", (PPOTrainer,), methods))
    seen = {name: calls[len(calls) // 2 :] for name, calls in every.items()}
    ((args, kwargs),) = seen["_step_safety_checker"]
    assert args[0] == 8
    assert [len(x) for x in args[1:4]] == [8, 8, 8]
    assert args[4] is None
    ((args, kwargs),) = seen["prepare_model_inputs"]
    assert [x.tolist() for x in args[0]] == [q.tolist() for q in queries]
    first, second, *others = seen["batched_forward_pass"]
    for args, kwargs in (first, second):
        assert args[3]["input_ids"].shape == args[3]["attention_mask"].shape == (8, width + 1)
        assert kwargs["return_logits"] is False
    assert first[1]["response_masks"] is None
    for args, kwargs in others:
        assert len(args[1]) == len(args[2]) == 4
        assert args[3]["input_ids"].shape == (4, width + 1)
        assert kwargs == {"return_logits": True}
    ((args, _),) = seen["compute_rewards"]
    assert [tuple(x.shape) for x in args] == [(8,), whole, whole, whole]
    assert args[3].dtype == torch.int64
    for args, _ in seen["_kl_penalty"]:
        assert [tuple(x.shape) for x in args] == [(width,), (width,)]
    ((args, _),) = seen["compute_advantages"]
    assert [tuple(x.shape) for x in args] == [whole] * 3
    for args, _ in seen["train_minibatch"]:
        shapes = [tuple(x.shape) for x in args]
        assert shapes == [mini, mini, mini, (*mini, vocabulary), mini, mini, mini, mini]
        assert [x.requires_grad for x in args] == [False, False, True, True, True, *[False] * 3]
    for args, _ in seen["loss"]:
        assert tuple(args[2].shape) == (*mini, vocabulary)
        assert args[5].dtype == torch.int64
    ((args, kwargs),) = seen["record_step_stats"]
    assert not args
    assert set(kwargs) == {
        *("scores", "logprobs", "ref_logprobs", "non_score_reward", "train_stats", "kl_coef"),
        *("masks", "queries", "responses", "kls"),
    }
    assert kwargs["train_stats"]["loss/total"].shape == (4, 1)  # one of each mini-batch
    assert kwargs["train_stats"]["policy/ratio"].shape[0] == 1
