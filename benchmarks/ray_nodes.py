"""A Ray cluster of two nodes on this machine, one of which can be lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil

from .ray_run import Run, line_of


class Nodes:
    """A cluster of two nodes on this machine; the driver connects to the first."""

    def __init__(self, cpus: tuple[int, int]) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": cpus[0], "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._actors: list[psutil.Process] = []
        self._second = self._cluster.add_node(num_cpus=cpus[1])
        self.address: str = self._cluster.address

    def kill_node_of(self, role: str, run: Run) -> None:
        """Kill the raylet of the second node, if the actors of a role run there."""
        struck = False
        for node in (self._second, self._cluster.head_node):
            raylet = node.all_processes["raylet"][0].process.pid
            children = psutil.Process(raylet).children(recursive=True)
            actors = [x for x in children if line_of(x).startswith(("ray::Learner", "ray::Engine"))]
            self._actors += actors
            on_node = [line_of(actor) for actor in actors]
            struck |= node is self._second and any(f"ray::{role}" in x for x in on_node)
        if not struck:
            raise LookupError(f"the second node has no {role}")
        os.kill(self._second.all_processes["raylet"][0].process.pid, signal.SIGKILL)

    def left(self, seconds: float = 30.0) -> list[str]:
        """Actors of the run that still run some time after its end."""
        _, alive = psutil.wait_procs(self._actors, timeout=seconds)
        return [line_of(actor)[:60] for actor in alive]

    def close(self) -> None:
        """Stop both nodes."""
        self._cluster.shutdown()


@contextlib.contextmanager
def two_nodes(cpus: tuple[int, int]) -> Iterator[Nodes]:
    """``Nodes`` without token authentication."""
    before = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    nodes = Nodes(cpus)
    try:
        yield nodes
    finally:
        nodes.close()
        os.environ.pop("RAY_AUTH_MODE")
        if before is not None:
            os.environ["RAY_AUTH_MODE"] = before
