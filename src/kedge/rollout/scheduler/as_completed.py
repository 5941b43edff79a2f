"""First that completes: an iteration takes the groups that were done first.

What is trained on depends on timing.  The staleness bound does not: the dispatcher says which
numbers start with which weights, see ``kedge.rollout.scheduler.dispatch``.  Engines hold groups
(the responses to one prompt) in their slots, and get another one when slots become free.

New weights reach an engine when the groups that it holds are done, or at once with in-flight weight
updates: then each token has the version that sampled it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from kedge.algorithms import Algorithm
from kedge.records.errors import CheckpointError, ConfigError
from kedge.records.protocols import EngineInfo, Ranks, RewardInfo, RolloutEngine, read_info
from kedge.records.types import Sample, add_times
from kedge.rollout.scheduler.collector import (
    REPLACED,
    PendingSample,
    RewardPool,
    RolloutCollector,
)
from kedge.rollout.scheduler.dispatch import Dispatcher, deal
from kedge.rollout.scheduler.joining import GroupPrompts, SampleStore, join_groups, restore_groups
from kedge.rollout.scheduler.rank_rewards import RankReward, connect
from kedge.rollout.scheduler.state import SchedulerState
from kedge.rollout.scheduler.worker import (
    EngineWorker,
    SampledNumbers,
    WeightUpdate,
    list_engines,
)


def check_algorithm(algorithm: Algorithm) -> None:
    """Refuse an algorithm whose greedy responses come before those of a prompt."""
    if algorithm.needs_greedy:
        raise ConfigError(
            f"{algorithm.name} needs a greedy response to each prompt, which"
            ' rollout_schedule="as_completed" does not sample; set rollout_schedule="in_order"'
        )


class AsCompleted:
    """Groups as completed, none older than ``max_lag``.

    The dispatcher numbers groups.  With dynamic sampling, a group whose scores are all equal is not
    done: it starts again with another prompt, at most as many times as there are rounds.

    Args:
        max_lag: iterations that sampling may be ahead of training, at least 1.
        in_flight: engines get new weights while they sample.
        ranks: that share the engines of rank 0, which samples for all; each trains on an equal part
            of every iteration.  They make the same calls in the same order.
    """

    _source: Any  # the prompts of this rank
    _prompts: GroupPrompts

    def __init__(
        self, max_lag: int, *, in_flight: bool = False, ranks: Ranks | None = None
    ) -> None:
        if max_lag < 1:
            raise ConfigError(
                f'rollout_schedule="as_completed" needs max_lag of at least 1, got {max_lag}'
            )
        self.state = SchedulerState(
            dispatcher=Dispatcher(per_step=1, max_lag=max_lag, in_flight=in_flight),
            updates=deque(maxlen=1),  # only the newest
        )
        self._ranks = ranks
        self._num_ranks = 1 if ranks is None else ranks.size
        self._others: list[RankReward] | None = None  # connected with the first collector
        self._store = SampleStore()  # scored, not trained on
        self._times: dict[str, float] = {}  # of groups that were all replaced
        # "now": engines pause between tokens; "empty": when they hold no groups
        self._pause: Literal["", "now", "empty"] = ""

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector and the rollout engine used from now on."""
        check_algorithm(collector.algorithm)
        state = self.state
        state.collector, self._source, source = collector, collector.source, collector.source
        state.workers, state.num_scorers = [], 0
        if self._others is None:
            self._others = [] if self._ranks is None else connect(self._ranks, state)
        if self._ranks is not None:
            if self._ranks.rank:
                return  # rank 0 samples
            source = self._source.whole()
        own = [collector.reward] * read_info(collector.reward, RewardInfo).parallel
        pool = RewardPool([*own, *self._others])
        state.num_scorers = pool.size
        state.collector = replace(collector, source=source, reward=pool)
        infos = [(engine, read_info(engine, EngineInfo)) for engine in list_engines(rollouts)]
        name = type(rollouts).__name__
        if not all(info.slots for _, info in infos):
            raise ConfigError(
                'rollout_schedule="as_completed" needs a rollout engine that holds single requests,'
                f" but {name} samples whole batches (vLLM: with vllm_sleep; embedded: models with"
                " sliding windows or recurrent layers, or without positions; custom engines:"
                ' without EngineInfo.slots); set rollout_schedule="in_order"'
            )
        state.workers = [EngineWorker(engine=engine, slots=info.slots) for engine, info in infos]
        if state.dispatcher.in_flight and not all(info.updates_in_flight for _, info in infos):
            raise ConfigError(
                "in_flight_weight_updates=True needs a rollout engine that gets weights while it"
                f" holds single requests, but {name} does not (vLLM: not with an adapter); leave it"
                " out"
            )

    def begin(self, step: int) -> None:
        """Give back the groups that engines held."""
        self._read_prompts(step)
        self._pause = ""
        self.state.drop_sampled()
        dispatcher = self.state.dispatcher
        dispatcher.give_back(list(dispatcher.running))
        dispatcher.next = max(dispatcher.next, step * dispatcher.per_step)
        dispatcher.step, dispatcher.end = step, self.state.until * dispatcher.per_step

    def _read_prompts(self, step: int) -> None:
        collector = self.state.collector
        rounds = collector.algorithm.resample
        self._prompts = GroupPrompts(collector.source, step, rounds=rounds)
        self.state.dispatcher.per_step = self._prompts.per_step

    def request(self, step: int) -> None:
        """End a pause."""
        self._pause = ""

    def next_work(self, worker: EngineWorker) -> tuple[WeightUpdate | None, list[int]] | None:
        """The newest weights, if the engine may load them, and groups for its free slots."""
        state = self.state
        if not state.updates or self._pause == "now" or state.closing or state.failure:
            return None
        newest = state.updates[-1]
        full = self._room(newest.step) <= 0
        changed = worker.update is None or worker.update.version != newest.version
        load = changed and (state.dispatcher.in_flight or not worker.held)
        update = newest if load else None
        numbers = [] if self._pause or full else self._start(worker, update, newest)
        if numbers or (worker.held and (update is not None or not full)):
            return update, numbers
        return None

    def _start(
        self, worker: EngineWorker, new: WeightUpdate | None, newest: WeightUpdate
    ) -> list[int]:
        """Choose groups for an engine's free slots, with its weights or those it will load."""
        dispatcher, update = self.state.dispatcher, new or worker.update
        assert update is not None
        if not dispatcher.may_start(update.step, newest.step):
            return []  # it completes its groups, then loads the newest weights
        rows, workers = self._prompts.rows_per_group, self.state.workers
        free = max((worker.slots - worker.unfinished) // rows, not worker.held)
        ahead = dispatcher.startable(update.step) + len(dispatcher.running)
        limit = min(free, -(-ahead // len(workers)) - len(worker.held))
        held = sum(w.unfinished for w in workers) / rows
        limit = int(min(limit, self._room(update.step) - held))
        numbers = dispatcher.start(update.step, max(limit, 0))
        worker.hold(numbers, update.version, rows)
        return numbers

    @property
    def _num_held(self) -> int:
        """Number of groups that all engines hold together."""
        return sum(len(worker.held) for worker in self.state.workers)

    def _room(self, version: int) -> float:
        """Number of further groups that may complete with weights of ``version``, in flight."""
        dispatcher = self.state.dispatcher
        if not dispatcher.in_flight:
            return math.inf
        return dispatcher.room(version, len(dispatcher.running) - self._num_held)

    def sample(self, worker: EngineWorker, numbers: list[int]) -> None:
        """Start these groups, and sample for a short time."""
        state = self.state
        assert worker.update is not None
        with state.lock:
            full = not numbers and self._room(worker.update.step) <= 0
        if full:
            return
        sampled = worker.advance(numbers, state.collector, self._prompts)
        with state.lock:
            worker.unfinished = worker.engine.unfinished
            if sampled is not None:
                worker.release(sampled.numbers)
                state.sampled.append(sampled)
                state.changed.notify_all()

    def add(self, sampled: Sequence[SampledNumbers], sample: Sample) -> None:
        """Store the scored samples of these groups."""
        dispatcher = self.state.dispatcher
        versions = {number: x.step for x in sampled for number in x.numbers}
        times, self._times = add_times([self._times, sample.times]), {}
        if replaced := self._groups_to_replace(sample):
            self._prompts.replace(replaced)
            dispatcher.give_back(replaced)
            self.state.work.notify_all()
            versions = {n: version for n, version in versions.items() if n not in replaced}
            if not versions:
                self._times = times
                return
            kept = ~torch.isin(sample.rollout.prompts.group, torch.tensor(replaced))
            sample = sample.rows(kept.nonzero()[:, 0])
        self._store.add(replace(sample, times=times))
        for number, version in versions.items():
            dispatcher.complete([number], version)

    def _groups_to_replace(self, sample: Sample) -> list[int]:
        """Groups of equal scores that have rounds left."""
        algorithm = self.state.collector.algorithm
        rounds = algorithm.resample
        if not rounds:
            return []
        uniform = algorithm.uniform(sample.rollout, sample.reward_output)
        groups = sample.rollout.prompts.group[uniform].unique().tolist()
        return [number for number in groups if self._prompts.turn(number) < rounds]

    def take(self, step: int) -> list[list[Sample]] | None:
        """The groups that were done first, dealt to the ranks by their tokens."""
        if (numbers := self.state.dispatcher.take(step)) is None:
            return None
        self._prompts.forget_before(step)
        if self._ranks is None:
            return [self._part(numbers)]
        tokens = {number: self._store.tokens(number) for number in numbers}
        return [self._part(dealt) for dealt in deal(tokens, self._num_ranks)]

    def _part(self, numbers: list[int]) -> list[Sample]:
        """The samples of these groups; seconds are those of one engine."""
        samples, each = self._store.take(numbers), self._num_ranks / len(self.state.workers)
        times = [
            {name: x * each if name.startswith("time/") else x for name, x in sample.times.items()}
            for sample in samples
        ]
        if self.state.collector.algorithm.resample:
            times[0][REPLACED] = float(self._prompts.pop_turns(numbers))
        return [replace(x, times=of) for x, of in zip(samples, times, strict=True)]

    def join(self, parts: Callable[[], list[list[Sample]]], step: int) -> Sample:
        """Join the groups of this rank, whose share rank 0 sends."""
        if self._ranks is None:
            return join_groups(parts()[0], self._prompts.batch(step))
        return join_groups(self._ranks.scatter(parts), self._source.batch(step))

    def wait_for_syncs(self) -> None:
        """Groups need not wait: engines confirm weights before they sample with them."""

    def wait_until_idle(self) -> None:
        """Wait until others can use the engines; they resume at the next ``request``."""
        with self.state.lock:
            self._wait_for_pause("now" if self.state.dispatcher.in_flight else "empty")

    def in_flight(self) -> list[PendingSample]:
        """Scored groups, and those that are being sampled as prompts; pauses as above."""
        with self.state.lock:
            self._wait_for_pause("now")
            dispatcher = self.state.dispatcher
            started = [*dispatcher.running, *dispatcher.returned]
            prompts = [batch for *_, batch in self._prompts.prompts(started)]
            return [*self._store.read(), *(replace(batch, columns={}) for batch in prompts)]

    def _wait_for_pause(self, pause: Literal["now", "empty"]) -> None:
        """Wait until no thread is at work and, with "empty", no engine holds groups."""
        state, self._pause = self.state, pause
        state.work.notify_all()

        def at_work() -> bool:
            busy = any(w.busy or (pause == "empty" and w.held) for w in state.workers)
            return bool(busy or state.scoring or state.sampled)

        def wait(ranks: Sequence[None]) -> Sequence[None]:
            state.wait_while(at_work)
            return ranks

        if self._ranks is None:
            wait([])
        else:  # a failure is raised on every rank
            self._ranks.run_on_first(None, wait)

    def clear(self, step: int) -> None:
        """Drop all samples; ``step`` starts with its first prompts."""
        self._store.clear()
        self.state.drop_sampled()
        self.state.dispatcher.clear(step)
        for worker in self.state.workers:
            worker.release_all()

    def recover(self, step: int) -> None:
        """Nothing is kept: the groups of an iteration depend on timing anyway."""
        self.clear(step)

    def restore(self, samples: Sequence[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``."""
        if samples and self._ranks is not None and self._ranks.rank:
            raise CheckpointError(
                "the checkpoint has samples of every learner, but learners share their rollout"
                " engines: resume with the version that wrote it"
            )
        self._read_prompts(step)
        self.clear(step)
        dispatcher = self.state.dispatcher
        versions, lost = restore_groups(
            samples, self._store, size=self._prompts.rows_per_group, step=step
        )
        if not dispatcher.restore(step, versions, lost):
            raise CheckpointError(
                f"samples in the checkpoint are too old for max_lag={dispatcher.max_lag}:"
                " resume with the same max_lag"
            )
