"""One rollout engine of several: its weights, and the groups that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from kedge.records.errors import SyncError
from kedge.records.protocols import EngineInfo, RolloutEngine, read_info
from kedge.records.seeds import seed_for
from kedge.records.types import SYNC_GAP, Receipt, Rollout, group_rows
from kedge.rollout.liveness import starting
from kedge.rollout.scheduler.collector import RolloutCollector
from kedge.rollout.scheduler.joining import GroupPrompts


class WeightUpdate(NamedTuple):
    """The weights after an iteration, which every rollout engine must load."""

    weights: Mapping[str, Tensor]  # empty if the engine shares the learner's modules
    version: int
    fingerprint: str
    step: int  # iterations finished
    moves: int  # finished iterations that trained the policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledNumbers:
    """Samples of some groups of the dispatcher, to be scored."""

    rollout: Rollout
    numbers: list[int]
    times: Mapping[str, float] = field(default_factory=dict)  # seconds, and metrics
    step: int  # iterations finished when the engine's weights were taken


def list_engines(rollouts: RolloutEngine) -> tuple[RolloutEngine, ...]:
    """The engines that can sample concurrently: the parts of a composite engine, or the engine."""
    return tuple(read_info(rollouts, EngineInfo).engines) or (rollouts,)


def _check_needs_no_receipt(engine: RolloutEngine) -> None:
    """Refuse None from an engine with separate weights: it may sample from old ones unseen."""
    if engine.shares_weights or engine.logprob_kind == "none":  # "none": perhaps without weights
        return
    name = type(engine).__name__
    raise SyncError(
        f"{name}.load_weights must return a kedge.records.types.Receipt, got None: with"
        f" shares_weights=False and logprob_kind={engine.logprob_kind!r} it has separate weights,"
        " and could sample from old ones unseen. Return Receipt(version=version, fingerprint=...),"
        " with kedge.models.fingerprint.fingerprint() of all weights of the policy that it holds"
    )


@dataclass(slots=True, kw_only=True, eq=False)
class EngineWorker:
    """An engine that samples groups.  Its methods are called from one thread at a time."""

    engine: Any  # RolloutEngine, or ContinuousEngine if it has slots
    slots: int  # responses sampled at once; 0: samples whole batches
    update: WeightUpdate | None = None  # the loaded weights
    held: dict[int, int] = field(default_factory=dict)  # group -> version it started with
    unfinished: int = 0  # responses being sampled
    busy: bool = False
    _fingerprint: str = ""
    _seconds: float = 0.0  # sampling time since groups were last completed
    gap: dict[str, float] = field(default_factory=dict)  # metric of the last weight sync

    def reset(self) -> None:
        """Drop all groups, and load weights before sampling again."""
        self.update, self._fingerprint, self.busy, self._seconds = None, "", False, 0.0
        self.release_all()
        if self.slots:
            self.engine.cancel()

    def hold(self, numbers: list[int], version: int, rows: int) -> None:
        """Record that these groups of ``rows`` responses start with weights of ``version``."""
        self.held.update(dict.fromkeys(numbers, version))
        self.unfinished += len(numbers) * rows

    def release(self, numbers: list[int]) -> None:
        """Record that these groups are done."""
        for number in numbers:
            del self.held[number]

    def release_all(self) -> None:
        """Record that the engine holds no groups."""
        self.held.clear()
        self.unfinished = 0

    def load(self, new: WeightUpdate) -> None:
        """Load weights and verify them."""
        first = self.update is None and new.weights
        text = f"{type(self.engine).__name__} loads and verifies version {new.version}"
        with starting(text) if first else nullcontext():
            receipt: Receipt | None = self.engine.load_weights(new.weights, new.version)
        if receipt is None:
            _check_needs_no_receipt(self.engine)
        else:
            moved = self.update is not None and new.moves > self.update.moves
            self._verify(receipt, new, moved=moved)
            self._fingerprint = receipt.fingerprint
        # Drop the tensors: only the newest weights stay in memory.
        self.update = new._replace(weights={})
        gap = None if receipt is None else receipt.gap
        self.gap = {} if gap is None else {SYNC_GAP: gap}

    def _verify(self, receipt: Receipt, sent: WeightUpdate, *, moved: bool) -> None:
        """Compare the engine's receipt with the weights sent, and with those before."""
        if (receipt.version, receipt.fingerprint) != (sent.version, sent.fingerprint):
            raise SyncError(
                f"weight sync failed: the rollout engine must have weights {sent.fingerprint}"
                f" (version {sent.version}), but reports {receipt.fingerprint} (version"
                f" {receipt.version}); it would sample from another policy than the one being"
                " trained"
            )
        if moved and receipt.fingerprint == self._fingerprint:
            raise SyncError(
                f"iteration {sent.version} had a gradient and a learning rate above 0, but the"
                f" policy's weights did not change (fingerprint {sent.fingerprint}): the learning"
                " rate is too small for their precision, or the optimizer has other parameters"
            )

    def advance(
        self, numbers: list[int], collector: RolloutCollector, prompts: GroupPrompts
    ) -> SampledNumbers | None:
        """Start these groups and sample; returns the groups that are done."""
        begin = collector.clock()
        for step, turn, batch in prompts.prompts(numbers):
            purpose = f"rollout again {turn - 1}" if turn else "rollout"
            seed = seed_for(collector.seed, purpose, step)
            self.engine.submit(batch, sampling=collector.sampling, seed=seed)
        rollout: Rollout | None = self.engine.advance()
        self._seconds += collector.clock() - begin
        if rollout is None:
            return None
        self.check(rollout)
        seconds, self._seconds = self._seconds, 0.0
        assert self.update is not None
        return SampledNumbers(
            rollout=rollout,
            numbers=group_rows(rollout.prompts)[0],
            times={"time/rollout": seconds, **self.gap},
            step=self.update.step,
        )

    def check(self, rollout: Rollout) -> None:
        """Compare the version of every row with that of the weights when it was started."""
        versions = zip(rollout.prompts.group.tolist(), rollout.policy_version.tolist(), strict=True)
        for number, version in versions:
            if 0 <= version < self.held[number]:
                raise SyncError(
                    f"{type(self.engine).__name__} must sample with version {self.held[number]},"
                    f" which it confirmed, but used version {version}"
                )
