"""An embedded rollout engine in a Ray actor."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kedge.errors import LostRequestsError, SyncError
from kedge.ray.actor import Actor, ActorLimits, LostActorError
from kedge.ray.resources import SharedArgument
from kedge.ray.weight_store import SharedWeights, StoredWeights
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.rollout.rows import with_prompts, without_columns
from kedge.rollout.vllm.weight_payload import WeightPayload
from kedge.types import PromptBatch, Receipt, Rollout, Sampling, group_rows

_SECONDS = 0.05  # of sampling in one call of an actor


class RayEngine:
    """A rollout engine over an embedded engine in an actor.

    If the actor is lost while it samples, it is restarted with the same weights and samples its
    rows again, with the same results.

    Args:
        name: for messages; with ``options`` and ``limits`` as for ``Actor``.
        meta_model: the policy without its trained weights, on the CPU; of all engines.
        payload: the trained weights, version 0.
        settings: keyword arguments of ``EmbeddedEngine``.
    """

    shares_weights: Literal[False] = False
    logprob_kind: Literal["sampled"] = "sampled"
    updates_in_flight: Literal[True] = True

    def __init__(
        self,
        name: str,
        meta_model: SharedArgument,
        payload: WeightPayload,
        settings: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        limits: ActorLimits,
        shared_weights: SharedWeights,
    ) -> None:
        self._shared_weights = shared_weights
        self.stage_weights = shared_weights.stage
        self._stored = shared_weights.store(payload)
        self._loaded: tuple[int, Receipt] | None = None
        self._slots: int | None = None
        self._unfinished = self._restarts = 0
        self._in_flight: dict[int, PromptBatch] = {}  # by group
        self._new: list[tuple[PromptBatch, Sampling, int]] = []  # not sent yet
        self.actor = Actor(
            name,
            lambda handle: handle.build.remote(
                HostedEngine, meta_model.reference(), self._stored, settings
            ),
            options=options,
            limits=limits,
            revive=self._revive,
        )

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed) alone.

        Raises:
            SyncError: the actor sampled with other weights than were loaded.
        """
        sent = without_columns(prompts)
        rollout: Rollout = self.actor.call("generate", sent, sampling=sampling, seed=seed)
        version = self._loaded[0] if self._loaded is not None else 0
        if (versions := rollout.version.unique().tolist()) != [version]:
            raise SyncError(
                f"{self.actor.name} sampled with version {min(versions)} instead of {version}"
            )
        return with_prompts(rollout, prompts)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt:
        """Load ``weights``; the receipt describes the weights in the actor."""
        stored = self._shared_weights.store(WeightPayload((), weights=weights))
        self._stored, self._loaded = stored, None  # an actor that is lost now restarts with them
        receipt: Receipt = self.actor.call("load_stored", stored, version)
        self._loaded = version, receipt
        return receipt

    @property
    def slots(self) -> int:
        """Responses that the actor samples at once; 0: only whole batches."""
        if self._slots is None:
            self._slots = int(self.actor.call("__getattribute__", "slots"))
        return self._slots

    @property
    def unfinished(self) -> int:
        """Responses that are being sampled."""
        return self._unfinished

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        """Hold these rows as well; they are sent with the next ``advance``."""
        for number, rows in zip(*group_rows(prompts), strict=True):
            self._in_flight[number] = prompts.rows(rows)
        self._new.append((without_columns(prompts), sampling, seed))
        self._unfinished += len(prompts)

    def advance(self) -> Rollout | None:
        """Sample on; the groups that are complete.

        Raises:
            LostRequestsError: the actor was lost and restarted.
        """
        new, self._new = self._new, []
        try:
            if self.actor.restarts != self._restarts:
                raise LostActorError(f"{self.actor.name} was restarted")
            groups, rollout, self._unfinished = self.actor.once("serve", new)
        except LostActorError as error:
            self.cancel()  # restarts it, with its weights
            raise LostRequestsError(str(error)) from error
        if rollout is None:
            return None
        return with_prompts(rollout, PromptBatch.cat([self._in_flight.pop(n) for n in groups]))

    def cancel(self) -> None:
        """Drop all requests."""
        self._in_flight.clear()
        self._new.clear()
        self._unfinished = 0
        self.actor.call("cancel")
        self._restarts = self.actor.restarts

    def close(self) -> None:
        """Kill the actor."""
        self.actor.close()

    def _revive(self, actor: Actor) -> None:
        if self._loaded is None:
            return
        version, before = self._loaded
        receipt = actor.once("load_stored", self._stored, version)
        if receipt != before:
            raise SyncError(
                f"{actor.name} was restarted with version {version} and reports {receipt} instead"
                f" of {before}"
            )


class HostedEngine(EmbeddedEngine):
    """The actor's side of ``RayEngine``, on the GPU that Ray assigned to this process, if any."""

    def __init__(
        self, meta_model: nn.Module, stored: StoredWeights, settings: Mapping[str, Any]
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _allocate(meta_model)
        super().__init__(meta_model, shares_weights=False, device=device, **settings)
        self.load_stored(stored, 0)

    def load_stored(self, stored: StoredWeights, version: int) -> Receipt:
        """Load weights from the object store."""
        return self.load_weights(dict(stored.tensors()), version)

    def serve(
        self, new: Sequence[tuple[PromptBatch, Sampling, int]]
    ) -> tuple[list[int], Rollout | None, int]:
        """Hold new rows and sample for a short time; complete groups, and ``unfinished``."""
        for prompts, sampling, seed in new:
            self.submit(prompts, sampling=sampling, seed=seed)
        parts, end = [], time.monotonic() + _SECONDS
        while self.unfinished:
            part = self.advance()
            parts += [] if part is None else [part]
            if time.monotonic() >= end:
                break
        if not parts:
            return [], None, self.unfinished
        rollout = Rollout.cat(parts)
        groups = rollout.prompts.group.unique_consecutive().tolist()
        return groups, rollout, self.unfinished


def _allocate(model: nn.Module) -> None:
    """Replace weights on the meta device by empty ones on the CPU; tied ones stay tied."""
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if p.is_meta:
                empty = nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=False)
                setattr(module, name, allocated.setdefault(id(p), empty))
