"""Lets rank 0, which samples for all ranks that train together, score on every rank."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from typing import Any

import torch

from kedge.errors import KedgeError, RewardError
from kedge.rollout.engines import RankGroups
from kedge.types import RewardOutput, Rollout


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
            raise RewardError("closed by peer: a learner ended while it scored") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def connect(ranks: RankGroups, scheduler: Any) -> list[RankReward]:
    """On rank 0 the reward sources of the other ranks: those of the ``scheduler`` there."""
    key = os.urandom(32)
    listener = Listener(("", 0), backlog=ranks.size, authkey=key) if ranks.rank == 0 else None
    mine = None if listener is None else (listener.address[1], key)
    port, key = ranks.run_on_first(mine, lambda addresses: addresses[:1] * ranks.size)
    if listener is not None:
        with listener:
            return [RankReward(listener.accept()) for _ in range(ranks.size - 1)]
    first = Client((os.environ.get("MASTER_ADDR", "127.0.0.1"), port), authkey=key)
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
