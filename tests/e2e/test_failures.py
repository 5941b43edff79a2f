"""What fails while training costs the update that it falls in, and nothing before."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from kedge import PPOTrainer, grpo, rloo
from kedge.algorithms.base import Algorithm
from kedge.checkpoint import checkpoint
from kedge.loop import updater
from kedge.records.errors import CheckpointError, DataError, KedgeError, RewardError, RolloutError
from kedge.records.types import Experience
from tests.environments.toys import Echo, played

from .small import PROMPTS, length_reward, rows, small
from .test_resume import assert_same, trainer, whole_run


def break_at(made: PPOTrainer, part: str, method: str, call: int, error: Exception) -> None:
    """One call of one method of a part of the engine fails; the calls before and after do not."""
    owner = getattr(made.engine, part)
    real, count = getattr(owner, method), itertools.count()

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if next(count) == call:
            raise error
        return real(*args, **kwargs)

    setattr(owner, method, sometimes)


def saved(folder: Path) -> list[int]:
    return [checkpoint.parse_step(p) for p in checkpoint.checkpoints(folder)]


@pytest.mark.parametrize(
    ("part", "method", "error"),
    [
        ("reward", "score", RewardError("the judge is out")),
        ("rollout_engine", "generate", RolloutError("out of paper")),
        ("source", "batch", DataError("no such row")),
        ("learner", "compute_logprobs", RuntimeError("out of memory")),
    ],
)
def test_a_failing_part_costs_no_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, method: str, error: Exception
) -> None:
    failing = trainer(tmp_path)
    before = {"learner": 3, "reward": 1}.get(part, 0)  # calls of the checks of the first batch
    break_at(failing, part, method, 4 + before, error)
    with pytest.raises(type(error), match=str(error)):
        failing.train()
    assert saved(tmp_path) == [3, 4]
    (said,) = [line for line in caplog.messages if "training stopped" in line]
    assert said == (
        f"training stopped after iteration 4 with {type(error).__name__}; no completed iteration"
        f" is lost. Fix the cause and resume from {tmp_path / 'checkpoint-4'} with"
        " train(resume_from_checkpoint=True), or --resume_from_checkpoint on the command line"
    )
    second = trainer(tmp_path)
    second.train(resume_from_checkpoint=True)
    assert_same(second, whole_run())


@pytest.mark.parametrize("call", [1, 4, 5])
def test_responses_sampled_ahead_wait_for_a_mended_reward(tmp_path: Path, call: int) -> None:
    """They were sampled with weights that are gone, so they are kept, and scored after all."""
    failing = trainer(tmp_path, max_lag=1, save_strategy="epoch")
    break_at(failing, "reward", "score", call, RewardError("the judge is out"))
    with pytest.raises(RewardError):
        failing.train()
    second = trainer(tmp_path, max_lag=1, save_strategy="epoch")
    second.train(resume_from_checkpoint=True)
    assert_same(second, whole_run(1))


def test_a_failure_before_the_first_step_of_an_update_costs_nothing(tmp_path: Path) -> None:
    """As when a batch of long responses runs out of memory in its backward pass."""
    failing = trainer(tmp_path, max_lag=1)
    four_updates = 4 * 2 * 2  # of two passes with two steps each
    break_at(failing, "learner", "optimizer_step", four_updates, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        failing.train()
    assert saved(tmp_path) == [3, 4]
    second = trainer(tmp_path, max_lag=1)
    second.train(resume_from_checkpoint=True)
    assert_same(second, whole_run(1))


def test_the_same_trainer_goes_on_after_a_failure(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_lag=1, save_strategy="no")
    break_at(made, "reward", "score", 3, RewardError("the judge is out"))
    with pytest.raises(RewardError):
        made.train()
    made.train()
    assert_same(made, whole_run(1))


def test_a_failing_evaluation_costs_no_update(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_dataset": PROMPTS[:8], "eval_strategy": "steps"}
    failing = trainer(tmp_path, eval_steps=4, **options)
    # Four updates and the checks of the first; the evaluation asks twice, for four prompts each.
    break_at(failing, "reward", "score", 5, RewardError("the judge is out"))
    with pytest.raises(RewardError):
        failing.train()
    assert saved(tmp_path) == [3, 4]


def test_groups_as_completed_begin_anew(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_lag": 1,
        "rollout_schedule": "as_completed",
        "total_episodes": 24,
        "save_strategy": "steps",
        "output_dir": str(tmp_path),
    }
    failing = small(**options)
    break_at(failing, "reward", "score", 5, RewardError("the judge is out"))
    with pytest.raises(RewardError):
        failing.train()
    (step,) = saved(tmp_path)
    assert step >= 2
    second = small(**options)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 6
    assert all(row["rollout/lag"] <= 1 for row in rows(second))


@pytest.mark.parametrize(
    ("options", "left", "why"),
    [
        ({"save_strategy": "no"}, [], "no checkpoint is written because save_strategy='no'"),
        ({"output_dir": None}, [], "no checkpoint is written because output_dir is not set"),
        ({"save_only_model": True}, [3, 4], "the models are in"),
    ],
    ids=["no", "nowhere", "models"],
)
def test_who_asked_for_less_than_checkpoints_gets_that(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    left: list[int],
    why: str,
) -> None:
    made = trainer(tmp_path, **options | {"output_dir": str(tmp_path)})
    made.args.output_dir = options.get("output_dir", str(tmp_path))
    break_at(made, "reward", "score", 5, RewardError("the judge is out"))
    with pytest.raises(RewardError):
        made.train()
    assert f"after iteration 4 with RewardError; {why}" in caplog.text
    assert saved(tmp_path) == left


def test_the_error_stays_what_it_was_when_nothing_can_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tmp_path)
    break_at(made, "reward", "score", 5, RewardError("the judge is out"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    real: Callable[..., Any] = checkpoint.write_manifest
    monkeypatch.setattr(
        checkpoint, "write_manifest", lambda f: (full if "4" in f.name else real)(f)
    )
    with pytest.raises(RewardError, match="the judge is out"):
        made.train()
    assert "saving a checkpoint failed: could not write" in caplog.text
    assert saved(tmp_path) == [3]


def test_a_reward_that_cannot_score_anything_is_asked_again(tmp_path: Path, monkeypatch) -> None:
    """Every score fails: the responses are kept, the scores are not."""
    monkeypatch.setattr("kedge.loop.updater.MOST_UNSCORED", 1)
    calls = itertools.count()

    def out(completions: list[str], **_: Any) -> list[Any]:
        if next(calls) >= 3:
            raise ValueError("the server is down")
        return length_reward(completions)

    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "total_episodes": 24,
        "save_strategy": "steps",
        "reward_model": None,
        "max_lag": 1,
        "on_reward_error": "drop",
    }
    with pytest.raises(RewardError, match="could be scored"):
        small(reward_funcs=out, **options).train()
    assert saved(tmp_path) == [3]
    calls = itertools.count(3)
    with pytest.raises(RewardError, match="see the log for rewards and environments that fail"):
        small(reward_model=None, reward_funcs=out, on_reward_error="drop").train()
    mended = small(reward_funcs=length_reward, **options)
    mended.train(resume_from_checkpoint=True)
    whole = small(reward_funcs=length_reward, **options | {"output_dir": str(tmp_path / "whole")})
    whole.train()
    assert rows(mended)[-1]["objective/scores"] == rows(whole)[-1]["objective/scores"]


def test_a_reward_that_does_not_return_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kedge.rewards.mixture.SLOW", 0.1)

    def slow(completions: list[str], **_: Any) -> list[float]:
        time.sleep(0.5)
        return length_reward(completions)

    small(reward_model=None, reward_funcs=slow).train()
    said = "reward slow has not returned after 0.1 s, called with 4 responses"
    assert caplog.messages.count(said) == 1  # as long as the first call is no news


class Paid(Echo):
    """The same for every turn."""

    def step(self, response: Any) -> Any:
        observation, _, *rest = super().step(response)
        return observation, 1.0, *rest


@pytest.mark.parametrize(
    ("schedule", "algorithm", "want"),
    [
        ("in_order", rloo(), [-3.0, -1.5, 4.5]),  # x - mean of the other two of 1, 2, 6
        ("as_completed", rloo(credit="turn"), [-3.0, -1.5, 4.5]),
        ("as_completed", grpo(), [-0.7559, -0.3779, 1.1339]),  # (x - 3) / sqrt(7)
    ],
)
def test_a_reward_that_hangs_costs_its_row_and_is_counted(
    schedule: str, algorithm: Algorithm, want: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the four episodes of a group: the others are compared with each other."""
    release, numbers = threading.Event(), dict[str, int]()
    real, made = updater.make_experience, list[Experience]()

    def hangs(completions: list[Any], **_: Any) -> list[float]:
        rows = [numbers.setdefault(str(x), len(numbers)) for x in completions]
        if 1 in rows:
            release.wait(60)
        return [[1.0, 99.0, 2.0, 6.0][row % 4] for row in rows]

    def watched(*given: Any) -> Any:
        experience, terms = real(*given)
        made.append(experience)
        return experience, terms

    monkeypatch.setattr(updater, "make_experience", watched)
    options = {"max_lag": 1, "rollout_schedule": schedule, "reward_timeout": 0.5, "kl_coef": 0.0}
    options |= {"algorithm": algorithm, "num_generations": 4, "environment": Paid}
    run = played(reward_funcs=hangs, **options)
    run.train()
    release.set()
    assert [row["rollout/dropped_rows"] for row in rows(run)] == [1, 0]
    assert rows(run)[0]["log/reward_errors/hangs"] == 1
    assert rows(run)[0]["rewards/hangs"] == 3  # of 1, 2, 6
    mask, advantages = made[0].loss_mask, made[0].advantages
    assert mask.any(1).tolist() == [True, False, True, True]
    for row, value in zip([0, 2, 3], want, strict=True):
        assert advantages[row][mask[row]] == pytest.approx(value, abs=1e-3)
    assert not advantages[1].any()


def test_groups_do_not_wait_for_each_others_asynchronous_rewards() -> None:
    running, most = 0, 0

    async def waits(completions: list[str], **_: Any) -> list[float]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.5)
        running -= 1
        return length_reward(completions)

    options = {"max_lag": 1, "rollout_schedule": "as_completed", "preflight": False}
    small(reward_model=None, reward_funcs=waits, **options).train()
    assert 2 <= most <= 8


def test_a_replayed_run_goes_on_after_a_failure(tmp_path: Path) -> None:
    trainer(tmp_path / "a", save_rollouts=str(tmp_path / "rec"), save_strategy="no").train()
    options = {"replay_rollouts": str(tmp_path / "rec"), "save_strategy": "epoch"}
    failing = trainer(tmp_path / "b", **options)
    break_at(failing, "learner", "optimizer_step", 2 * 2 * 2, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        failing.train()
    assert saved(tmp_path / "b") == [2]
    second = trainer(tmp_path / "b", **options)
    second.train(resume_from_checkpoint=True)
    assert_same(second, whole_run())


class Poison(TrainerCallback):
    """Makes a weight NaN at the end of iteration 3, before its checkpoint."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            with torch.no_grad():
                kwargs["model"].get_output_embeddings().weight[5, 0] = float("nan")


@pytest.mark.parametrize("lag", [0, 1])
def test_weights_that_are_not_finite_are_in_no_checkpoint_that_a_run_resumes(
    tmp_path: Path, lag: int, logged: Any
) -> None:
    def made(**options: Any) -> Any:
        sizes = {"total_episodes": 20, "num_ppo_epochs": 1, "save_steps": 1, "max_lag": lag}
        return small(
            output_dir=str(tmp_path), save_strategy="steps", save_total_limit=1, **sizes, **options
        )

    first = made(callbacks=[Poison()])
    with pytest.raises(CheckpointError, match=r"1 trained weights.*checkpoint-2 is the last"):
        first.train()
    assert saved(tmp_path) == [2]
    # as a release wrote it that did not look
    unaware = made(callbacks=[Poison()], save_only_model=False, resume_from_checkpoint=True)
    unaware.args.save_total_limit = 2
    unaware.engine.learner.non_finite_weights = list
    with pytest.raises(KedgeError, match=r"the policy returns nan|NaN or infinite log-prob"):
        unaware.train()
    assert saved(tmp_path) == [2, 3]
    with pytest.raises(CheckpointError, match=r"checkpoint-3 is damaged: weight .* is not finite"):
        made().train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    with logged(r"checkpoint-3 is damaged.* Resuming from .*checkpoint-2"):
        result = made().train(resume_from_checkpoint=True)
    assert result.global_step == 5
