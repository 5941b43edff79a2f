"""Learners on Ray: one actor per rank, with the ordinary trainer inside."""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kedge.backends.ray import cluster
from kedge.backends.ray.context import DriverMailbox, RankContext
from kedge.backends.ray.placement import Placement, place, plan_seats
from kedge.backends.ray.worker import Failure, RankWorker
from kedge.backends.shutdown import GracefulShutdown
from kedge.errors import ConfigError, KedgeError, LaunchError

T = TypeVar("T")
logger = logging.getLogger(__name__)
_PULSE = "pulse"  # a thread of its own inside an actor
_LOOK = 0.2  # seconds between two looks at the ranks
_ECHO = 3.0  # seconds in which other ranks tell what they know of a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLimits:
    """How long to wait, in seconds."""

    room: float = 300.0  # until the cluster has room for everyone
    start: float = 300.0  # until all ranks answer
    heartbeat: float = 5.0  # between two signs of life of a rank
    patience: float = 60.0  # without one; then it counts as hung
    stop: float = 300.0  # for the ranks to write a checkpoint and end, once asked to


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
    """Run a job on every rank, and return what the first one returns.

    The job is what ``accelerate launch`` would run: it builds a trainer and trains.  Trainers in it
    take their engines and workers from the plan, send what they log to ``on_row``, and
    write a checkpoint and end when this process gets SIGINT (Ctrl-C) or SIGTERM.

    Args:
        job: can be pickled; called without arguments.
        learners: ranks on each node; each has a GPU of its own where there are GPUs.
        engines: rollout engines; ``vllm_num_engines`` of the trainer's config.
        gpus_per_engine: ``vllm_tensor_parallel_size`` of the trainer's config.
        rewards: reward workers of each learner; ``ray_reward_workers`` of the trainer's config.
        gpus_per_reward: ``ray_reward_gpus`` of the trainer's config.
        references: workers with each learner's reference; ``ray_ref_workers`` of the config.
        gpus_per_reference: ``ray_ref_gpus`` of the trainer's config.
        single_gpu_mode: the learner and all engines share one GPU.
        address: of a Ray cluster that runs; None: ``RAY_ADDRESS``, or one of its own here.
        environment: variables of the ranks, e.g. accelerate's: ``ACCELERATE_USE_FSDP``.
        limits: how long to wait.
        on_row: gets every row of metrics that the first rank logs; warnings of all ranks are logged
            here in any case.
        say: gets the plan as text; None: standard output.

    Raises:
        ConfigError: the cluster has no room; with what is missing.
        KedgeError: what a rank raised first.
        LaunchError: a rank failed otherwise, died or hung; the root cause comes first.
        KeyboardInterrupt: after Ctrl-C, once the ranks have ended.
        SystemExit: after SIGTERM, once the ranks have ended.
    """
    limits = limits or LaunchLimits()
    seats = sum(learners)
    ours = cluster.connect(address, cpus=seats * (1 + rewards + references) + engines)
    try:
        plan = plan_seats(
            learners=learners,
            engines=engines,
            rewards=rewards * seats,
            references=references * seats,
            gpus=cluster.has_gpus(),
            gpus_per_engine=gpus_per_engine,
            gpus_per_reward=gpus_per_reward,
            gpus_per_reference=gpus_per_reference,
            single_gpu_mode=single_gpu_mode,
        )
        placement = place(plan, wait_seconds=limits.room)
        (say or _print)(f"on Ray:\n{placement.text()}")
        crew = _LearnerGroup(placement, limits, on_row)
        try:
            crew.start()
            return crew.run(job, environment or {})
        finally:
            crew.end()
            placement.release()
    finally:
        if ours:
            cluster.leave()


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass(slots=True)
class _LearnerGroup:
    """All ranks, and the board between them and the driver."""

    placement: Placement
    limits: LaunchLimits
    on_row: Callable[[dict[str, Any]], None] | None
    board: Any = None
    ranks: list[Any] = field(default_factory=list)
    where: list[tuple[int, str]] = field(default_factory=list)  # process id and node
    pulses: dict[int, tuple[Any, float]] = field(default_factory=dict)  # asked, and when
    hung: set[int] = field(default_factory=set)

    def start(self) -> None:
        import ray

        self.board = ray.remote(DriverMailbox).options(num_cpus=0).remote()
        actor = ray.remote(concurrency_groups={_PULSE: 1})(RankWorker)
        seats = self.placement.plan.of("learner")
        self.ranks = [actor.options(**self.placement.options(seat)).remote() for seat in seats]
        asked = [self._ping(i) for i in range(len(self.ranks))]
        _, missing = ray.wait(
            asked, num_returns=len(asked), timeout=self.limits.start, fetch_local=False
        )
        if missing:
            raise LaunchError(
                f"{len(missing)} of {len(asked)} learners did not start within"
                f" {self.limits.start:g} s"
            )
        try:
            self.where = ray.get(asked)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"a learner did not start: {error}") from error

    def run(self, job: Callable[[], T], environment: Mapping[str, str]) -> T:
        """Watch the job until all ranks are done, or one is not."""
        import ray

        wishes = GracefulShutdown()
        with wishes.install():
            running = self._begin(job, environment)
            failures: list[Failure] = []
            result: Any = None
            until = float("inf")
            while running and time.monotonic() < until:
                done, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK)
                self._pass_on()
                for ref in done:
                    found, failed = self._outcome(ref, running.pop(ref))
                    result = found if found is not None else result
                    failures += [failed] if failed else []
                failures += self._hung(running)
                if failures:
                    until = min(until, time.monotonic() + _ECHO)
                elif wishes.newly_requested():
                    self.board.stop.remote()
                    until = time.monotonic() + self.limits.stop
            self._pass_on()
        if failures:
            raise self._root(failures)
        if running:
            raise LaunchError(
                f"learners {sorted(running.values())} did not end within {self.limits.stop:g} s of"
                " being asked to; they were killed"
            )
        wishes.reraise()
        return result

    def end(self) -> None:
        import ray

        for actor in [*self.ranks, self.board]:
            if actor is not None and ray.is_initialized():
                ray.kill(actor)

    # -- below ----------------------------------------------------------------------------------

    def _begin(self, job: Callable[[], Any], environment: Mapping[str, str]) -> dict[Any, int]:
        import ray

        port = ray.get(self.ranks[0].free_port.remote(), timeout=self.limits.start)
        seats = self.placement.plan.of("learner")
        running = {}
        for rank, actor in enumerate(self.ranks):
            before = [seat for seat in seats[:rank] if seat.bundle == seats[rank].bundle]
            # Ray shows a process its own GPU alone, so that every one is the first.
            local = 0 if seats[rank].gpus else len(before)
            own: dict[str, object] = {
                "RANK": rank,
                "WORLD_SIZE": len(self.ranks),
                "LOCAL_RANK": local,
            }
            own |= {"MASTER_ADDR": self.where[0][1], "MASTER_PORT": port}
            place = RankContext(
                rank=rank, world_size=len(self.ranks), placement=self.placement, mailbox=self.board
            )
            variables = {name: str(value) for name, value in own.items()} | dict(environment)
            try:
                running[actor.run.remote(job, variables, place)] = rank
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise ConfigError(
                    f"the job cannot be sent to the learners: {error}; build models and data"
                    " inside it"
                ) from error
        return running

    def _ping(self, rank: int) -> Any:
        return self.ranks[rank].ping.options(concurrency_group=_PULSE).remote()

    def _pass_on(self) -> None:
        import ray

        try:
            rows, notes = ray.get(self.board.take.remote(), timeout=self.limits.patience)
        except ray.exceptions.RayError:
            return  # a board that died is no reason to end a run
        if self.on_row is not None:
            for row in rows:
                self.on_row(row)
        for note in notes:
            logger.warning("%s", note)

    def _outcome(self, ref: Any, rank: int) -> tuple[Any, Failure | None]:
        import ray

        try:
            found: tuple[Any, Failure | None] = ray.get(ref)
        except ray.exceptions.RayTaskError as error:  # the job or its result cannot be sent
            text = f"{type(error.cause).__name__}: {error.cause}"
            return None, Failure(rank=rank, when=time.time(), text=text, trace=str(error))
        except ray.exceptions.RayError as error:
            return None, self._death(rank, cluster.cause(error))
        return found

    def _death(self, rank: int, why: str) -> Failure:
        pid, node = self.where[rank]
        text = f"process {pid} on {node} is gone: {why}"
        return Failure(rank=rank, when=time.time(), text=text, died=True)

    def _hung(self, running: Mapping[Any, int]) -> list[Failure]:
        import ray

        now, found = time.monotonic(), []
        for rank in set(running.values()) - self.hung:
            ref, asked = self.pulses.setdefault(rank, (self._ping(rank), now))
            if ray.wait([ref], timeout=0)[0]:
                if now - asked > self.limits.heartbeat:
                    self.pulses.pop(rank)
            elif now - asked > self.limits.patience:
                self.hung.add(rank)
                found.append(self._death(rank, f"no sign of life for {self.limits.patience:g} s"))
        return found

    def _root(self, failures: Sequence[Failure]) -> KedgeError:
        root, *others = sorted(failures, key=lambda each: each.order)
        if isinstance(root.error, KedgeError):
            return root.error
        lines = [f"learner {root.rank} of {len(self.ranks)}: {root.text}", root.trace.rstrip()]
        lines += [
            f"what followed on learner {each.rank}: {each.text.splitlines()[0]}" for each in others
        ]
        lines.append(
            "a run with checkpoints goes on from the newest with resume_from_checkpoint=True"
        )
        made = LaunchError("\n".join(line for line in lines if line))
        made.__cause__ = root.error
        return made
