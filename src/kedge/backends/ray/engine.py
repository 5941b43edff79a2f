"""An embedded rollout engine in a Ray actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.backends.ray.actor import Actor, ActorLimits
from kedge.backends.ray.weight_store import SharedWeights
from kedge.backends.rollout.rows import with_prompts, without_columns
from kedge.errors import SyncError
from kedge.types import PromptBatch, Receipt, Rollout, Sampling


class RayEngine:
    """A rollout engine over an embedded engine in an actor.

    If the actor is lost while it samples, it is restarted with the same weights and samples its
    rows again, with the same results.

    Args:
        name: for messages; with ``options`` and ``limits`` as for ``Actor``.
        policy: ``ray.ObjectRef`` of the policy, on the CPU.
        settings: keyword arguments of ``EmbeddedEngine``.
    """

    shares_weights: Literal[False] = False
    logprobs: Literal["sampled"] = "sampled"

    def __init__(
        self,
        name: str,
        policy: Any,
        settings: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        limits: ActorLimits,
        shared_weights: SharedWeights,
    ) -> None:
        self._shared_weights = shared_weights
        self._loaded: tuple[Any, int, Receipt] | None = None
        self.actor = Actor(
            name,
            lambda handle: handle.build.remote(embedded, policy, dict(settings)),
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
        version = self._loaded[1] if self._loaded is not None else 0
        if not bool((rollout.version == version).all()):
            raise SyncError(
                f"{self.actor.name} sampled with version {int(rollout.version.min())} instead of"
                f" {version}"
            )
        return with_prompts(rollout, prompts)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt:
        """Load ``weights``; the receipt describes the weights in the actor."""
        ref = self._shared_weights.ref(weights)
        receipt: Receipt = self.actor.call("load_weights", ref, version)
        self._loaded = ref, version, receipt
        return receipt

    def close(self) -> None:
        """Kill the actor."""
        self.actor.close()

    def _revive(self, actor: Actor) -> None:
        if self._loaded is None:
            return
        ref, version, before = self._loaded
        receipt = actor.once("load_weights", ref, version)
        if receipt != before:
            raise SyncError(
                f"{actor.name} was restarted with version {version} and reports {receipt} instead"
                f" of {before}"
            )


def embedded(policy: nn.Module, settings: Mapping[str, Any]) -> EmbeddedEngine:
    """The engine, on the GPU that Ray assigned to this process, if any."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return EmbeddedEngine(policy, shares_weights=False, device=device, **settings)
