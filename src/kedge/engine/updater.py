"""One update: what the loop does with samples, and what a ``step`` API does with those given."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kedge.algorithms.base import Algorithm
from kedge.engine.brakes import Brakes
from kedge.engine.hooks import Hooks, NoHooks
from kedge.engine.metrics import check_known
from kedge.engine.plan import BatchPlan
from kedge.engine.resample import REPLACED
from kedge.engine.seeds import seed_for
from kedge.engine.stages import make_experience, optimise
from kedge.errors import RewardError
from kedge.math.offpolicy import Correction
from kedge.protocols import KLController, Learner
from kedge.types import Experience, Judgement, Rollout

logger = logging.getLogger(__name__)
MOST_UNSCORED = 10  # batches in a row without any score; then the reward is taken to be broken


@dataclass(slots=True, kw_only=True)
class Updater:
    """What learns from samples, and where it stands."""

    learner: Learner
    algorithm: Algorithm
    kl: KLController
    plan: BatchPlan
    hooks: Hooks = field(default_factory=NoHooks)
    seed: int = 0
    value_warmup_steps: int = 0  # first updates that train the value alone
    correction: Correction | None = None  # weigh tokens by learner against sampler
    brakes: Brakes = field(default_factory=Brakes)
    clock: Callable[[], float] = time.perf_counter
    step: int = 0  # updates finished
    whole: bool = field(default=True, init=False)  # the state is that after ``step`` updates
    _unscored: int = field(default=0, init=False)  # batches in a row without any score
    _moves: int = field(default=0, init=False)  # updates in which the policy trained

    def train_on(
        self,
        rollout: Rollout,
        judgement: Judgement,
        times: dict[str, float],
        *,
        begin: float | None = None,
    ) -> dict[str, float]:
        """One update from samples, whoever drew them: everything after sampling."""
        self.hooks.on_sample(self.step, rollout, judgement)
        start = ready = self.clock()
        if float(self.learner.total(judgement.valid.sum())):
            self._unscored = 0
            experience, metrics = make_experience(
                rollout, judgement, self.learner, self.algorithm, self.kl.value, self.correction
            )
            self.hooks.on_experience(self.step, experience)
            ready = self.clock()
            metrics |= self._optimise(experience)
        else:
            metrics = self._without_scores(len(rollout))
        self.learner.end_batch()
        self.kl.update(metrics.get("objective/kl", 0.0), self.plan.batch_size)
        self.step += 1
        moved = metrics.get("grad_norm/policy", 0.0) * metrics.get("lr", 0.0) > 0
        self._moves += moved and self.step > self.value_warmup_steps
        done = self.clock()
        whole = done - (start if begin is None else begin)
        if REPLACED in times:
            again = torch.tensor(times[REPLACED], dtype=torch.float64)
            times = times | {REPLACED: float(self.learner.total(again))}
        metrics |= times | {
            "time/annotate": ready - start,
            "time/update": done - ready,
            "time/step": whole,
            "episode": float(self.step * self.plan.batch_size),
        }
        if "completions/mean_length" in metrics:
            tokens = metrics["completions/mean_length"] * self.plan.batch_size
            metrics["tokens_per_second"] = tokens / max(whole, 1e-9)
        check_known(metrics)
        self.whole = True
        return metrics

    def _optimise(self, experience: Experience) -> dict[str, float]:
        return optimise(
            experience,
            self.learner,
            self.algorithm,
            epochs=self.plan.epochs,
            minibatches=self.plan.minibatches,
            micro_rows=self.plan.micro_rows,
            seed=seed_for(self.seed, "shuffle", self.step),
            only_value=self.step < self.value_warmup_steps,
            brakes=self.brakes,
            before_step=self._touched,
            after_step=self.hooks.on_optimizer_step,
        )

    def _without_scores(self, rows: int) -> dict[str, float]:
        """Metrics of a batch that teaches nothing, since no reward applies to any response.

        Raises:
            RewardError: it is one of many in a row.
        """
        self._unscored += 1
        what = f"none of the {rows} responses of this batch could be scored"
        if self._unscored >= MOST_UNSCORED:
            raise RewardError(
                f"{what}, nor of the {MOST_UNSCORED - 1} before it; see the log for the first"
                ' failure, or use on_reward_error="raise" to stop at it'
            )
        logger.warning("%s: nothing is learned from it", what)
        return {"rollout/dropped_rows": float(self.plan.batch_size), "val/num_eos_tokens": 0.0}

    def _touched(self) -> None:
        """From here on weights differ from those that ``step`` names."""
        self.whole = False

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, without what is in flight (that is saved as records)."""
        return {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "kl": self.kl.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.step, self.whole = int(state["step"]), True
        self.learner.load_state_dict(state["learner"])
        self.kl.load_state_dict(state["kl"])
