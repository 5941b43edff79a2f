"""Lets rank 0, which samples for all ranks that train together, score on every rank."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from typing import Any

import torch

from kedge.records.errors import KedgeError, RewardError
from kedge.records.types import RewardOutput, Rollout
from kedge.rollout.engines import RankGroups

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"


class RankReward:
    """The reward source of another rank, where a thread scores."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def score(self, rollout: Rollout) -> RewardOutput:
        """The output of that rank's reward source."""
        try:
            # Not ``send``, which would share tensors between processes of one machine.
            self._connection.send_bytes(pickle.dumps(rollout))
            answer: RewardOutput | Exception = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RewardError("closed by peer: a learner exited while scoring") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def address_of_first() -> str:
    """The IPv4 address by which this rank reaches rank 0's machine; 127.0.0.1 on the same one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", LOOPBACK), 9))  # sends nothing
        there, here = probe.getpeername()[0], probe.getsockname()[0]
    return LOOPBACK if there == here or there.startswith("127.") else there


def connect(ranks: RankGroups, scheduler: Any) -> list[RankReward]:
    """On rank 0 the reward sources of the other ranks: those of the ``scheduler`` there."""
    key, listeners = os.urandom(32), list[Listener]()

    def listen(addresses: list[str]) -> list[Any]:
        remote = [x for x in addresses if x != LOOPBACK]
        address = remote[0] if remote else LOOPBACK
        try:
            listeners.append(Listener((address, 0), backlog=ranks.size, authkey=key))
        except OSError:  # translated by the network, as between containers
            logger.warning("no interface has %s: rewards of ranks are accepted on all", address)
            listeners.append(Listener(("", 0), backlog=ranks.size, authkey=key))
        return [(address, listeners[0].address[1], key)] * ranks.size

    *address, key = ranks.run_on_first(address_of_first(), listen)
    if listeners:
        with listeners[0] as listener:
            return [RankReward(listener.accept()) for _ in range(ranks.size - 1)]
    first = Client(tuple(address), authkey=key)
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def serve() -> None:
        torch.get_num_threads()  # torch sets the thread count of a thread at its first query
        if gpu is not None:
            torch.cuda.set_device(gpu)
        with suppress(EOFError, OSError):  # rank 0 has ended
            while True:
                rollout = pickle.loads(first.recv_bytes())
                try:
                    answer: Any = scheduler.collector.reward.score(rollout)
                except KedgeError as error:
                    answer = error
                except Exception as error:
                    answer = RewardError(f"{type(error).__name__}: {error}")
                first.send_bytes(pickle.dumps(answer))

    threading.Thread(target=serve, name="scoring", daemon=True).start()
    return []
