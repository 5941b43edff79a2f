"""One pool of rollout engines, and one dispatcher, for all ranks that train together."""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from kedge.errors import CheckpointError, KedgeError, RewardError
from kedge.protocols import RewardSource, RolloutEngine
from kedge.rollout.scheduler.collector import PendingSample, RewardPool, RolloutCollector
from kedge.rollout.scheduler.joining import join_groups
from kedge.rollout.scheduler.scheduler import RolloutScheduler
from kedge.rollout.scheduler.worker import WeightUpdate
from kedge.rollout.shared import RankGroups
from kedge.types import RewardOutput, Rollout, Sample

_CONNECT = 60.0  # seconds to reach rank 0


class PooledScheduler:
    """The scheduler of rank 0, which has the engines, for all ranks.

    It samples the prompts of all ranks.  Groups are scored by the ranks, each by the one that has
    been idle for longest.  An iteration's groups are dealt to the ranks, equally many to each, and
    about as many tokens.  Every rank makes the same calls in the same order.

    Args:
        build: the scheduler, called with ``ranks`` on rank 0.
        ranks: of which rank 0 has the engines.
    """

    def __init__(self, build: Callable[..., RolloutScheduler], ranks: RankGroups) -> None:
        self._ranks = ranks
        self._first = build(ranks=ranks.size) if ranks.rank == 0 else None
        self._collector: RolloutCollector | None = None
        self._reward_sources = connect(ranks, self._score)

    @property
    def _local(self) -> RolloutCollector:
        assert self._collector is not None  # set with the engines
        return self._collector

    def _score(self, rollout: Rollout) -> RewardOutput:
        return self._local.reward.score(rollout)

    def configure(self, collector: RolloutCollector, rollouts: RolloutEngine) -> None:
        """Set the collector of this rank, and the rollout engine used from now on.

        Raises:
            ConfigError: weights cannot be updated in flight.
        """
        self._collector = collector

        def work(first: RolloutScheduler) -> None:
            source: Any = collector.source
            reward = RewardPool([collector.reward, *self._reward_sources])
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

        def work(_: Sequence[None]) -> list[list[Sample]]:
            assert self._first is not None
            return self._first.deal(step)

        samples = self._ranks.run_on_first(None, work)
        return join_groups(samples, self._local.source.batch(step))

    def recover_after_error(self, step: int) -> None:
        """After a failure in iteration ``step``: sampling ends."""
        if self._first is not None:
            self._first.recover_after_error(step)

    def wait_for_syncs(self) -> None:
        """Engines confirm weights before they sample with them."""

    def wait_until_idle(self) -> None:
        """Wait until others can use the engines; they resume at the next ``next_sample``."""
        self._run_on_first(lambda first: first.wait_until_idle())

    @property
    def in_flight(self) -> list[PendingSample]:
        """What to save of the samples not trained on; rank 0 saves those of all ranks."""
        pending: list[PendingSample] = []
        self._run_on_first(lambda first: pending.extend(first.in_flight))
        return pending

    def restore(self, samples: Sequence[PendingSample], step: int) -> None:
        """Use these samples first, as after a resume at ``step``.

        Raises:
            CheckpointError: they are not those of a run with these settings, or too old.
        """

        def work(counts: Sequence[int]) -> list[None]:
            assert self._first is not None
            if any(counts[1:]):
                raise CheckpointError(
                    "the checkpoint has samples of every learner, but learners share their rollout"
                    " engines: resume with the version and the options that wrote it"
                )
            self._first.restore(samples, step)
            return [None] * len(counts)

        self._ranks.run_on_first(len(samples), work)

    def _run_on_first(self, call: Callable[[RolloutScheduler], None]) -> None:
        """Call rank 0's scheduler there; an error is raised on every rank."""

        def work(ranks: Sequence[None]) -> list[None]:
            assert self._first is not None
            call(self._first)
            return [None] * len(ranks)

        self._ranks.run_on_first(None, work)


def connect(ranks: RankGroups, score: Callable[[Rollout], RewardOutput]) -> list[RewardSource]:
    """On rank 0: reward sources of the other ranks, where threads of these call ``score``.

    Raises:
        OSError: a rank cannot reach rank 0; raised on every rank.
    """
    server, key = None, secrets.token_bytes(32)
    if ranks.rank == 0:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(
            ("", 0), family=family, backlog=ranks.size, dualstack_ipv6=dual
        )

    def address(others: Sequence[None]) -> list[tuple[int, bytes]]:
        assert server is not None
        return [(server.getsockname()[1], key)] * len(others)

    port, key = ranks.run_on_first(None, address)
    failure: OSError | None = None
    if ranks.rank:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        try:
            client = socket.create_connection((host, port), timeout=_CONNECT)
            client.sendall(key)
            client.settimeout(None)
        except OSError as error:
            failure = OSError(f"learner {ranks.rank} cannot reach learner 0 at {host}: {error}")
        else:
            gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            serving = (Connection(client.detach()), score, gpu)
            threading.Thread(target=_serve, args=serving, name="scoring", daemon=True).start()

    def accept(failures: Sequence[OSError | None]) -> list[None]:
        for error in filter(None, failures):
            raise error
        assert server is not None
        while len(sources) < ranks.size - 1:
            client, _ = server.accept()
            client.settimeout(_CONNECT)
            if hmac.compare_digest(client.recv(len(key), socket.MSG_WAITALL), key):
                client.settimeout(None)
                sources.append(_RankReward(Connection(client.detach())))
        server.close()
        return [None] * ranks.size

    sources: list[RewardSource] = []
    ranks.run_on_first(failure, accept)
    return sources


class _RankReward:
    """The reward source of another rank."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def score(self, rollout: Rollout) -> RewardOutput:
        try:
            self._connection.send_bytes(pickle.dumps(rollout))
            output, error = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as lost:
            raise RewardError("a connection was closed by peer: the learner that scored") from lost
        if error is not None:
            raise error
        return output


def _serve(
    connection: Connection[Any, Any], score: Callable[[Rollout], RewardOutput], gpu: int | None
) -> None:
    """Body of a thread: score what rank 0 sends, until it ends."""
    torch.get_num_threads()  # torch sets the thread count of a thread at its first query
    if gpu is not None:
        torch.cuda.set_device(gpu)
    while True:
        try:
            rollout = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        output, failure = None, None
        try:
            output = score(rollout)
        except KedgeError as error:
            failure = error
        except BaseException as error:
            failure = RewardError(f"{type(error).__name__}: {error}")
        connection.send_bytes(pickle.dumps((output, failure)))
