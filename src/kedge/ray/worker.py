"""Actor of one learner rank, in which the ordinary trainer runs."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kedge.ray.context import STOP, RankContext, set_context
from kedge.rollout.vllm.nccl_transfer import free_port

# Parts of errors that a rank raises because another one is gone.
_CONSEQUENCES = (
    *("closed by peer", "reset by peer", "gloo", "NCCL", "Broken pipe", "Socket Timeout"),
    *("recvBytes", "DistBackendError", "DistNetworkError", "Timed out waiting"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended."""

    rank: int
    when: float  # seconds since the epoch
    text: str  # type and message
    trace: str = ""  # Python traceback; empty if the process died
    error: BaseException | None = None  # if it can be pickled
    died: bool = False

    @property
    def order(self) -> tuple[int, float]:
        """Sort key, root causes first: errors, deaths, then consequences of another rank's end."""
        follows = any(word in self.text for word in _CONSEQUENCES)
        return (2 if follows else 1 if self.died else 0), self.when


class RankWorker:
    """Runs a job as one rank, in an actor."""

    def stop(self) -> None:
        """Let the run write a checkpoint and exit at the end of this iteration."""
        STOP.set()

    def exit(self) -> None:
        """End this process."""
        os._exit(1)

    def free_port(self) -> int:
        """A free TCP port of this node."""
        return free_port()

    def run(
        self, job: Callable[[], Any], environment: Mapping[str, str], place: RankContext
    ) -> tuple[Any, Failure | None]:
        """The job's result on rank 0, or its failure on this rank."""
        os.environ.update(environment)
        set_context(place)
        logging.getLogger("kedge").addHandler(_DriverHandler(place))
        try:
            result = job()
            import torch.distributed as dist  # not before the environment is set

            if dist.is_available() and dist.is_initialized():  # while all ranks still respond
                with contextlib.suppress(RuntimeError):
                    dist.destroy_process_group()
            return (result if place.rank == 0 else None), None
        except (Exception, SystemExit) as error:
            return None, failure(place.rank, error)


class _DriverHandler(logging.Handler):
    """Sends Kedge's warnings to the driver, which prints them."""

    def __init__(self, place: RankContext) -> None:
        super().__init__(logging.WARNING)
        self._place = place

    def emit(self, record: logging.LogRecord) -> None:
        self._place.note(record.getMessage())


def failure(rank: int, error: BaseException) -> Failure:
    """The error in a form that can be pickled."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    picklable: BaseException | None = error.with_traceback(None)
    try:
        pickle.loads(pickle.dumps(picklable))
    except Exception:  # its constructor does not accept its args
        picklable = None
    return Failure(
        rank=rank,
        when=time.time(),
        text=f"{type(error).__name__}: {error}",
        trace=trace,
        error=picklable,
    )
