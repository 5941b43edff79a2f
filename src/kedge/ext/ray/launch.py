"""Launches learners on Ray: one actor per rank, which runs the ordinary trainer."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import psutil

from kedge.ext.ray import cluster
from kedge.ext.ray.actor import Actor, LostActorError
from kedge.ext.ray.cluster import HEALTH, ActorProcess
from kedge.ext.ray.placement import Placement, place, plan_bundles
from kedge.loop.shutdown import GracefulShutdown
from kedge.records.errors import ConfigError, KedgeError, LaunchError, LostLearnerError
from kedge.rollout.liveness import RunningTime, WorkerLimits
from kedge.trainers.launch import set_launch_context

T = TypeVar("T")
logger = logging.getLogger(__name__)
_POLL = 0.2  # seconds between checks of the ranks
_MAILBOX_LOST = (
    "the actor that sends metrics to this screen was lost; metrics that are missing here are in"
    " metrics.jsonl"
)
_DRAIN = 3.0  # seconds to collect errors of other ranks after a failure
INBOX: SimpleQueue[Any] = SimpleQueue()  # references that learner 0 has sent to this process
STOP = threading.Event()  # set in a rank's process once the driver asks it to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLimits(WorkerLimits):
    """Timeouts of a launch, in seconds: those of a rank, and of all ranks together."""

    start: float = 300.0
    call: float = math.inf  # of the job
    placement: float = 300.0  # until the cluster can place all actors
    # for the checkpoint and the exit of all ranks, from the end of the iteration after which a
    # signal stops them
    stop: float = 3600.0


def launch(  # noqa: PLR0913
    job: Callable[[], T],
    *,
    learners: Sequence[int] = (1,),
    engines: int = 0,
    gpus_per_engine: int = 1,
    rewards: int = 0,
    gpus_per_reward: float = 0.0,
    references: int = 0,
    gpus_per_reference: float = 0.0,
    single_gpu_mode: bool = False,
    address: str | None = None,
    environment: Mapping[str, str] | None = None,
    limits: LaunchLimits | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> T:
    """Run a job on every rank, and return the result of rank 0.

    The job is what ``accelerate launch`` would run: it builds a trainer and trains.  Its trainers
    use the engines and workers of this launch, send metrics to ``on_row``, and write a checkpoint
    and exit when this process gets SIGINT (Ctrl-C) or SIGTERM.

    Args:
        job: called without arguments; must be picklable.
        learners: ranks on each node; each has one GPU if there are GPUs.
        engines: rollout engines; ``vllm_num_engines`` of the trainer's config.
        gpus_per_engine: ``vllm_tensor_parallel_size`` of the trainer's config.
        rewards: reward workers per learner; ``ray_reward_workers`` of the trainer's config.
        gpus_per_reward: ``ray_reward_gpus`` of the trainer's config.
        references: reference workers per learner; ``ray_ref_workers`` of the trainer's config.
        gpus_per_reference: ``ray_ref_gpus`` of the trainer's config.
        single_gpu_mode: the learner and all engines share one GPU.
        address: address of a running Ray cluster; None: ``RAY_ADDRESS``, or a new local cluster.
        environment: environment variables of the ranks, e.g. ``ACCELERATE_USE_FSDP``.
        limits: timeouts.
        on_row: called with every row of metrics that rank 0 logs; warnings of all ranks are always
            logged in this process.

    Raises:
        ConfigError: the cluster lacks resources, which are listed.
        KedgeError: the first error raised by a rank.
        LostLearnerError: a rank died or hung, or the control store of the cluster was lost.
        LaunchError: a rank raised another error; root cause first.
        KeyboardInterrupt: after Ctrl-C, once the ranks have exited.
        SystemExit: after SIGTERM, once the ranks have exited.
    """
    limits = limits or LaunchLimits()
    ranks = sum(learners)
    connected = cluster.connect(address, cpus=ranks * (1 + rewards + references) + engines)
    try:
        plan = plan_bundles(
            learners=learners,
            engines=engines,
            gpus=cluster.has_gpus(),
            gpus_per_engine=gpus_per_engine,
            single_gpu_mode=single_gpu_mode,
            workers={
                "reward": (rewards * ranks, gpus_per_reward),
                "reference": (references * ranks, gpus_per_reference),
            },
        )
        placement = place(plan, wait_seconds=limits.placement)
        print(f"on Ray:\n{placement.text()}", flush=True)
        group = _LearnerGroup(placement, limits, on_row)
        try:
            group.start()
            return group.run(job, environment or {})
        finally:
            group.end()
    finally:
        if connected:
            cluster.leave()


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
    text: str  # error type and message
    trace: str = ""  # Python traceback; empty if the process died
    error: BaseException | None = None  # if it can be pickled
    died: bool = False

    @property
    def order(self) -> tuple[int, float]:
        """Sort key, root causes first: errors, deaths, then consequences of another rank's end."""
        follows = any(word in self.text for word in _CONSEQUENCES)
        return (2 if follows else 1 if self.died else 0), self.when


class DriverMailbox:
    """Mailbox actor: ranks post a "row" of metrics, a "note", or a "stop" to the driver."""

    def __init__(self) -> None:
        self._mail: list[tuple[str, Any]] = []

    def post(self, kind: str, item: Any = None) -> None:
        """Add an item."""
        self._mail.append((kind, item))

    def take(self) -> tuple[list[tuple[str, Any]], int]:
        """All items since the last call, and the process id."""
        mail, self._mail = self._mail, []
        return mail, os.getpid()


@dataclass(slots=True, kw_only=True)
class RankContext:
    """A rank's view of the launch."""

    rank: int
    world_size: int
    placement: Placement  # placement of all actors
    mailbox: Any  # handle of the DriverMailbox actor
    learners: Sequence[Any]  # handles of the actors of all ranks

    def post(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics to the driver."""
        self.mailbox.post.remote("row", dict(row))

    def note(self, text: str) -> None:
        """Send a warning to the driver."""
        self.mailbox.post.remote("note", f"learner {self.rank}: {text}")

    def stopping(self) -> bool:
        """Whether the driver asked this rank to stop; called at the end of an iteration."""
        if STOP.is_set():
            self.mailbox.post.remote("stop")
        return STOP.is_set()

    def send(self, items: list[Any]) -> None:
        """Store an item for each rank from 1 on, and send the references."""
        import ray

        references = [ray.put(item) for item in items]
        for learner, reference in zip(self.learners[1:], references, strict=True):
            # In a list the reference is not resolved: the learner reads it in its main thread.
            learner.call.options(concurrency_group=HEALTH).remote("deliver", [reference])

    def receive(self) -> Any:
        """The next item that learner 0 sent to this rank."""
        import ray

        return ray.get(INBOX.get())


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
        from kedge.ext.vllm.weights import free_port

        return free_port()

    def deliver(self, references: list[Any]) -> None:
        """Put a reference that learner 0 has sent into the inbox of this process."""
        INBOX.put(references[0])

    def run(
        self, job: Callable[[], Any], environment: Mapping[str, str], place: RankContext
    ) -> tuple[Any, Failure | None]:
        """Run the job; returns its result on rank 0, or the failure of this rank."""
        os.environ.update(environment)
        # Gloo would take the address of the host's name, which may be that of this machine alone.
        address = ActorProcess.current().address
        for name, found in psutil.net_if_addrs().items():
            if any(x.address == address for x in found):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        set_launch_context(place)
        logging.getLogger("kedge").addHandler(_DriverHandler(place))
        try:
            result = job()
            import torch.distributed as dist  # imported after the environment is set

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
    """Convert the error to a form that can be pickled."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    picklable: BaseException | None = error.with_traceback(None)
    try:
        pickle.loads(pickle.dumps(picklable))
    except Exception:  # the constructor rejects its args
        picklable = None
    return Failure(
        rank=rank,
        when=time.time(),
        text=f"{type(error).__name__}: {error}",
        trace=trace,
        error=picklable,
    )


class _LearnerGroup:
    """All ranks, and their mailbox to the driver."""

    def __init__(
        self,
        placement: Placement,
        limits: LaunchLimits,
        on_row: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self._placement, self._limits, self._on_row = placement, limits, on_row
        self._control_store = cluster.ControlStore(limits.heartbeat)
        self._slots = placement.of("learner")
        self._ranks: list[Actor] = []
        self._mailbox: Any = None
        self._mailbox_process = 0  # process id; 0: not known yet
        self._mail: Any = None  # running call of ``take``
        self._stopping = False  # the iteration after which the ranks stop has ended
        self._threads = ThreadPoolExecutor(len(self._slots), thread_name_prefix="learner")

    def start(self) -> None:
        """Start all ranks."""
        from kedge.rollout.engines import start_all  # needs torch

        self._mailbox = self._start_mailbox()
        self._ranks = start_all(
            [
                partial(
                    Actor,
                    f"learner {slot.index} of {len(self._slots)}",
                    lambda handle: handle.build.remote(RankWorker),
                    options=self._placement.options(slot),
                    limits=self._limits,
                )
                for slot in self._slots
            ]
        )

    def run(self, job: Callable[[], T], environment: Mapping[str, str]) -> T:
        """Run the job until all ranks have finished, or one has failed."""
        shutdown = GracefulShutdown()
        with shutdown.install():
            running = self._begin(job, environment)
            failures: list[Failure] = []
            result: Any = None
            clock, deadline, told = RunningTime(), math.inf, False
            while running and (now := clock.seconds()) < deadline:
                done, _ = wait(running, timeout=_POLL, return_when=FIRST_COMPLETED)
                self._forward()
                for future in done:
                    returned, failure = _outcome(future, running.pop(future))
                    result = returned if returned is not None else result
                    failures += [failure] if failure else []
                if failures:
                    deadline = min(deadline, now + _DRAIN)
                elif shutdown.requested and not told:  # no deadline: an iteration may take an hour
                    told = True
                    self._ranks[0].interrupt("stop")
                elif self._stopping and deadline == math.inf:
                    deadline = now + self._limits.stop
                if self._control_store.lost():  # Ray takes seconds to disconnect: report it first
                    logger.warning(
                        "Ray's control store at %s does not respond; ending all learners",
                        self._control_store.address,
                    )
                    raise LostLearnerError(self._control_store.cause)
            if running and not failures:
                late = ", ".join(f"learner {rank}" for rank in sorted(running.values()))
                raise LaunchError(
                    f"{late} did not exit within {self._limits.stop:g} s of the last iteration"
                    " (worker_stop_timeout), as while a checkpoint is written to a disk that does"
                    " not respond; the newest complete checkpoint is what a resume starts from"
                )
            self._forward_rest()
        if failures:
            raise self._root_cause(failures, stopping=shutdown.requested)
        shutdown.reraise()
        return result

    def end(self) -> None:
        """Kill all ranks and release the resources."""
        import ray

        self._threads.shutdown(wait=False)
        if not ray.is_initialized():
            return
        if self._control_store.silent():  # Ray does not respond, but the actors do
            for actor in self._ranks:
                actor.interrupt("exit")
            return
        for actor in self._ranks:
            actor.close()
        if self._mailbox is not None:
            ray.kill(self._mailbox)
        self._placement.release()

    # -- helpers ---------------------------------------------------------------------------------

    def _begin(
        self, job: Callable[[], Any], environment: Mapping[str, str]
    ) -> dict[Future[Any], int]:
        """Start the job on every rank."""
        import ray

        try:
            shared_job = ray.put(job)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"the job cannot be pickled: {error}; build models and data inside it"
            ) from error
        first = self._ranks[0]
        port = first.once("free_port", within=self._limits.start)
        running = {}
        for rank, (actor, slot) in enumerate(zip(self._ranks, self._slots, strict=True)):
            same_node = [other for other in self._slots[:rank] if other.bundle == slot.bundle]
            variables: dict[str, object] = {
                "RANK": rank,
                "WORLD_SIZE": len(self._ranks),
                # Ray shows each process only its GPU, which therefore has index 0.
                "LOCAL_RANK": 0 if slot.gpus else len(same_node),
                "MASTER_ADDR": first.process.address,
                "MASTER_PORT": port,
            }
            named = {name: str(value) for name, value in variables.items()} | dict(environment)
            context = RankContext(
                rank=rank,
                world_size=len(self._ranks),
                placement=self._placement,
                mailbox=self._mailbox,
                learners=[learner.handle for learner in self._ranks],
            )
            running[self._threads.submit(actor.once, "run", shared_job, named, context)] = rank
        return running

    def _start_mailbox(self) -> Any:
        """Start the mailbox on the driver's node; if it dies, it restarts without its contents."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        return (
            ray.remote(DriverMailbox)
            .options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
            .remote()
        )

    def _forward(self, wait_seconds: float = 0) -> None:
        """Pass on rows and warnings, if the mailbox has answered."""
        import ray

        self._mail = self._mail or self._mailbox.take.remote()
        if not ray.wait([self._mail], timeout=wait_seconds)[0]:
            return
        mail, self._mail = self._mail, None
        try:
            items, process = ray.get(mail)
        except ray.exceptions.RayError:
            return  # the mailbox is being restarted
        if self._mailbox_process not in (0, process):
            logger.warning("%s", _MAILBOX_LOST)
        self._mailbox_process = process
        for kind, item in items:
            if kind == "stop":
                self._stopping = True
            elif kind == "note":
                logger.warning("%s", item)
            elif self._on_row is not None:
                self._on_row(item)

    def _forward_rest(self) -> None:
        for _ in range(2):  # a running call, and later messages
            self._forward(wait_seconds=_DRAIN)
        if self._mail is not None:
            logger.warning("%s", _MAILBOX_LOST)

    def _root_cause(self, failures: Sequence[Failure], *, stopping: bool) -> KedgeError:
        root, *others = sorted(failures, key=lambda failure: failure.order)
        if isinstance(root.error, KedgeError):
            return root.error
        what = root.text if root.died else f"learner {root.rank} of {len(self._ranks)}: {root.text}"
        lines = [what, root.trace.rstrip()] if root.trace else [f"{what.rstrip('.')};"]
        lines += [
            f"then on learner {failure.rank}: {failure.text.splitlines()[0]}" for failure in others
        ]
        lines.append("resume from the latest checkpoint, if any, with resume_from_checkpoint=True")
        # A run that was asked to stop is not restarted.
        kind = LostLearnerError if root.died and not stopping else LaunchError
        error = kind("\n".join(line for line in lines if line))
        error.__cause__ = root.error
        return error


def _outcome(future: Future[Any], rank: int) -> tuple[Any, Failure | None]:
    """The result of a rank, or why it failed."""
    error = future.exception()
    if error is None:
        outcome: tuple[Any, Failure | None] = future.result()
        return outcome
    died = isinstance(error, LostActorError)  # otherwise its result cannot be pickled
    return None, Failure(rank=rank, when=time.time(), text=str(error), died=died)
