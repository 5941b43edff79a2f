"""The training loop.  There is one; ``max_lag`` makes it synchronous or asynchronous.

Sampling and weight loading run on one first-in-first-out worker.  The driver decides the order
of both, so the schedule -- and with it every number -- is the same on a slow and a fast machine.
At lag 0 the worker is the driver itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

from kedge.engine.hooks import StepReport
from kedge.engine.resample import refill, spare_step
from kedge.engine.seeds import seed_for
from kedge.engine.stages import collect
from kedge.engine.updater import Updater
from kedge.errors import SyncError
from kedge.protocols import PromptSource, RewardSource, RolloutEngine
from kedge.types import Judgement, PromptBatch, Receipt, Rollout, Sampling

Sample = tuple[Rollout, Judgement, dict[str, float]]
P = ParamSpec("P")
R = TypeVar("R")


class Sync(NamedTuple):
    """Weights on their way to the sampler."""

    receipt: Future[Receipt | None]
    version: int
    fingerprint: str
    moved: bool  # the policy trained since the one before


class InlineExecutor(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call ``fn`` now; its result or exception waits in the returned future."""
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # handed over to whoever asks for the result
            future.set_exception(error)
        return future


@dataclass(slots=True, kw_only=True)
class Engine(Updater):
    """Everything one training run needs, and where it stands."""

    source: PromptSource
    rollouts: RolloutEngine
    judge: RewardSource
    sampling: Sampling
    max_lag: int = 0
    waiting: deque[Future[Sample]] = field(default_factory=deque)  # sampled ahead, not trained on
    _loaded: str = field(default="", init=False)  # fingerprint that the sampler last confirmed

    def __post_init__(self) -> None:
        if self.plan.group < self.algorithm.min_group:
            raise ValueError(
                f"{self.algorithm.name} compares responses to one prompt: it needs num_generations"
                f" >= {self.algorithm.min_group}, got {self.plan.group}"
            )

    def run(self, until: int) -> None:
        """Train up to update ``until``, or until a hook asks to stop; what is in flight is kept."""
        with self._worker() as worker:
            syncs = deque([self._sync(worker)])
            sent = self.step + len(self.waiting)
            stop = False
            while self.step < until and not stop:
                self.hooks.on_step_begin(self.step)
                begin = self.clock()
                while sent < until and sent - self.step <= self.max_lag:
                    self.waiting.append(self._sample(worker, sent))
                    sent += 1
                sample = self.waiting.popleft().result()
                self._settle(syncs)
                metrics = self.train_on(*sample, begin=begin)
                syncs.append(self._sync(worker))
                rollout, judgement, _ = sample
                report = StepReport(
                    step=self.step, metrics=metrics, rollout=rollout, judgement=judgement
                )
                stop = self.hooks.on_step_end(report)
            self._settle(syncs, wait=True)

    def _worker(self) -> Executor:
        if self.max_lag == 0:
            return InlineExecutor()
        return ThreadPoolExecutor(1, thread_name_prefix="rollout")

    def _sync(self, worker: Executor) -> Sync:
        """Send the newest weights after everything already asked of the sampler."""
        weights = {} if self.rollouts.live else self.learner.weights()
        version, moved = self.learner.version, self._moved
        self._moved = False
        receipt = worker.submit(self.rollouts.load_weights, weights, version)
        return Sync(receipt, version, self.learner.fingerprint(), moved)

    def _settle(self, syncs: deque[Sync], *, wait: bool = False) -> None:
        """Check the receipts that have come back; a lost weight update must never be silent."""
        while syncs and (wait or syncs[0].receipt.done()):
            coming, version, expected, moved = syncs.popleft()
            receipt = coming.result()
            if receipt is None:
                continue
            if (receipt.version, receipt.fingerprint) != (version, expected):
                raise SyncError(
                    f"the sampler reports weights {receipt.fingerprint} (version {receipt.version})"
                    f" after being sent {expected} (version {version}): it would sample from"
                    " another policy than the one that trains"
                )
            if moved and receipt.fingerprint == self._loaded:
                raise SyncError(
                    f"training step {version} had a gradient and a learning rate above 0, but the"
                    f" policy's weights did not change (fingerprint {expected}): the learning rate"
                    " is too small for their precision, or the optimiser holds other weights"
                )
            self._loaded = receipt.fingerprint

    def _sample(self, worker: Executor, step: int) -> Future[Sample]:
        prompts = self.source.batch(step)
        return worker.submit(lambda: self._draw(prompts, step))

    def _draw(self, prompts: PromptBatch, step: int) -> Sample:
        times: dict[str, float] = {}

        def collected(prompts: PromptBatch, purpose: str) -> tuple[Rollout, Judgement]:
            rollout, judgement, took = collect(
                prompts,
                self.rollouts,
                self.judge,
                sampling=self.sampling,
                seed=seed_for(self.seed, purpose, step),
                clock=self.clock,
                greedy=self.algorithm.needs_greedy,
            )
            times.update({name: times.get(name, 0.0) + x for name, x in took.items()})
            return rollout, judgement

        rollout, judgement = collected(prompts, "rollout")
        rounds = self.algorithm.resample
        if rounds:
            rollout, judgement, count = refill(
                rollout,
                judgement,
                prompts=lambda turn: self.source.batch(spare_step(step, turn, rounds)),
                draw=lambda fresh, turn: collected(fresh, f"rollout again {turn}"),
                rounds=rounds,
            )
            times["rollout/resampled_groups"] = float(count)
        return rollout, judgement, times

    @property
    def in_flight(self) -> list[Sample]:
        """What was sampled ahead and not yet trained on; waits for what is still being sampled."""
        return [future.result() for future in self.waiting]

    def put_back(self, samples: list[Sample]) -> None:
        """Take samples as already drawn for the next updates, as after a resume."""
        self.waiting = deque(_done(sample) for sample in samples)


def _done(sample: Sample) -> Future[Sample]:
    future: Future[Sample] = Future()
    future.set_result(sample)
    return future
