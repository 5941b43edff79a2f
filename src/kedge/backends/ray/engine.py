"""An embedded rollout engine in a Ray actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.backends.ray.actor import Actor, ActorLimits
from kedge.backends.ray.weight_store import SharedWeights, StoredWeights
from kedge.backends.rollout.rows import with_prompts, without_columns
from kedge.backends.vllm.weight_payload import WeightPayload
from kedge.errors import SyncError
from kedge.types import PromptBatch, Receipt, Rollout, Sampling


class RayEngine:
    """A rollout engine over an embedded engine in an actor.

    If the actor is lost while it samples, it is restarted with the same weights and samples its
    rows again, with the same results.

    Args:
        name: for messages; with ``options`` and ``limits`` as for ``Actor``.
        skeleton: ``ray.ObjectRef`` of the policy without its trained weights, on the CPU.
        payload: the trained weights, version 0.
        settings: keyword arguments of ``EmbeddedEngine``.
    """

    shares_weights: Literal[False] = False
    logprobs: Literal["sampled"] = "sampled"

    def __init__(
        self,
        name: str,
        skeleton: Any,
        payload: WeightPayload,
        settings: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        limits: ActorLimits,
        shared_weights: SharedWeights,
    ) -> None:
        self._shared_weights = shared_weights
        self._stored = shared_weights.store(payload)
        self._loaded: tuple[int, Receipt] | None = None
        self.actor = Actor(
            name,
            lambda handle: handle.build.remote(HostedEngine, skeleton, self._stored, settings),
            options=options,
            limits=limits,
            revive=self._revive,
        )

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed) alone.

        Raises:
            SyncError: the actor sampled with other weights than were loaded.
        """
        rollout = self.actor.call(
            "generate", without_columns(prompts), sampling=sampling, seed=seed
        )
        version = self._loaded[0] if self._loaded is not None else 0
        if not bool((rollout.version == version).all()):
            raise SyncError(
                f"{self.actor.name} sampled with version {int(rollout.version.min())} instead of"
                f" {version}"
            )
        return with_prompts(rollout, prompts)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt:
        """Load ``weights``; the receipt describes the weights in the actor."""
        stored = self._shared_weights.store(WeightPayload(tuple(weights.items())))
        receipt: Receipt = self.actor.call("load_stored", stored, version)
        self._stored, self._loaded = stored, (version, receipt)
        return receipt

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
        self, skeleton: nn.Module, stored: StoredWeights, settings: Mapping[str, Any]
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _allocate(skeleton)
        super().__init__(skeleton, shares_weights=False, device=device, **settings)
        self.load_stored(stored, 0)

    def load_stored(self, stored: StoredWeights, version: int) -> Receipt:
        """Load weights from the object store."""
        return self.load_weights(dict(stored.tensors()), version)


def _allocate(model: nn.Module) -> None:
    """Replace weights on the meta device by empty ones on the CPU; tied ones stay tied."""
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if p.is_meta:
                empty = nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=False)
                setattr(module, name, allocated.setdefault(id(p), empty))
