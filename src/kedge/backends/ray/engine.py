"""An embedded engine in an actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.backends.ray.actor import Actor, ActorLimits
from kedge.backends.ray.weight_store import SharedWeights
from kedge.backends.rollout.rows import answering, bare
from kedge.errors import SyncError
from kedge.types import PromptBatch, Receipt, Rollout, Sampling


class RayEngine:
    """A rollout engine over an embedded engine in an actor.

    If the actor is lost in the middle of a batch, it is made again with the weights it had, and
    gets its rows once more: they come out as they would have.

    Args:
        name: for messages.
        policy: ``ray.ObjectRef`` of the policy, on the CPU.
        settings: keyword arguments of ``EmbeddedEngine``.
        options: of the actor.
        limits: how long to wait for it.
        shelf: hands the weights to all engines.
    """

    def __init__(
        self,
        name: str,
        policy: Any,
        settings: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        limits: ActorLimits,
        shelf: SharedWeights,
    ) -> None:
        self._shelf = shelf
        self._held: tuple[Any, int, Receipt] | None = None
        self.actor = Actor(
            name,
            lambda handle: handle.build.remote(embedded, policy, dict(settings)),
            options=options,
            limits=limits,
            revive=self._revive,
        )

    @property
    def shares_weights(self) -> Literal[False]:
        """It holds a copy of the policy."""
        return False

    @property
    def logprobs(self) -> Literal["sampled"]:
        """Recorded of the very distribution that tokens are drawn from."""
        return "sampled"

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed) alone.

        Raises:
            SyncError: it was sampled with other weights than were loaded.
        """
        found = self.actor.call("generate", bare(prompts), sampling=sampling, seed=seed)
        version = self._held[1] if self._held is not None else 0
        if not bool((found.version == version).all()):
            raise SyncError(
                f"{self.actor.name} sampled with version {int(found.version.min())}, and was given"
                f" version {version}"
            )
        return answering(found, prompts)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt:
        """Sample from ``weights`` from now on; the receipt is of what the actor holds."""
        ref = self._shelf.ref(weights)
        receipt: Receipt = self.actor.call("load_weights", ref, version)
        self._held = ref, version, receipt
        return receipt

    def close(self) -> None:
        """End the actor."""
        self.actor.close()

    def _revive(self, actor: Actor) -> None:
        if self._held is None:
            return
        ref, version, before = self._held
        receipt = actor.once("load_weights", ref, version)
        if receipt != before:
            raise SyncError(
                f"{actor.name} was made again with version {version} and reports {receipt} instead"
                f" of {before}"
            )


def embedded(policy: nn.Module, settings: Mapping[str, Any]) -> EmbeddedEngine:
    """The engine, on the GPU that Ray gave to this process if it gave one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return EmbeddedEngine(policy, shares_weights=False, device=device, **settings)
