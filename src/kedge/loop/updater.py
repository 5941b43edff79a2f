"""The training half of an iteration, shared by the loop and by ``step()`` APIs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from kedge.algorithms.base import Algorithm
from kedge.algorithms.transforms import divide_scores, start_ratios_at_1
from kedge.loop.batch_metrics import batch_metrics
from kedge.loop.batch_sizes import BatchSizes
from kedge.loop.control import StepControl, StepLimits
from kedge.loop.metrics import check_known
from kedge.loop.stages import EpochPlan, make_experience, optimize
from kedge.math.ratios import Correction
from kedge.math.running import RunningMoments
from kedge.records.errors import RewardError
from kedge.records.protocols import Hook, KLController, Learner
from kedge.records.seeds import seed_for
from kedge.records.types import REWARD_ERRORS, RewardOutput, Rollout, Sample
from kedge.rollout.scheduler.collector import REPLACED

logger = logging.getLogger(__name__)
MOST_UNSCORED = 10  # consecutive batches without any score; then training stops


@dataclass(slots=True, kw_only=True)
class Updater:
    """Trains on samples and holds the state of the run."""

    learner: Learner
    algorithm: Algorithm
    kl: KLController
    batch_sizes: BatchSizes
    hooks: Sequence[Hook] = ()
    seed: int = 0
    value_warmup_steps: int = 0  # first iterations, which train only the value model
    value_passes: int = 1  # passes of the value model per pass of the policy
    entropy_coef: float = 0.0  # see StepControl
    reward_scale: RunningMoments | None = None  # of scores, which are divided by their deviation
    correction: Correction | None = None  # importance weights of tokens
    max_token_lag: int | None = None  # tokens of older policy versions are left out of the loss
    step_limits: StepLimits = field(default_factory=StepLimits)
    clock: Callable[[], float] = time.perf_counter
    step: int = 0  # iterations finished
    # False in the middle of an iteration
    state_consistent: bool = field(default=True, init=False)
    _unscored: int = field(default=0, init=False)  # consecutive batches whose scores all failed
    _warned: bool = field(default=False, init=False)  # of a batch whose rewards are all None
    _moves: int = field(default=0, init=False)  # iterations that trained the policy

    def train_on(self, sample: Sample, *, begin: float | None = None) -> dict[str, float]:
        """Run an iteration after sampling; returns its metrics."""
        rollout, reward_output, times = sample.rollout, sample.reward_output, sample.times
        for hook in self.hooks:
            hook.on_sample(self.step, rollout, reward_output)
        start = self.clock()
        if float(self.learner.all_reduce(reward_output.valid.sum())):
            self._unscored = 0
            metrics = self._learn(rollout, reward_output)
        else:
            metrics = self._without_scores(rollout, reward_output)
        self.learner.advance_version()
        batch_size = self.batch_sizes.batch_size
        if self.step >= self.value_warmup_steps and "objective/kl" in metrics:
            self.kl.update(metrics["objective/kl"], batch_size)
        self.step += 1
        moved = metrics.get("grad_norm/policy", 0.0) * metrics.get("lr", 0.0) > 0
        self._moves += moved and self.step > self.value_warmup_steps
        done = self.clock()
        seconds = done - (start if begin is None else begin)
        annotate = metrics.setdefault("time/annotate", 0.0)
        if REPLACED in times:
            replaced = torch.tensor(times[REPLACED], dtype=torch.float64)
            times = {**times, REPLACED: float(self.learner.all_reduce(replaced))}
        metrics |= {
            **times,
            "time/update": done - start - annotate,
            "time/step": seconds,
            "episode": float(self.step * batch_size),
        }
        if "completions/mean_length" in metrics:
            tokens = metrics["completions/mean_length"] * batch_size
            metrics["tokens_per_second"] = tokens / max(seconds, 1e-9)
        check_known(metrics)
        self.state_consistent = True
        return metrics

    def _learn(self, rollout: Rollout, reward_output: RewardOutput) -> dict[str, float]:
        """Compute the experience of a batch and train on it; returns its metrics."""
        sizes, start, algorithm = self.batch_sizes, self.clock(), self.algorithm
        moments = copy(self.reward_scale)  # kept once the iteration has not failed
        if moments is not None:
            moments.update(reward_output.scores[reward_output.valid])
            algorithm = divide_scores(algorithm, moments.std)
        experience, terms = make_experience(
            rollout,
            reward_output,
            self.learner,
            algorithm,
            self.kl.value,
            self.correction,
            self.max_token_lag,
        )
        metrics = batch_metrics(experience, terms, self.learner)
        for hook in self.hooks:
            hook.on_experience(self.step, experience)
        metrics["time/annotate"] = self.clock() - start
        stale = (rollout.policy_version >= 0) & (rollout.policy_version < self.learner.version)
        # In low precision, log-probabilities differ between passes of different shapes.
        one_pass = self.learner.low_precision and sizes.optimizer_steps_per_iteration == 1
        direct = self.correction is not None and self.correction.kind == "ratio"
        if one_pass and not direct and not bool(stale.any()):
            algorithm = start_ratios_at_1(algorithm)
        plan = EpochPlan(
            epochs=sizes.epochs,
            minibatches=sizes.minibatches,
            micro_rows=sizes.micro_rows,
            max_tokens=sizes.max_tokens_per_micro_batch,
            seed=seed_for(self.seed, "shuffle", self.step),
            value_passes=self.value_passes,
            only_value=self.step < self.value_warmup_steps,
        )
        control = StepControl(
            limits=self.step_limits,
            entropy_coef=self.entropy_coef,
            before_step=self._mark_inconsistent,
            after_step=self._end_optimizer_step,
        )
        metrics |= optimize(experience, self.learner, algorithm, plan, control)
        self.reward_scale = moments
        return metrics

    def _without_scores(self, rollout: Rollout, reward_output: RewardOutput) -> dict[str, float]:
        """Metrics of a batch without any valid reward, which is skipped.

        A reward that fails ends the run, in the first batch or after several; None does not.
        """
        dropped = float(self.batch_sizes.batch_size)
        metrics = {"rollout/dropped_rows": dropped, "val/num_eos_tokens": 0.0}
        errors = sum(name.startswith(REWARD_ERRORS) for name in reward_output.metrics)
        errors += not reward_output.components  # a source that tells no None from a failure
        if rollout.episodes is not None:
            errors += int((~rollout.episodes.valid).sum())
        problem = f"none of the {len(rollout)} responses in this batch could be scored"
        if not float(self.learner.all_reduce(torch.tensor(float(errors)))):
            if not self._warned:
                logger.warning(
                    "%s: every reward is None. Such batches train nothing, and are counted in"
                    " rollout/dropped_rows; this is logged once",
                    problem,
                )
            self._warned = True
            return metrics
        self._unscored += 1
        if not self.step:
            raise RewardError(f"{problem}; see the log for rewards and environments that fail")
        if self._unscored >= MOST_UNSCORED:
            raise RewardError(
                f"{problem}, nor in the {MOST_UNSCORED - 1} batches before it; see the log for the"
                ' first failure, or set on_reward_error="raise" to stop there'
            )
        logger.warning("%s; it is skipped", problem)
        return metrics

    def _mark_inconsistent(self) -> None:
        """Record that weights are in the middle of an iteration."""
        self.state_consistent = False

    def _end_optimizer_step(self) -> None:
        for hook in self.hooks:
            hook.on_optimizer_step()

    def state_dict(self) -> dict[str, Any]:
        """The state of the run without samples in flight (those are saved as records)."""
        return {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "kl": self.kl.state_dict(),
            "reward_scale": self.reward_scale and self.reward_scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``."""
        self.step, self.state_consistent = int(state["step"]), True
        self.learner.load_state_dict(state["learner"])
        self.kl.load_state_dict(state["kl"])
        if self.reward_scale is not None and state.get("reward_scale"):
            self.reward_scale.load_state_dict(state["reward_scale"])
