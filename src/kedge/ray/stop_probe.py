"""Asks on the node of an actor whether its process is stopped."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from kedge.rollout.liveness import STOPPED_FOR, RunningTime, is_stopped, stays_stopped


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """Where an actor runs."""

    pid: int
    address: str  # of the node
    node: str  # Ray's id of the node

    @classmethod
    def current(cls) -> ActorProcess:
        """This process."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return cls(os.getpid(), ray.util.get_node_ip_address(), node)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.address}"


@dataclass(slots=True)
class StopProbe:
    """Whether the process of an actor is stopped; calls never block.

    On this node it is read here, and on another one by a task there.
    """

    process: ActorProcess
    _stopped: RunningTime | None = field(default=None, init=False)  # since found, on this node
    _task: Any = field(default=None, init=False)  # on another node

    def __call__(self) -> bool:
        """Whether it is known to be stopped."""
        import ray

        if self.process.node == ray.get_runtime_context().get_node_id():
            return self._stopped_here()
        return self._stopped_there()

    def _stopped_here(self) -> bool:
        if not is_stopped(self.process.pid):
            self._stopped = None
            return False
        self._stopped = self._stopped or RunningTime()
        return self._stopped.seconds() >= STOPPED_FOR

    def _stopped_there(self) -> bool:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._task is None:
            there = NodeAffinitySchedulingStrategy(self.process.node, soft=False)
            look = ray.remote(num_cpus=0, max_retries=0)(stays_stopped)
            self._task = look.options(scheduling_strategy=there).remote(self.process.pid)
        if not ray.wait([self._task], timeout=0)[0]:
            return False
        task, self._task = self._task, None
        try:
            return bool(ray.get(task))
        except ray.exceptions.RayError:  # the node is lost, which Ray reports for the actor itself
            return False
