"""The reference in actors: its log-probabilities, while the learner computes its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kedge.backends.hf.load import load_policy
from kedge.backends.hf.logprobs import reference_logprobs
from kedge.backends.hf.packing import to_device
from kedge.backends.hf.reference import FrozenModel
from kedge.backends.hf.settings import LearnerSettings
from kedge.backends.ray.actor import Actor, ActorLimits, actor_limits
from kedge.backends.ray.placement import PlacementPlan, plan_seats
from kedge.backends.ray.resources import ActorResources, allocate, from_launch
from kedge.backends.rollout import start_all
from kedge.backends.rollout.rows import bare
from kedge.config.rollout import RolloutOptions
from kedge.ops.cpu.patch import Kernels
from kedge.types import Rollout


class ReferenceActor:
    """A reference inside an actor.

    Args:
        model: the reference, or where it is loaded from.
        settings: how the learner computes.
        autocast: the type of mixed precision; None is float32.
        quick: layers may be computed by quicker code, as the learner's are.
        trust: whether code that comes with the model may run.
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
        loaded = load_policy(model, trust_remote_code=trust)
        self._reference = FrozenModel(loaded).to(self._device)
        self._settings, self._autocast = settings, autocast
        self._kernels = Kernels([loaded] if quick else [])

    @torch.no_grad()
    def logprobs(self, rollout: Rollout, groups: Sequence[Sequence[int]]) -> list[Tensor]:
        """Per group of rows its log-probabilities float32 [rows, R], on the CPU."""
        rollout = to_device(rollout, self._device)
        kind, low = self._device.type, self._autocast
        with self._kernels.active(), torch.autocast(kind, low, enabled=low is not None):
            found = [
                reference_logprobs(
                    self._reference,
                    rollout,
                    torch.tensor(rows, device=self._device),
                    self._settings,
                )
                for rows in groups
            ]
        return [x.cpu() for x in found]


class RayReference:
    """A reference whose work is done in actors.

    The passes of a batch are shared by the workers; each computes the rows that the learner would
    have computed together, so the numbers are those of a reference in the learner's process.  A
    worker that dies or hangs is made again and computes its share once more.

    Args:
        build: starts the building of a worker's ``ReferenceActor``, given the actor's handle.
        room: where they run; one seat per worker.
        limits: how long to wait for one.

    Raises:
        ConfigError: a worker does not start, or the model cannot be loaded.
    """

    def __init__(
        self, build: Callable[[Any], Any], room: ActorResources, *, limits: ActorLimits
    ) -> None:
        self._release = room.release
        makers = [
            partial(
                Actor,
                f"reference worker {seat.index}",
                build,
                options=room.placement.options(seat),
                limits=limits,
            )
            for seat in room.seats
        ]
        self.workers = start_all(makers, undo=room.release)
        self._threads = ThreadPoolExecutor(len(self.workers), thread_name_prefix="reference")

    def begin(self, rollout: Rollout, groups: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        """Start on the log-probabilities float32 [B, R] of the sampled tokens.

        Args:
            rollout: of B rows.
            groups: rows that are computed together; every row is in one.

        Returns:
            Waits for them.  It raises RolloutError where a worker died again and again.
        """
        import ray

        needed = replace(rollout, prompts=bare(rollout.prompts), behavior_logprobs=None)
        sent = ray.put(needed.to("cpu"))
        count = len(self.workers)
        mine = [list(groups[k::count]) for k in range(count)]
        running = [
            (share, self._threads.submit(worker.call, "logprobs", sent, share))
            for worker, share in zip(self.workers, mine, strict=True)
            if share
        ]

        def wait() -> Tensor:
            out = torch.zeros(rollout.ids.shape)
            for share, future in running:
                for rows, found in zip(share, future.result(), strict=True):
                    out[torch.tensor(rows)] = found
            return out

        return wait

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()
        self._threads.shutdown(wait=True)
        self._release()


def ray_reference(
    model: nn.Module | str,
    settings: LearnerSettings,
    options: RolloutOptions,
    *,
    autocast: torch.dtype | None,
    quick: bool,
    trust: bool,
) -> RayReference:
    """Workers in the room that a launch holds for this rank, or in room of their own.

    Args:
        model: the reference, or where it is loaded from.
        settings: how the learner computes.
        options: how many workers, and how long to wait.
        autocast: the type of mixed precision; None is float32.
        quick: layers may be computed by quicker code, as the learner's are.
        trust: whether code that comes with the model may run.

    Raises:
        ConfigError: the cluster has no room, or a worker does not start.
    """
    import ray

    asked = options.ray
    room = from_launch("reference", count=asked.ref_workers, option="ray_ref_workers")
    if room is None:

        def plan(_: bool) -> PlacementPlan:
            return plan_seats(references=asked.ref_workers, gpus_per_reference=asked.ref_gpus)

        room = allocate("reference", options, plan)
    sent = ray.put(model)
    about = {"autocast": autocast, "quick": quick, "trust": trust}
    return RayReference(
        lambda handle: handle.build.remote(ReferenceActor, sent, settings, **about),
        room,
        limits=actor_limits(options),
    )
