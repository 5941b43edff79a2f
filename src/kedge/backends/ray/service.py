"""A vLLM in an actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kedge.backends.ray.actor import Actor, ActorLimits, LostActorError
from kedge.backends.ray.weight_store import SharedWeights
from kedge.backends.vllm import GenerationRequest, GenerationResult, InProcess
from kedge.backends.vllm.nccl_transfer import Control, NcclTransfer
from kedge.backends.vllm.weight_payload import WeightPayload
from kedge.errors import RolloutError


class RayService:
    """A vLLM in an actor, as ``kedge.backends.vllm.VLLMEngine`` needs it.

    If the actor is lost while it generates, it is made again with the weights it had, and gets its
    rows once more: every row is answered once, by the same version.

    Where there is a ``wire``, weights go over it from GPU to GPU, else through Ray's object store.

    Args:
        name: for messages.
        blueprint: ``ray.ObjectRef`` of the policy's blueprint.
        weights: ``ray.ObjectRef`` of the first weights; they count as version 0.
        engine_args: engine arguments of vLLM by name.
        options: of the actor.
        limits: how long to wait for it.
        shelf: hands the weights to all engines.
        wire: makes the way from GPU to GPU, given the vLLM's ``Control``; None: there is none.
    """

    def __init__(
        self,
        name: str,
        blueprint: Any,
        weights: Any,
        engine_args: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        limits: ActorLimits,
        shelf: SharedWeights,
        wire: Callable[[Control], NcclTransfer] | None = None,
    ) -> None:
        self._shelf, self._limits, self._connect = shelf, limits, wire
        self._held: tuple[Any, int] | None = None  # where they are, and their version
        self._wire: NcclTransfer | None = None
        self.actor = Actor(
            name,
            lambda handle: handle.build.remote(InProcess, blueprint, weights, dict(engine_args)),
            options=options,
            limits=limits,
            revive=self._revive,
        )

    def generate(self, asks: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """The answers, in the order of the asks, through any death of the actor."""
        found: list[GenerationResult] = self.actor.call("generate", list(asks))
        return found

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability of each token of each row but its first."""
        found: list[list[float]] = self.actor.call("score", list(rows))
        return found

    def load(self, parcel: WeightPayload, version: int) -> None:
        """Exchange the weights, or the adapter, and drop the cache of prefixes."""
        adapter = parcel.adapter
        if self._connect is not None and adapter is None:
            self.actor.call("version")  # made again first, should it have died meanwhile
            try:
                self._send(parcel, version)
            except LostActorError as error:
                raise RolloutError(
                    f"{error} while weights were on their way to it over NCCL, which cannot be"
                    " interrupted; the run goes on from its newest checkpoint"
                ) from error
            self._held = parcel, version
            return
        ref = self._shelf.ref(
            dict(parcel.named), lambda w: WeightPayload(tuple(w.items()), adapter)
        )
        self.actor.call("load", ref, version, within=self._limits.start)
        self._held = ref, version

    def _send(self, parcel: WeightPayload, version: int) -> None:
        assert self._connect is not None
        if self._wire is None:
            self._wire = self._connect(ActorControl(self.actor, self._limits.start))
        self._wire.send(parcel.named)
        self.actor.once("settle", version)

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
        self._wire = None  # it led to the process that was lost
        if self._held is None:
            return
        held, version = self._held
        if isinstance(held, WeightPayload):
            self._send(held, version)
        else:
            actor.once("load", held, version, within=self._limits.start)


class ActorControl:
    """How a vLLM in an actor is told what to do with weights.

    Args:
        actor: holds an ``InProcess``.
        limit: most seconds that one call may take.
    """

    def __init__(self, actor: Actor, limit: float) -> None:
        self._actor, self._limit = actor, limit

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the group of processes that ``init_info`` names."""
        self._call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        """New weights are about to come."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive the weights that ``update_info`` names."""
        self._call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All have come; ``settle`` names the version."""
        self._call("finish_weight_update")

    def _call(self, method: str, **about: Any) -> None:
        self._actor.once("transfer", method, within=self._limit, **about)
