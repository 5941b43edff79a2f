"""The training half of an iteration, shared by the loop and by ``step()`` APIs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kedge.algorithms.base import Algorithm
from kedge.engine.batch_sizes import BatchSizes
from kedge.engine.early_stopping import StepLimits
from kedge.engine.hooks import Hooks
from kedge.engine.metrics import check_known
from kedge.engine.rollout.dynamic_sampling import REPLACED
from kedge.engine.seeds import seed_for
from kedge.engine.stages import make_experience, optimize
from kedge.errors import RewardError
from kedge.math.importance import Correction
from kedge.protocols import KLController, Learner
from kedge.types import Experience, RewardOutput, Rollout

logger = logging.getLogger(__name__)
MOST_UNSCORED = 10  # consecutive batches without any score; then training stops


@dataclass(slots=True, kw_only=True)
class Updater:
    """Trains on samples and holds the state of the run."""

    learner: Learner
    algorithm: Algorithm
    kl: KLController
    batch_sizes: BatchSizes
    hooks: Hooks = field(default_factory=Hooks)
    seed: int = 0
    value_warmup_steps: int = 0  # first iterations, which train only the value model
    correction: Correction | None = None  # importance weights of tokens
    max_token_lag: int | None = None  # tokens of older policy versions are left out of the loss
    step_limits: StepLimits = field(default_factory=StepLimits)
    clock: Callable[[], float] = time.perf_counter
    step: int = 0  # iterations finished
    # False in the middle of an iteration
    state_consistent: bool = field(default=True, init=False)
    _unscored: int = field(default=0, init=False)  # consecutive batches without any score
    _moves: int = field(default=0, init=False)  # iterations that trained the policy

    def train_on(
        self,
        rollout: Rollout,
        reward_output: RewardOutput,
        times: dict[str, float],
        *,
        begin: float | None = None,
    ) -> dict[str, float]:
        """Everything in an iteration after sampling; returns its metrics."""
        self.hooks.on_sample(self.step, rollout, reward_output)
        start = ready = self.clock()
        if float(self.learner.total(reward_output.valid.sum())):
            self._unscored = 0
            experience, metrics = make_experience(
                rollout,
                reward_output,
                self.learner,
                self.algorithm,
                self.kl.value,
                self.correction,
                self.max_token_lag,
            )
            self.hooks.on_experience(self.step, experience)
            ready = self.clock()
            fresh = not bool(
                ((rollout.version >= 0) & (rollout.version < self.learner.version)).any()
            )
            metrics |= self._optimize(experience, fresh=fresh)
        else:
            metrics = self._without_scores(len(rollout))
        self.learner.advance_version()
        self.kl.update(metrics.get("objective/kl", 0.0), self.batch_sizes.batch_size)
        self.step += 1
        moved = metrics.get("grad_norm/policy", 0.0) * metrics.get("lr", 0.0) > 0
        self._moves += moved and self.step > self.value_warmup_steps
        done = self.clock()
        seconds = done - (start if begin is None else begin)
        if REPLACED in times:
            replaced = torch.tensor(times[REPLACED], dtype=torch.float64)
            times = times | {REPLACED: float(self.learner.total(replaced))}
        metrics |= times | {
            "time/annotate": ready - start,
            "time/update": done - ready,
            "time/step": seconds,
            "episode": float(self.step * self.batch_sizes.batch_size),
        }
        if "completions/mean_length" in metrics:
            tokens = metrics["completions/mean_length"] * self.batch_sizes.batch_size
            metrics["tokens_per_second"] = tokens / max(seconds, 1e-9)
        check_known(metrics)
        self.state_consistent = True
        return metrics

    def _optimize(self, experience: Experience, *, fresh: bool) -> dict[str, float]:
        # In low precision, log-probabilities differ between passes of different shapes.
        one_step = self.batch_sizes.epochs * self.batch_sizes.minibatches == 1
        anchor_new = fresh and one_step and self.learner.low_precision
        return optimize(
            experience,
            self.learner,
            self.algorithm,
            epochs=self.batch_sizes.epochs,
            minibatches=self.batch_sizes.minibatches,
            micro_rows=self.batch_sizes.micro_rows,
            max_tokens=self.batch_sizes.max_tokens_per_micro_batch,
            seed=seed_for(self.seed, "shuffle", self.step),
            only_value=self.step < self.value_warmup_steps,
            anchor_new=anchor_new,
            step_limits=self.step_limits,
            before_step=self._mark_inconsistent,
            after_step=self.hooks.on_optimizer_step,
        )

    def _without_scores(self, rows: int) -> dict[str, float]:
        """Metrics of a batch without any valid reward, which is skipped.

        Raises:
            RewardError: too many consecutive batches without a score.
        """
        self._unscored += 1
        problem = f"none of the {rows} responses in this batch could be scored"
        if self._unscored >= MOST_UNSCORED:
            raise RewardError(
                f"{problem}, nor in the {MOST_UNSCORED - 1} batches before it; see the log for the"
                ' first failure, or set on_reward_error="raise" to stop there'
            )
        logger.warning("%s; it is skipped", problem)
        return {
            "rollout/dropped_rows": float(self.batch_sizes.batch_size),
            "val/num_eos_tokens": 0.0,
        }

    def _mark_inconsistent(self) -> None:
        """From here on the weights are not those after ``step`` iterations."""
        self.state_consistent = False

    def state_dict(self) -> dict[str, Any]:
        """The state of the run without samples in flight (those are saved as records)."""
        return {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "kl": self.kl.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``."""
        self.step, self.state_consistent = int(state["step"]), True
        self.learner.load_state_dict(state["learner"])
        self.kl.load_state_dict(state["kl"])
