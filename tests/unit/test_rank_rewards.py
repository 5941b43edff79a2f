"""Scoring on other ranks: who can connect to rank 0."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.rollout.scheduler import rank_rewards


class Ranks:
    """Two ranks in two threads."""

    size = 2

    def __init__(self, rank: int, shared: Any) -> None:
        self.rank, self.shared = rank, shared

    def run_on_first(self, local: Any, work: Any) -> Any:
        self.shared.local[self.rank] = local
        self.shared.barrier.wait()
        if self.rank == 0:
            self.shared.items = work(self.shared.local)
        self.shared.barrier.wait()
        return self.shared.items[self.rank]


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no route to another machine")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("remote", [False, True])
def test_the_port_is_bound_to_the_address_by_which_ranks_reach_it(remote, monkeypatch) -> None:
    """On one machine that is 127.0.0.1, also where its address in the network is advertised."""
    monkeypatch.setenv("MASTER_ADDR", own := own_address())
    assert rank_rewards.address_of_first() == "127.0.0.1"
    if remote:
        monkeypatch.setattr(rank_rewards, "address_of_first", lambda: own)
    bound: list[str] = []

    class Listener(rank_rewards.Listener):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            bound.append(self._listener._socket.getsockname()[0])

    monkeypatch.setattr(rank_rewards, "Listener", Listener)
    shared = SimpleNamespace(local=[None, None], items=None, barrier=threading.Barrier(2))
    reward = SimpleNamespace(score=lambda rollout: rollout + 1)
    scheduler: Any = SimpleNamespace(collector=SimpleNamespace(reward=reward))
    ranks: Any = [Ranks(n, shared) for n in range(2)]
    other = threading.Thread(target=rank_rewards.connect, args=(ranks[1], scheduler), daemon=True)
    other.start()
    (connected,) = rank_rewards.connect(ranks[0], scheduler)
    assert bound == [own if remote else "127.0.0.1"]
    assert connected.score(1) == 2
    connected._connection.close()
