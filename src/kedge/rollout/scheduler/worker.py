"""One rollout engine of several: its weights, and the groups that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from kedge.records.errors import SyncError
from kedge.records.protocols import RolloutEngine
from kedge.records.seeds import seed_for
from kedge.records.types import SYNC_GAP, PromptBatch, Receipt, Rollout, Sampling, group_rows
from kedge.rollout.liveness import starting
from kedge.rollout.scheduler.collector import RolloutCollector, first_rows
from kedge.rollout.scheduler.joining import GroupPrompts, with_groups


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
    greedy: Rollout | None = None  # one greedy response per group, in ascending order of their ids
    numbers: list[int]
    times: Mapping[str, float] = field(default_factory=dict)  # seconds, and metrics
    step: int  # iterations finished when the engine's weights were taken


def list_engines(rollouts: RolloutEngine) -> tuple[RolloutEngine, ...]:
    """The engines that can sample concurrently: the parts of a composite engine, or the engine."""
    return tuple(getattr(rollouts, "engines", ())) or (rollouts,)


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
    slots: int  # responses sampled at once; 0: samples partial batches
    update: WeightUpdate | None = None  # the loaded weights
    held: dict[int, int] = field(default_factory=dict)  # group -> version it started with
    unfinished: int = 0  # responses being sampled
    busy: bool = False
    _fingerprint: str = ""
    _seconds: float = 0.0  # sampling time since groups were last completed
    gap: dict[str, float] = field(default_factory=dict)  # metric of the last weight sync
    # with greedy baselines: groups that wait for their greedy response, and finished responses
    _deferred: dict[int, tuple[PromptBatch, int]] = field(default_factory=dict)
    _greedy: dict[int, Rollout] = field(default_factory=dict)

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
        for state in (self.held, self._deferred, self._greedy):
            state.clear()
        self.unfinished = 0

    def count_unfinished(self) -> None:
        """Update the number of unfinished responses, deferred groups included."""
        deferred = sum(len(batch) for batch, _ in self._deferred.values())
        self.unfinished = self.engine.unfinished + deferred

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
        begin, greedy = collector.clock(), collector.algorithm.needs_greedy
        for step, turn, batch in prompts.prompts(numbers):
            purpose = f"rollout again {turn - 1}" if turn else "rollout"
            seed = seed_for(collector.seed, purpose, step)
            if greedy:
                self._submit_greedy(batch, collector.sampling, seed)
            else:
                self.engine.submit(batch, sampling=collector.sampling, seed=seed)
        rollout: Rollout | None = self.engine.advance()
        if greedy and rollout is not None:
            rollout = self._continue(rollout, collector.sampling)
        self._seconds += collector.clock() - begin
        if rollout is None:
            return None
        self.check(rollout)
        seconds, self._seconds = self._seconds, 0.0
        assert self.update is not None
        groups = group_rows(rollout.prompts)[0]
        return SampledNumbers(
            rollout=rollout,
            greedy=Rollout.cat([self._greedy.pop(n) for n in groups]) if greedy else None,
            numbers=groups,
            times={"time/rollout": seconds, **self.gap},
            step=self.update.step,
        )

    def _submit_greedy(self, batch: PromptBatch, sampling: Sampling, seed: int) -> None:
        """Start the greedy responses; the groups follow as soon as these are complete."""
        for number, rows in zip(*group_rows(batch), strict=True):
            self._deferred[number] = batch.rows(rows), seed
        first = batch.rows(first_rows(batch))
        first = replace(first, group=-1 - first.group)  # ids of groups are not negative
        # Top-k, top-p and min-p keep the most likely token, and rows that are joined must agree on
        # whether allowed tokens are recorded.
        self.engine.submit(first, sampling=replace(sampling, temperature=0.0), seed=seed)

    def _continue(self, rollout: Rollout, sampling: Sampling) -> Rollout | None:
        """Start groups whose greedy response is complete; return the rows of finished groups."""
        group = rollout.prompts.group
        for i in (group < 0).nonzero()[:, 0].tolist():
            number = -1 - int(group[i])
            answer = rollout.rows(slice(i, i + 1))
            self._greedy[number] = replace(answer, prompts=with_groups(answer.prompts, [number]))
            batch, seed = self._deferred.pop(number)
            self.engine.submit(batch, sampling=sampling, seed=seed)
        rows = (group >= 0).nonzero()[:, 0]
        return rollout.rows(rows) if len(rows) else None

    def check(self, rollout: Rollout) -> None:
        """Compare the version of every row with that of the weights when it was started."""
        versions = zip(rollout.prompts.group.tolist(), rollout.policy_version.tolist(), strict=True)
        for number, version in versions:
            if 0 <= version < self.held[number]:
                raise SyncError(
                    f"{type(self.engine).__name__} must sample with version {self.held[number]},"
                    f" which it confirmed, but used version {version}"
                )
