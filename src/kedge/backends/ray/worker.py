"""One rank of the learners: a process of Ray's in which the ordinary trainer runs."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kedge.backends.ray.context import RankContext, set_context

# What a rank says when another one is gone.
_ECHOES = (
    *("closed by peer", "reset by peer", "gloo", "NCCL", "Broken pipe", "Socket Timeout"),
    *("recvBytes", "DistBackendError", "DistNetworkError", "Timed out waiting"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended."""

    rank: int
    when: float  # seconds since the epoch
    text: str  # type and message
    trace: str = ""  # of Python; empty where the process died
    error: BaseException | None = None  # where it can be sent
    died: bool = False

    @property
    def order(self) -> tuple[int, float]:
        """Root causes first: errors, then deaths, then what follows from another rank's end."""
        echo = any(word in self.text for word in _ECHOES)
        return (2 if echo else 1 if self.died else 0), self.when


class RankWorker:
    """Runs a job as one rank; becomes an actor by ``ray.remote``."""

    def ping(self) -> tuple[int, str]:
        """The process id and the address of the node."""
        import ray

        return os.getpid(), ray.util.get_node_ip_address()

    def free_port(self) -> int:
        """A port of this node that nobody listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def run(
        self, job: Callable[[], Any], environment: Mapping[str, str], place: RankContext
    ) -> tuple[Any, Failure | None]:
        """What the job returns on the first rank, or why it failed on this one."""
        os.environ.update(environment)
        set_context(place)
        logging.getLogger("kedge").addHandler(_Notes(place))
        try:
            result = job()
            _leave()
            return (result if place.rank == 0 else None), None
        except (Exception, SystemExit) as error:
            return None, failure(place.rank, error)


class _Notes(logging.Handler):
    """Takes Kedge's warnings to the driver, which has the screen."""

    def __init__(self, place: RankContext) -> None:
        super().__init__(logging.WARNING)
        self._place = place

    def emit(self, record: logging.LogRecord) -> None:
        self._place.note(record.getMessage())


def failure(rank: int, error: BaseException) -> Failure:
    """The error in a form that can be sent, whatever it holds."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sent: BaseException | None = error.with_traceback(None)
    try:
        pickle.loads(pickle.dumps(sent))
    except Exception:  # a type that cannot be made again from its arguments
        sent = None
    return Failure(
        rank=rank,
        when=time.time(),
        text=f"{type(error).__name__}: {error}",
        trace=trace,
        error=sent,
    )


def _leave() -> None:
    """Leave the process group while all ranks still answer."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
