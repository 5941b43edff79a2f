"""A vLLM in an actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kedge.backends.ray.actor import Actor, Limits
from kedge.backends.ray.shelf import Shelf
from kedge.backends.vllm import Answer, Ask, InProcess
from kedge.backends.vllm.parcel import Parcel


class RayService:
    """A vLLM in an actor, as ``kedge.backends.vllm.VLLMEngine`` needs it.

    If the actor is lost while it generates, it is made again with the weights it had, and gets its
    rows once more: every row is answered once, by the same version.

    Args:
        name: for messages.
        blueprint: ``ray.ObjectRef`` of the policy's blueprint.
        weights: ``ray.ObjectRef`` of the first weights; they count as version 0.
        engine_args: engine arguments of vLLM by name.
        options: of the actor.
        limits: how long to wait for it.
        shelf: hands the weights to all engines.
    """

    def __init__(
        self,
        name: str,
        blueprint: Any,
        weights: Any,
        engine_args: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        limits: Limits,
        shelf: Shelf,
    ) -> None:
        self._shelf, self._limits = shelf, limits
        self._held: tuple[Any, int] | None = None
        self.actor = Actor(
            name,
            lambda handle: handle.build.remote(InProcess, blueprint, weights, dict(engine_args)),
            options=options,
            limits=limits,
            revive=self._revive,
        )

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        """The answers, in the order of the asks, through any death of the actor."""
        found: list[Answer] = self.actor.call("generate", list(asks))
        return found

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability of each token of each row but its first."""
        found: list[list[float]] = self.actor.call("score", list(rows))
        return found

    def load(self, parcel: Parcel, version: int) -> None:
        """Exchange the weights, or the adapter, and drop the cache of prefixes."""
        adapter = parcel.adapter
        ref = self._shelf.ref(dict(parcel.named), lambda w: Parcel(tuple(w.items()), adapter))
        self.actor.call("load", ref, version, within=self._limits.start)
        self._held = ref, version

    def version(self) -> int:
        """The version of the weights, as vLLM says."""
        found: int = self.actor.call("version")
        return found

    def sleep(self) -> None:
        """Free the cache."""
        self.actor.call("sleep")

    def wake(self) -> None:
        """Undo ``sleep``."""
        self.actor.call("wake")

    def close(self) -> None:
        """End the actor."""
        self.actor.close()

    def _revive(self, actor: Actor) -> None:
        if self._held is not None:
            actor.once("load", *self._held, within=self._limits.start)
