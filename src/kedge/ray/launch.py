"""Launches learners on Ray: one actor per rank, which runs the ordinary trainer."""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kedge.errors import ConfigError, KedgeError, LaunchError, LostLearnerError
from kedge.loop.shutdown import GracefulShutdown
from kedge.ray import cluster
from kedge.ray.actor import HEALTH
from kedge.ray.context import ActorProcess, DriverMailbox, RankContext
from kedge.ray.placement import Placement, place, plan_bundles
from kedge.ray.worker import Failure, RankWorker
from kedge.rollout.liveness import HungCheck, RunningTime

T = TypeVar("T")
logger = logging.getLogger(__name__)
_POLL = 0.2  # seconds between checks of the ranks
_MAILBOX_LOST = (
    "the actor that sends metrics to this screen was lost; metrics that are missing here are in"
    " metrics.jsonl"
)
_DRAIN = 3.0  # seconds to collect errors of other ranks after a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLimits:
    """Timeouts of a launch, in seconds."""

    placement: float = 300.0  # until the cluster can place all actors
    start: float = 300.0  # until all ranks respond
    heartbeat: float = 5.0  # between health checks of a rank
    patience: float = 60.0  # without a response; then it counts as hung


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
    say: Callable[[str], None] | None = None,
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
        address: of a running Ray cluster; None: ``RAY_ADDRESS``, or a new local cluster.
        environment: variables of the ranks, e.g. ``ACCELERATE_USE_FSDP``.
        limits: timeouts.
        on_row: called with every row of metrics that rank 0 logs; warnings of all ranks are always
            logged in this process.
        say: called with the placement as text; None: print it.

    Raises:
        ConfigError: the cluster lacks resources; with what is missing.
        KedgeError: the first one raised by a rank.
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
            rewards=rewards * ranks,
            references=references * ranks,
            gpus=cluster.has_gpus(),
            gpus_per_engine=gpus_per_engine,
            gpus_per_reward=gpus_per_reward,
            gpus_per_reference=gpus_per_reference,
            single_gpu_mode=single_gpu_mode,
        )
        placement = place(plan, wait_seconds=limits.placement)
        (say or _print)(f"on Ray:\n{placement.text()}")
        store = cluster.ControlStore(limits.heartbeat)
        group = _LearnerGroup(placement, limits, on_row, store)
        try:
            group.start()
            return group.run(job, environment or {})
        finally:
            group.end()
    finally:
        if connected:
            cluster.leave()


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ping:
    """A health check of a rank."""

    ref: Any
    check: HungCheck
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return time.monotonic() - self.started


@dataclass(slots=True)
class _LearnerGroup:
    """All ranks, and their mailbox to the driver."""

    placement: Placement
    limits: LaunchLimits
    on_row: Callable[[dict[str, Any]], None] | None
    control_store: cluster.ControlStore
    mailbox: Any = None
    mailbox_process: int = 0  # process id; 0: not known yet
    ranks: list[Any] = field(default_factory=list)
    processes: list[ActorProcess] = field(default_factory=list)
    pings: dict[int, _Ping] = field(default_factory=dict)  # by rank
    mail: Any = None  # running call of ``take``

    def start(self) -> None:
        import ray

        self.mailbox = self._start_mailbox()
        actor = ray.remote(concurrency_groups={HEALTH: 1})(RankWorker)
        slots = self.placement.plan.of("learner")
        self.ranks = [actor.options(**self.placement.options(slot)).remote() for slot in slots]
        pings = [self._ping(i) for i in range(len(self.ranks))]
        _, missing = ray.wait(
            pings, num_returns=len(pings), timeout=self.limits.start, fetch_local=False
        )
        if missing:
            raise LaunchError(
                f"{len(missing)} of {len(pings)} learners did not start within"
                f" {self.limits.start:g} s (limits.start)"
            )
        try:
            self.processes = ray.get(pings)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"a learner did not start: {error}") from error

    def run(self, job: Callable[[], T], environment: Mapping[str, str]) -> T:
        """Run the job until all ranks have finished, or one has failed."""
        import ray

        shutdown = GracefulShutdown()
        with shutdown.install():
            running = self._begin(job, environment)
            failures: list[Failure] = []
            result: Any = None
            clock, deadline = RunningTime(), float("inf")
            while running and (now := clock.seconds()) < deadline:
                done, _ = ray.wait(list(running), num_returns=1, timeout=_POLL)
                self._forward()
                for ref in done:
                    returned, failure = self._outcome(ref, running.pop(ref))
                    result = returned if returned is not None else result
                    failures += [failure] if failure else []
                failures += self._hung(running)
                if failures:
                    deadline = min(deadline, now + _DRAIN)
                elif shutdown.newly_requested():  # no deadline: an iteration may take an hour
                    self.ranks[0].stop.options(concurrency_group=HEALTH).remote()
                if self.control_store.lost():  # Ray takes seconds to disconnect: report it first
                    logger.warning(
                        "Ray's control store at %s does not respond; ending all learners",
                        self.control_store.address,
                    )
                    raise LostLearnerError(self.control_store.cause)
            self._forward_rest()
        if failures:
            raise self._root_cause(failures)
        shutdown.reraise()
        return result

    def end(self) -> None:
        """Kill all ranks and release the resources."""
        import ray

        if not ray.is_initialized():
            return
        if self.control_store.silent():  # the actors still respond
            for actor in self.ranks:
                actor.exit.options(concurrency_group=HEALTH).remote()
            return
        for actor in [*self.ranks, self.mailbox]:
            if actor is not None:
                ray.kill(actor)
        self.placement.release()

    # -- helpers ---------------------------------------------------------------------------------

    def _begin(self, job: Callable[[], Any], environment: Mapping[str, str]) -> dict[Any, int]:
        import ray

        port = ray.get(self.ranks[0].free_port.remote(), timeout=self.limits.start)
        slots = self.placement.plan.of("learner")
        running = {}
        for rank, actor in enumerate(self.ranks):
            same_node = [slot for slot in slots[:rank] if slot.bundle == slots[rank].bundle]
            # Ray shows each process only its GPU, which therefore has index 0.
            local_rank = 0 if slots[rank].gpus else len(same_node)
            launch_env: dict[str, object] = {
                "RANK": rank,
                "WORLD_SIZE": len(self.ranks),
                "LOCAL_RANK": local_rank,
            }
            launch_env |= {"MASTER_ADDR": self.processes[0].address, "MASTER_PORT": port}
            context = RankContext(
                rank=rank,
                world_size=len(self.ranks),
                placement=self.placement,
                mailbox=self.mailbox,
            )
            variables = {name: str(value) for name, value in launch_env.items()} | dict(environment)
            try:
                running[actor.run.remote(job, variables, context)] = rank
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise ConfigError(
                    f"the job cannot be pickled: {error}; build models and data inside it"
                ) from error
        return running

    def _ping(self, rank: int) -> Any:
        return self.ranks[rank].ping.options(concurrency_group=HEALTH).remote()

    def _start_mailbox(self) -> Any:
        """The mailbox on the driver's node, restarted if it dies; what it held is then lost."""
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

        self.mail = self.mail or self.mailbox.take.remote()
        if not ray.wait([self.mail], timeout=wait_seconds)[0]:
            return
        mail, self.mail = self.mail, None
        try:
            rows, notes, process = ray.get(mail)
        except ray.exceptions.RayError:
            return  # the mailbox is being restarted
        if self.mailbox_process not in (0, process):
            logger.warning("%s", _MAILBOX_LOST)
        self.mailbox_process = process
        if self.on_row is not None:
            for row in rows:
                self.on_row(row)
        for note in notes:
            logger.warning("%s", note)

    def _forward_rest(self) -> None:
        for _ in range(2):  # a call that is under way, and what came after it
            self._forward(wait_seconds=_DRAIN)
        if self.mail is not None:
            logger.warning("%s", _MAILBOX_LOST)

    def _outcome(self, ref: Any, rank: int) -> tuple[Any, Failure | None]:
        import ray

        try:
            outcome: tuple[Any, Failure | None] = ray.get(ref)
        except ray.exceptions.RayTaskError as error:  # the job or its result cannot be pickled
            text = f"{type(error.cause).__name__}: {error.cause}"
            return None, Failure(rank=rank, when=time.time(), text=text, trace=str(error))
        except ray.exceptions.RayError as error:
            return None, self._death(
                rank, f"is gone: {cluster.cause(error, self.processes[rank].node)}"
            )
        return outcome

    def _death(self, rank: int, what: str) -> Failure:
        text = f"{self.processes[rank]} {what}"
        return Failure(rank=rank, when=time.time(), text=text, died=True)

    def _hung(self, running: dict[Any, int]) -> list[Failure]:
        """Failures of ranks that hang, which are no longer waited for."""
        import ray

        failures = []
        for ref, rank in list(running.items()):
            ping = self.pings.get(rank) or self._start_ping(rank)
            if ray.wait([ping.ref], timeout=0)[0]:
                if ping.seconds() > self.limits.heartbeat:
                    self.pings.pop(rank)
            elif reason := ping.check.reason():
                del running[ref]
                failures.append(self._death(rank, reason))
        return failures

    def _start_ping(self, rank: int) -> _Ping:
        check = HungCheck(f"learner {rank} ({self.processes[rank]})", self.limits.patience)
        ping = self.pings[rank] = _Ping(ref=self._ping(rank), check=check)
        return ping

    def _root_cause(self, failures: Sequence[Failure]) -> KedgeError:
        root, *others = sorted(failures, key=lambda failure: failure.order)
        if isinstance(root.error, KedgeError):
            return root.error
        what = f"learner {root.rank} of {len(self.ranks)}: {root.text}"
        lines = [what, root.trace.rstrip()] if root.trace else [f"{what.rstrip('.')};"]
        lines += [
            f"then on learner {failure.rank}: {failure.text.splitlines()[0]}" for failure in others
        ]
        lines.append("resume from the latest checkpoint, if any, with resume_from_checkpoint=True")
        kind = LostLearnerError if root.died else LaunchError
        error = kind("\n".join(line for line in lines if line))
        error.__cause__ = root.error
        return error
