"""Connection to a Ray cluster: a running one, or a new local one."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kedge.records.errors import ConfigError, install_command
from kedge.rollout.liveness import RunningTime

logger = logging.getLogger(__name__)
HEALTH = "health"  # concurrency group: a separate thread inside an actor


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """Node and process of an actor."""

    pid: int
    address: str  # IP address of the node
    node: str  # Ray's id of the node

    @classmethod
    def current(cls) -> ActorProcess:
        """This process."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return cls(os.getpid(), ray.util.get_node_ip_address(), node)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.address}"


def connect(address: str | None = None, *, cpus: float = 0) -> bool:
    """Connect to a cluster unless this process is connected; returns whether this call did.

    ``address`` of a running cluster, e.g. ``auto`` or ``ray://host:10001``; None: from
    ``RAY_ADDRESS``, or a new local cluster with at least ``cpus`` CPU slots.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: {install_command('ray')} ({error})") from error
    if ray.is_initialized():
        return False
    # "local": otherwise Ray joins any cluster that it finds on this machine.
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    resources: dict[str, Any] = {}
    if address == "local":
        resources = {
            "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus)),
            "include_dashboard": False,
        }
    try:
        with _own_session() if address == "local" else contextlib.nullcontext():
            ray.init(address=address, configure_logging=False, log_to_driver=False, **resources)
    except Exception as error:  # Ray may raise anything
        raise ConfigError(_why_not(address, error)) from error
    return True


def _why_not(address: str, error: Exception) -> str:
    if address == "local":
        return f"Ray did not start on this machine: {error}; if it is short of memory, free some"
    mode = os.environ.get("RAY_AUTH_MODE", "unset")
    if mode != "token" and responds(address):
        return (
            f"the Ray cluster at {address!r} refused the connection ({error}). It probably uses"
            f" token authentication, which 'ray start' uses where a token exists; RAY_AUTH_MODE is"
            f" {mode} here: set RAY_AUTH_MODE=token on every machine before 'ray start' and before"
            " this command, and copy ~/.ray/auth_token of the head to each; or set"
            " RAY_AUTH_MODE=disabled everywhere, in a network that you trust"
        )
    return (
        f"no Ray cluster responds at {address!r}: {error}; start one with 'ray start --head',"
        " or leave the address out"
    )


def responds(address: str, seconds: float = 2.0) -> bool:
    """Whether something accepts TCP connections at ``host:port``."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=seconds).close()
    except (OSError, ValueError):
        return False
    return True


_STARTING: list[bool] = []  # not empty while Ray's processes are started
_SESSIONS: list[int] = []  # of the local cluster that this process started
os.register_at_fork(after_in_child=lambda: os.setsid() if _STARTING else None)


@contextlib.contextmanager
def _own_session() -> Iterator[None]:
    """Start Ray's processes in separate sessions.

    A SIGTERM to the process group of the driver, as batch systems send it, then reaches the driver
    alone, which lets the ranks write a checkpoint.  Ray's processes still end with the driver.
    """
    import psutil

    before = {child.pid for child in psutil.Process().children()}
    _STARTING.append(True)
    try:
        yield
    finally:
        _STARTING.clear()
        _SESSIONS.extend({child.pid for child in psutil.Process().children()} - before)


class ControlStore:
    """Watches the control store (GCS) of the cluster, without which nothing can be started.

    Ray itself notices its death after a minute, and then aborts the process.  A control store that
    this process cannot reach directly (Ray client) is not watched.  It counts as lost after
    ``patience`` seconds without a response, in which this process ran.
    """

    def __init__(self, patience: float) -> None:
        import ray

        self.address: str = ray.get_runtime_context().gcs_address
        self._patience = patience
        self._watched = responds(self.address)
        self._checked = time.monotonic()
        self._silence: RunningTime | None = None  # time since it stopped responding

    def lost(self) -> bool:
        """Whether it has not responded for too long; asks at most once a second.

        To be called about once a second while anything waits for the cluster.
        """
        now = time.monotonic()
        if self._watched and now - self._checked >= 1:
            self._checked = now
            silent = not responds(self.address, 0.5)
            self._silence = (self._silence or RunningTime()) if silent else None
        return self._silence is not None and self._silence.seconds() > self._patience

    def silent(self) -> bool:
        """Whether it does not respond now, so that Ray's own calls would block for a minute."""
        return self._watched and not responds(self.address)

    @property
    def cause(self) -> str:
        """Message for a lost control store."""
        return (
            f"Ray's control store (gcs_server) at {self.address} is gone: it was killed, or the"
            " head node was lost. Resume from the latest checkpoint, if any, with"
            " resume_from_checkpoint=True"
        )


def has_gpus() -> bool:
    """Whether the cluster has any GPU."""
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))


def leave() -> None:
    """Disconnect from the cluster; a local one of this process is stopped."""
    import psutil
    import ray

    ray.shutdown()
    # Some processes of Ray outlive a raylet or a control store that was killed.
    sessions = {*_SESSIONS}
    _SESSIONS.clear()
    for process in psutil.process_iter() if sessions else ():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) in sessions:
                process.kill()


_DIED = (
    "it was killed (perhaps out of memory) or crashed; Ray's logs on that node, in"
    " session_latest/logs of its temporary folder (/tmp/ray by default), may say more"
)


def cause(error: Exception, node: str | None = None) -> str:
    """Why Ray lost an actor on ``node``; for uncommon messages, the part about this actor."""
    text = " ".join(str(error).split())
    if "node has died" in text or (node is not None and _is_lost(node)):
        return "its node was lost"
    if "running low on memory" in text:
        used = re.search(r"was (\S+ used / \S+) limit", text)
        return (
            f"Ray killed it because its node was low on memory ({used[1] if used else 'unknown'});"
            " free memory there, or start fewer actors on it"
        )
    if "SYSTEM_ERROR" in text:
        return _DIED
    if "unavailable" in text:
        return "it or its node was lost"
    match = re.search(r"([Tt]he actor is dead because .*?)(?: Some common|$)", text)
    return match[1].rstrip(" .") if match else text


def _is_lost(node: str) -> bool:
    """Whether a node has left the cluster; False if the control store does not respond."""
    import ray

    if not responds(ray.get_runtime_context().gcs_address):
        return False
    return any(found["NodeID"] == node and not found["Alive"] for found in ray.nodes())
