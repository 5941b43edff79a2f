"""One pool of rollout engines, and one dispatcher, for all ranks that train together."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Client, Listener
from typing import Any

import torch

from kedge.errors import CheckpointError, KedgeError, RewardError
from kedge.protocols import RolloutEngine
from kedge.rollout.scheduler.collector import PendingSample, RewardPool, RolloutCollector
from kedge.rollout.scheduler.joining import join_groups
from kedge.rollout.scheduler.scheduler import RolloutScheduler
from kedge.rollout.scheduler.worker import WeightUpdate
from kedge.rollout.shared import RankGroups
from kedge.types import RewardOutput, Rollout, Sample


class PooledScheduler:
    """The scheduler of rank 0, which has the engines and the prompts of all ranks.

    Each group is scored by the rank that has been idle for longest.  An iteration's groups are
    dealt to the ranks: equally many to each, with about as many tokens.  Every rank makes the same
    calls in the same order; errors of rank 0 are raised on all.

    Args:
        build: builds the scheduler; called with ``ranks`` on rank 0.
        ranks: of which rank 0 has the engines.
    """

    collector: RolloutCollector  # of this rank

    def __init__(self, build: Callable[..., RolloutScheduler], ranks: RankGroups) -> None:
        self._ranks = ranks
        self._first = build(ranks=ranks.size) if ranks.rank == 0 else None
        self._rewards = self._connect()

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector of this rank, and the rollout engine used from now on."""
        self.collector = collector

        def work(first: RolloutScheduler) -> None:
            source: Any = collector.source
            reward = RewardPool([collector.reward, *self._rewards])
            first.configure(replace(collector, source=source.whole(), reward=reward), rollouts)

        self._run_on_first(work)

    @contextmanager
    def open(self, step: int, until: int) -> Iterator[None]:
        """Context in which the iterations from ``step`` to ``until`` are sampled."""
        with nullcontext() if self._first is None else self._first.open(step, until):
            yield

    def send(self, weight_update: WeightUpdate) -> None:
        """New weights, which rank 0 has."""
        if self._first is not None:
            self._first.send(weight_update)

    def next_sample(self, step: int) -> Sample:
        """This rank's part of the sample of iteration ``step``; blocks until it is ready."""
        first = self._first
        samples: list[Sample] = self._ranks.scatter(
            lambda: [] if first is None else first.deal(step)
        )
        return join_groups(samples, self.collector.source.batch(step))

    def recover_after_error(self, step: int) -> None:
        """After a failure in iteration ``step``: sampling ends."""
        if self._first is not None:
            self._first.recover_after_error(step)

    def wait_for_syncs(self) -> None:
        """Engines confirm weights before they sample with them."""

    def wait_until_idle(self) -> None:
        """Wait until others can use the engines; they resume at the next ``next_sample``."""
        self._run_on_first(RolloutScheduler.wait_until_idle)

    @property
    def in_flight(self) -> list[PendingSample]:
        """What to save of the samples not trained on: rank 0 saves those of all ranks."""
        pending: list[PendingSample] = []
        self._run_on_first(lambda first: pending.extend(first.in_flight))
        return pending

    def restore(self, samples: Sequence[PendingSample], step: int) -> None:
        """Use the samples of rank 0 first, as after a resume at ``step``.

        Raises:
            CheckpointError: they are not those of a run with these settings, or too old.
        """
        if samples and self._first is None:
            raise CheckpointError(
                f"the checkpoint has samples of learner {self._ranks.rank}, but learners share"
                " their rollout engines: resume with the version that wrote it"
            )
        self._run_on_first(lambda first: first.restore(samples, step))

    def _run_on_first(self, call: Callable[[RolloutScheduler], None]) -> None:
        def work(ranks: Sequence[None]) -> list[None]:
            assert self._first is not None
            call(self._first)
            return [None] * len(ranks)

        self._ranks.run_on_first(None, work)

    def _connect(self) -> list[_RankReward]:
        """On rank 0 the reward sources of the other ranks, where a thread scores with theirs."""
        ranks, key = self._ranks, os.urandom(32)
        listener = Listener(("", 0), backlog=ranks.size, authkey=key) if ranks.rank == 0 else None
        mine = None if listener is None else (listener.address[1], key)
        port, key = ranks.run_on_first(mine, lambda addresses: addresses[:1] * ranks.size)
        if listener is not None:
            with listener:
                return [_RankReward(listener.accept()) for _ in range(ranks.size - 1)]
        first = Client((os.environ.get("MASTER_ADDR", "127.0.0.1"), port), authkey=key)
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(target=self._serve, args=(first, gpu), name="scoring", daemon=True).start()
        return []

    def _serve(self, first: Any, gpu: int | None) -> None:
        """Body of a thread: score what rank 0 sends, until it ends."""
        torch.get_num_threads()  # torch sets the thread count of a thread at its first query
        if gpu is not None:
            torch.cuda.set_device(gpu)
        with suppress(EOFError, OSError):
            while True:
                rollout = pickle.loads(first.recv_bytes())
                try:
                    answer: Any = self.collector.reward.score(rollout)
                except KedgeError as error:
                    answer = error
                except Exception as error:
                    answer = RewardError(f"{type(error).__name__}: {error}")
                first.send_bytes(pickle.dumps(answer))


class _RankReward:
    """The reward source of another rank."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank  # the connection

    def score(self, rollout: Rollout) -> RewardOutput:
        try:
            # Not ``send``, which would share tensors between processes of one machine.
            self._rank.send_bytes(pickle.dumps(rollout))
            answer: RewardOutput | Exception = pickle.loads(self._rank.recv_bytes())
        except (EOFError, OSError) as error:
            raise RewardError("closed by peer: a learner ended while it scored") from error
        if isinstance(answer, Exception):
            raise answer
        return answer
