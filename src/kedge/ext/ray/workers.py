"""Workers of each learner, as Ray actors: they score responses, or compute the reference."""

from __future__ import annotations

import logging.handlers
import pickle
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from kedge.ext.ray.actor import Actor, SharedArgument
from kedge.ext.ray.placement import COUNTS, Role, reserve
from kedge.learner.logprobs import reference_logprobs
from kedge.learner.reference import FrozenModel
from kedge.learner.settings import LearnerSettings
from kedge.models.backbone import supports_packing
from kedge.models.load import load_policy
from kedge.models.model import CausalParts
from kedge.ops.kernels import Kernels
from kedge.records.errors import ConfigError, RewardError, RolloutError
from kedge.records.protocols import RewardInfo, RewardSource, read_info
from kedge.records.types import RewardOutput, Rollout
from kedge.rewards.build import RewardOptions
from kedge.rewards.mixture import SlowCalls
from kedge.rollout.engines import start_all, without_columns
from kedge.rollout.liveness import WorkerLimits

if TYPE_CHECKING:
    from kedge.config.rollout_engines import RolloutArguments

logger = logging.getLogger(__name__)


class ActorPool:
    """The workers of one role, which share the rows of each batch.

    Each has an object of class ``kind``, with ``shared`` as its first argument, which is pickled
    once for all of them, and the others.  A worker that dies or hangs is restarted and repeats its
    share.
    """

    def __init__(
        self,
        role: Role,
        args: RolloutArguments,
        kind: type,
        shared: Any,
        *others: Any,
        **named: Any,
    ) -> None:
        resources, option = reserve(role, args), COUNTS[role]
        self._release = resources.release
        try:
            argument = SharedArgument(lambda: shared, len(resources.slots))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            resources.release()
            raise ConfigError(
                f"a {role} function or model cannot be pickled for {option}: {error}; define it in"
                f" a module, or set {option}=0"
            ) from error
        makers = [
            partial(
                Actor,
                f"{role} worker {slot.index}",
                lambda handle: handle.build.remote(kind, argument.reference(), *others, **named),
                options=resources.placement.options(slot),
                limits=WorkerLimits.of(args),
            )
            for slot in resources.slots
        ]
        self.workers = start_all(makers, undo=resources.release)
        self.threads = ThreadPoolExecutor(len(self.workers), thread_name_prefix=role)

    def close(self) -> None:
        """Kill the workers and release their resources."""
        for worker in self.workers:
            worker.close()
        self.threads.shutdown(wait=True)
        self._release()


class RewardActor:
    """A reward source inside an actor, which ``make`` makes with these options."""

    def __init__(self, make: Callable[..., RewardSource], options: RewardOptions) -> None:
        self._state, self._notes = None, logging.handlers.BufferingHandler(capacity=100)
        logging.getLogger("kedge").addHandler(self._notes)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._source = make(options, device=device, trainer_state=lambda: self._state)

    def info(self) -> RewardInfo:
        """What can be sent of the source's ``info``."""
        return replace(read_info(self._source, RewardInfo), begin=None)

    def score(self, rollout: Rollout, state: Any) -> tuple[RewardOutput, list[str]]:
        """The reward output, and warnings."""
        self._state = state
        output = self._source.score(rollout)
        notes = [record.getMessage() for record in self._notes.buffer]
        self._notes.flush()
        return output, notes


class RayRewards(ActorPool):
    """A reward source that scores in actors, each a share of the batch.

    Responses to one prompt stay together.  Several batches, such as groups that are completed one
    by one, are scored at the same time.  ``trainer_state`` returns the value to pass to functions.
    """

    def __init__(self, args: Any, *parts: Any, trainer_state: Callable[[], object]) -> None:
        super().__init__("reward", args, RewardActor, *parts)
        self._state, self._slow = trainer_state, SlowCalls()
        self._free: queue.SimpleQueue[Actor] = queue.SimpleQueue()
        for worker in self.workers:
            self._free.put(worker)
        # Environments stay in this process, and models may differ from those of others.
        columns = self.workers[0].call("info").columns
        self.info = RewardInfo(columns=columns, parallel=len(self.workers))

    def score(self, rollout: Rollout) -> RewardOutput:
        """One reward output for all rows."""
        shares, state = between_groups(rollout.prompts.group, len(self.workers)), self._state()
        # Without fields that rewards do not read, at unchanged width.
        sent = replace(rollout, allowed_tokens=None)
        parts = [sent.rows(rows).to("cpu") for rows in shares]
        running = [self.threads.submit(self._score, part, state) for part in parts]
        wait(running)
        try:
            outputs = [future.result() for future in running]
        except RolloutError as error:
            raise RewardError(str(error)) from error
        return RewardOutput.cat(outputs).to(rollout.ids.device)

    def _score(self, rollout: Rollout, state: Any) -> RewardOutput:
        """The output of a worker that is free."""
        worker = self._free.get()
        try:
            before = worker.restarts  # a restart has been logged
            slow = self._slow.report(
                worker.name, len(rollout), unless=lambda: worker.restarts > before
            )
            with slow:
                output, notes = worker.call("score", rollout, state)
        finally:
            self._free.put(worker)
        for note in notes:
            logger.warning("%s: %s", worker.name, note)
        return cast(RewardOutput, output)


def between_groups(group: Tensor, parts: int) -> list[slice]:
    """Split rows into at most ``parts`` consecutive, similar shares without splitting a group.

    All rows are one share if rows of a group (int64 [B]) are not adjacent.
    """
    rows = len(group)
    starts = [0, *(int(i) + 1 for i in (group[1:] != group[:-1]).nonzero()[:, 0])]
    if len(starts) > len(group.unique()):
        return [slice(0, rows)]
    ideals = [rows * i // parts for i in range(parts)]
    begins = sorted({min(starts, key=lambda start: abs(start - ideal)) for ideal in ideals})
    return [slice(a, b) for a, b in zip(begins, [*begins[1:], rows], strict=True)]


class ReferenceActor:
    """The reference inside an actor.

    ``quick``: use the learner's CPU kernels; ``trust``: custom code of the model may run.
    """

    def __init__(
        self,
        model: nn.Module | str,
        settings: LearnerSettings,
        *,
        autocast: torch.dtype | None,
        quick: bool,
        trust: bool,
    ) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        policy = load_policy(model, trust_remote_code=trust)
        self._reference = FrozenModel(policy)
        self._reference.model.to(self._device)
        self._settings, self._autocast = settings, autocast
        self._kernels = Kernels([policy] if quick else [])
        parts = self._reference.parts
        self._joins = quick and isinstance(parts, CausalParts) and supports_packing(parts.backbone)

    @torch.no_grad()
    def logprobs(
        self, rollout: Rollout, groups: Sequence[Sequence[int]], joined: bool
    ) -> list[Tensor]:
        """Log-probabilities (nats) of each group of rows: float32 [rows, R], on the CPU."""
        if isinstance(parts := self._reference.parts, CausalParts):
            self._reference.parts = replace(parts, packs_rows=joined and self._joins)
        device_type, dtype = self._device.type, self._autocast
        enabled = dtype is not None
        with self._kernels.active(), torch.autocast(device_type, dtype, enabled=enabled):
            logprobs = [
                reference_logprobs(self._reference, group, self._settings, self._device)
                for group in (rollout.rows(torch.tensor(rows)) for rows in groups)
            ]
        return [x.cpu() for x in logprobs]


class RayReference(ActorPool):
    """A reference that computes in actors.

    The workers share the passes of a batch; each pass has the rows that the learner would compute
    together, so the results equal those of a reference in the learner's process.
    """

    def __init__(self, args: Any, *parts: Any, **options: Any) -> None:
        super().__init__("reference", args, ReferenceActor, *parts, **options)

    def begin(
        self, rollout: Rollout, groups: Sequence[Sequence[int]], *, joined: bool
    ) -> Callable[[], Tensor]:
        """Start to compute log-probabilities float32 [B, R], nats, of the sampled tokens.

        Each of ``groups`` of rows shares a forward pass, without padding if the learner's are
        ``joined``. The returned function waits for them.
        """
        import ray

        inputs = replace(rollout, prompts=without_columns(rollout.prompts), behavior_logprobs=None)
        rollout_ref = ray.put(inputs.to("cpu"))
        count = min(len(self.workers), len(groups))
        shares = [list(groups[k::count]) for k in range(count)]
        start = self.threads.submit
        running = [
            (share, start(worker.call, "logprobs", rollout_ref, share, joined))
            for worker, share in zip(self.workers, shares, strict=False)
        ]

        def wait() -> Tensor:
            logprobs = torch.zeros(rollout.ids.shape)
            for share, future in running:
                for rows, values in zip(share, future.result(), strict=True):
                    logprobs[torch.tensor(rows)] = values
            return logprobs

        return wait


build_rewards, build_reference = RayRewards, RayReference  # what ``load_workers`` finds
