"""Sampling in small pieces, each trained on as soon as it is done: no waiting for the longest.

A batch is cut into pieces of whole groups.  Every lane (one engine) takes the next piece with the
newest weights there are, and a training step takes the pieces that were finished first, so that one
long response holds up its own piece and no other.  What is trained on therefore depends on timing.

The staleness bound does not.  A piece that was begun with the weights of update ``v`` has to be
trained on by step ``v + max_lag``.  Two rules keep that always possible, with ``K`` pieces a step:

    beginning   piece number n begins only if n < (newest update + max_lag + 1) K
    taking      of the pieces due by step t, at most (t - s) K are left after step s, for every t

A step waits for pieces that the second rule names; nothing is ever dropped.  Compare the admission
rule of AReaL (arXiv:2505.24298, section 5.1).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from torch import Tensor

from kedge.engine.rollout.collector import (
    LockedRewardSource,
    PendingSample,
    RolloutCollector,
    Sample,
)
from kedge.engine.rollout.joining import joined, split_groups
from kedge.engine.rollout.threads import working
from kedge.engine.rollout.weight_sync import WeightUpdate, verify_sync
from kedge.errors import CheckpointError, ConfigError, SyncError
from kedge.protocols import RolloutEngine
from kedge.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialBatch:
    """Part of a batch: begun, or done if there is a sample."""

    number: int  # of the run; its prompts are of step ``number // K``
    since: int  # updates finished when it began
    sample: Sample | None = None


@dataclass(slots=True, kw_only=True)
class _EngineWorker:
    """One engine, and the weights that it holds."""

    engine: RolloutEngine
    held: str = ""
    version: int = -1
    moves: int = 0


def num_workers(rollouts: RolloutEngine) -> tuple[RolloutEngine, ...]:
    """The engines that can sample at the same time: those that one consists of, or itself."""
    return tuple(getattr(rollouts, "lanes", ())) or (rollouts,)


def chosen(
    done: Sequence[PartialBatch],
    running: Sequence[PartialBatch],
    *,
    step: int,
    max_lag: int,
    per_step: int,
) -> list[PartialBatch] | None:
    """The pieces to train on now, or None: wait.

    Args:
        done: finished pieces, first finished first.
        running: begun, and not finished.
        step: the training step that takes them.
        max_lag: a piece may be trained on until step ``since + max_lag``.
        per_step: pieces of a step.
    """
    picked: list[PartialBatch] = []
    for later in range(max_lag + 1):
        due = [p for p in done if p.since + max_lag <= step + later]
        coming = sum(p.since + max_lag <= step + later for p in running)
        must = len(due) + coming - later * per_step
        free = [p for p in due if p not in picked]
        missing = must - (len(due) - len(free))
        if missing > len(free):
            return None
        picked += free[: max(0, missing)]
    picked += [p for p in done if p not in picked][: per_step - len(picked)]
    return picked if len(picked) == per_step else None


@dataclass(slots=True)
class AsCompletedScheduler:
    """Pieces in the order in which they are finished, none older than ``max_lag``.

    Args:
        pieces: how many a batch is cut into; divides its prompts.
        max_lag: updates that sampling may be ahead of training, at least 1.
    """

    pieces: int
    max_lag: int
    collector: RolloutCollector = field(init=False)
    _done: list[PartialBatch] = field(default_factory=list, init=False)
    _running: list[PartialBatch] = field(default_factory=list, init=False)
    _next: int = field(default=0, init=False)
    _end: int = field(default=0, init=False)
    _newest: WeightUpdate | None = field(default=None, init=False)
    _paused: bool = field(default=False, init=False)
    _closing: bool = field(default=False, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _turn: threading.Condition = field(default_factory=threading.Condition, init=False)
    _lanes: list[_EngineWorker] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.max_lag < 1:
            raise ConfigError(
                "pieces are trained on as they are done only with max_lag of 1 or more"
            )

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """How samples are drawn from now on, and what draws them: each lane in its own thread."""
        self.collector = replace(collector, reward=LockedRewardSource(collector.reward))
        if [each.engine for each in self._lanes] != list(num_workers(rollouts)):
            self._lanes = [_EngineWorker(engine=engine) for engine in num_workers(rollouts)]

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Sample while inside; what was sampled ahead stays afterwards."""
        self._next = max(self._next, step * self.pieces)
        self._end = until * self.pieces
        self._newest, self._failure, self._closing, self._paused = None, None, False, False
        threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"rollout {n}", daemon=True)
            for n, lane in enumerate(self._lanes)
        ]
        for thread in threads:
            thread.start()
        with working(threads, close=self._close, drop=self._drop):
            yield

    def _close(self) -> None:
        with self._turn:
            self._closing = True
            self._turn.notify_all()

    def _drop(self) -> None:
        """Forget what was sampled; the next step begins with its own prompts."""
        self._done, self._running, self._next, self._failure = [], [], 0, None

    def send(self, weight_update: WeightUpdate) -> None:
        """Begin every piece from now on with these weights."""
        with self._turn:
            self._newest = weight_update
            self._turn.notify_all()

    def next_sample(self, step: int) -> Sample:
        """The samples that training step ``step`` learns from."""
        with self._turn:
            self._paused = False
            self._turn.notify_all()
            while (picked := self._pick(step)) is None:
                self._turn.wait()
            self._done = [p for p in self._done if p not in picked]
        samples = [p.sample for p in sorted(picked, key=lambda p: p.number) if p.sample]
        rollout, reward_output, times = joined(samples, self.collector.source.batch(step))
        for name in times:
            if name.startswith("time/"):
                times[name] /= len(self._lanes)
        return rollout, reward_output, times

    def _pick(self, step: int) -> list[PartialBatch] | None:
        if self._failure is not None:
            raise self._failure
        picked = chosen(
            self._done, self._running, step=step, max_lag=self.max_lag, per_step=self.pieces
        )
        if picked is None and not self._running and self._next >= self._bound():
            raise RuntimeError(
                f"step {step} waits for pieces that nobody samples: {len(self._done)} are done and"
                f" {self._next} begun, with {self.pieces} a step and max_lag={self.max_lag}"
            )
        return picked

    def _bound(self) -> int:
        """How many pieces of the run may have begun by now."""
        if self._newest is None:
            return self._next + 1  # once there are weights
        return min(self._end, (self._newest.step + self.max_lag + 1) * self.pieces)

    def mark_consumed(self) -> None:
        """What was taken last was trained on; it is in nobody's way."""

    def recover_after_error(self, step: int) -> None:
        """After a failure at ``step``: nothing is kept, and sampling begins with its prompts."""
        self._close()
        with self._turn:
            while self._running:
                self._turn.wait()
            self._drop()
            self._next = step * self.pieces

    def wait_for_syncs(self) -> None:
        """Nothing to wait for: a lane checks the receipt before it samples."""

    @property
    def in_flight(self) -> list[PendingSample]:
        """What was sampled ahead and not yet trained on; begins nothing until the next ``take``."""
        with self._turn:
            self._paused = True
            while self._running and self._failure is None:
                self._turn.wait()
            if self._failure is not None:
                raise self._failure
            return [p.sample for p in self._done if p.sample]

    def restore(self, samples: list[PendingSample], step: int) -> None:
        """Take samples as already drawn, as after a resume at ``step``.

        Raises:
            CheckpointError: they are not pieces of the size of this run, or too old for its lag.
        """
        found = []
        for n, sample in enumerate(samples):
            if isinstance(sample, Rollout):
                raise CheckpointError(
                    f"the checkpoint holds {len(samples)} batches of a run in order, still to be"
                    " scored: resume with the rollout_schedule of before"
                )
            version = sample[0].version
            known = version[version >= 0]
            since = int(known.min()) if len(known) else step
            found.append(PartialBatch(number=step * self.pieces + n, since=since, sample=sample))
        size = len(self.collector.source.batch(step)) // self.pieces
        wrong = [len(p.sample[0]) for p in found if p.sample and len(p.sample[0]) != size]
        if wrong:
            raise CheckpointError(
                f"what was sampled ahead comes in pieces of {wrong[0]} responses, and this run's"
                f" have {size}: resume with the rollout_schedule and rollout_pieces of before"
            )
        for later in range(self.max_lag + 1):
            due = sum(p.since + self.max_lag <= step + later for p in found)
            if due > (later + 1) * self.pieces or any(p.since + self.max_lag < step for p in found):
                raise CheckpointError(
                    f"what was sampled ahead is too old for max_lag={self.max_lag}: resume with"
                    " the max_lag of before"
                )
        self._done, self._next = found, step * self.pieces + len(found)

    # -- in the threads of the lanes ------------------------------------------------------------

    def _serve(self, lane: _EngineWorker) -> None:
        with suppress(KeyboardInterrupt):  # which the driver had first
            self._sample_on(lane)

    def _sample_on(self, lane: _EngineWorker) -> None:
        while (begun := self._begin()) is not None:
            piece, weights = begun
            try:
                finished = replace(piece, sample=self._sample(lane, piece, weights))
            except BaseException as error:  # raised again where the driver waits
                with self._turn:
                    self._running = [each for each in self._running if each is not piece]
                    self._failure = self._failure or error
                    self._turn.notify_all()
                return
            with self._turn:
                self._running.remove(piece)
                self._done.append(finished)
                self._turn.notify_all()

    def _begin(self) -> tuple[PartialBatch, WeightUpdate] | None:
        """The next piece and its weights, once it may begin; None at the end."""
        with self._turn:
            while not (self._closing or self._failure):
                newest = self._newest
                if newest is not None and not self._paused and self._next < self._bound():
                    piece = PartialBatch(number=self._next, since=newest.step)
                    self._next += 1
                    self._running.append(piece)
                    return piece, newest
                self._turn.wait()
        return None

    def _sample(self, lane: _EngineWorker, piece: PartialBatch, newest: WeightUpdate) -> Sample:
        if lane.version != newest.version or not lane.held:
            receipt = lane.engine.load_weights(newest.weights, newest.version)
            moved = newest.moves > lane.moves and lane.held != ""
            lane.held = verify_sync(receipt, newest, held=lane.held, moved=moved)
            lane.version, lane.moves = newest.version, newest.moves
        step, part = divmod(piece.number, self.pieces)
        sample = self.collector.draw(step, lane.engine, self._rows(step, part))
        version = sample[0].version
        if bool(((version >= 0) & (version < newest.version)).any()):
            raise SyncError(
                f"{type(lane.engine).__name__} sampled with version {int(version.min())} after it"
                f" confirmed version {newest.version}"
            )
        return sample

    def _rows(self, step: int, part: int) -> Tensor:
        return split_groups(self.collector.source.batch(step), self.pieces)[part]
