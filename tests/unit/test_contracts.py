"""What plugged-in parts may hand over: a slip is named, and never spreads by broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kedge.algorithms import Algorithm, reinforce_pp
from kedge.errors import ConfigError, KedgeError, PreflightError, RewardError, RolloutError
from kedge.testing import ScriptedRollouts
from kedge.types import Loss, MicroBatch, PolicyOutput, RewardOutput
from tests.e2e.small import small


def rule(**changes: Any) -> Algorithm:
    return replace(reinforce_pp(), name="mine", **changes)


def credited(change: Callable[[Any], Any]) -> Algorithm:
    return rule(
        compute_advantages=lambda e, kl_coef: change(reinforce_pp().compute_advantages(e, kl_coef))
    )


def averaged(new: PolicyOutput, mb: MicroBatch) -> Loss:
    """The usual slip: a mean, where a weighted sum is asked for."""
    ratio = ((new.logprobs - mb.rows.old_logprobs) * mb.rows.loss_mask).exp()
    return Loss(parts={"policy": -(ratio * mb.rows.advantages).mean()})


def rounded(new: PolicyOutput, mb: MicroBatch) -> Loss:
    """A sound loss, and rounding errors that depend on the rows of a pass."""
    parts = reinforce_pp().loss(new, mb).parts
    return Loss(parts=parts | {"rounding": torch.tensor(1e-5 * (len(mb.rows) < 4))})


def equal_scores(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


class Says:
    def __init__(self, found: Any) -> None:
        self.found = found

    def score(self, rollout: Any) -> Any:
        return self.found(len(rollout))


def judged(scores: int, valid: int) -> Says:
    return Says(
        lambda rows: RewardOutput(
            scores=torch.zeros(rows + scores), valid=torch.ones(rows + valid, dtype=torch.bool)
        )
    )


calls: list[int] = []


def late_nan(rows: int) -> RewardOutput:
    calls.append(rows)
    scores = torch.arange(rows).float()
    scores[1] = torch.nan if len(calls) > 1 else 1.0
    return RewardOutput(scores=scores, valid=torch.ones(rows, dtype=torch.bool))


CASES: dict[str, tuple[dict[str, Any], type[KedgeError], str]] = {
    "a number per response as advantages": (
        {"algorithm": credited(lambda c: replace(c, advantages=c.advantages[:, 0]))},
        ConfigError,
        r"advantages from compute_advantages of mine must .* shape \(4, \d\), got \(4,\);",
    ),
    "returns of one column": (
        {"algorithm": credited(lambda c: replace(c, returns=c.advantages[:, :1]))},
        ConfigError,
        r"returns from compute_advantages of mine must .*, got \(4, 1\)",
    ),
    "advantages that are NaN": (
        {"algorithm": credited(lambda c: replace(c, advantages=c.advantages * torch.nan))},
        ConfigError,
        "compute_advantages of mine returned advantages that are not finite",
    ),
    "a loss that is a mean": (
        {"algorithm": rule(loss=averaged)},
        PreflightError,
        "loss of mine is .* for 4 rows and .* in two micro-batches.*without a mean",
    ),
    "a mean, where all scores are equal": (
        {"algorithm": rule(loss=averaged), "reward_model": None, "reward_funcs": equal_scores},
        PreflightError,
        "loss of mine is .* for 4 rows and .* in two micro-batches.*without a mean",
    ),
    "a loss that overflows": (
        {"algorithm": rule(loss=lambda new, mb: Loss(parts={"policy": new.logprobs.sum() / 0}))},
        PreflightError,
        "the loss of mine is -inf for 4 rows .* or divides by zero",
    ),
    "scores whose squares overflow": (
        {"reward_model": None, "reward_funcs": lambda completions: [1e38] * len(completions)},
        PreflightError,
        r"got 1e\+38 for row 0. Scale the rewards down",
    ),
    "a source that gives a list": (
        {"reward_model": None, "reward_funcs": Says(lambda rows: [1.0] * rows)},
        RewardError,
        "Says.score must return a kedge.types.RewardOutput, got list",
    ),
    "scores for other rows": (
        {"reward_model": None, "reward_funcs": judged(-2, 0)},
        RewardError,
        r"scores of shape \(2,\) and valid of shape \(4,\) for 4 responses",
    ),
    "a score that is NaN, after the first batch": (
        {"reward_model": None, "reward_funcs": Says(late_nan)},
        RewardError,
        "rewards must be finite, got nan for row 1",
    ),
    "responses without a token": (
        {"rollout_engine": ScriptedRollouts([[[], [], [], []]])},
        RolloutError,
        "ScriptedRollouts.generate returned responses without tokens",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_slip_is_named(name: str) -> None:
    parts, kind, words = CASES[name]
    calls.clear()
    with pytest.raises(kind, match=words):
        small(**parts).train()


def test_rounding_does_not_stop_a_run_whose_first_scores_are_equal() -> None:
    """In bf16 a group of equal scores leaves the loss of GRPO nothing but rounding errors."""
    parts = {"reward_model": None, "reward_funcs": equal_scores, "kl_coef": 0.0}
    small(algorithm=rule(loss=rounded), **parts).train()


def test_numbers_at_the_edge_of_their_ranges_train() -> None:
    trainer = small(
        cliprange=2**64,
        cliprange_value=math.inf,
        vf_coef=0,
        lam_alpha=2**64,
        gamma=0,
        lam_value=0,
        kl_coef=0,
        adam_beta1=0,
        adam_beta2=0,
        max_grad_norm=math.inf,
        num_train_epochs=0.5,
        eval_delay=2**53,
        warmup_steps=2**53,
        stop_strings=["\N{CHESTNUT}"],
    )
    trainer.train()
    assert trainer.state.global_step == 2
