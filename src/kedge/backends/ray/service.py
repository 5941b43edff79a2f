"""A vLLM in a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from kedge.backends.ray.actor import Actor, ActorLimits, LostActorError
from kedge.backends.ray.weight_store import SharedWeights
from kedge.backends.vllm import GenerationRequest, GenerationResult, InProcess
from kedge.backends.vllm.nccl_transfer import Control, NcclTransfer
from kedge.backends.vllm.weight_payload import WeightPayload
from kedge.errors import LostRequestsError, RolloutError

_SECONDS = 0.05  # of sampling in one call of an actor


class RayService:
    """A vLLM in an actor, as a service of ``kedge.backends.vllm.VLLMEngine``.

    If the actor is lost while it generates, it is restarted with the same weights and gets its rows
    again: every row is sampled by the same version.

    With ``connect``, weights are sent over NCCL from GPU to GPU, otherwise by Ray's object store.

    Args:
        name: for messages; with ``options`` and ``limits`` as for ``Actor``.
        spec: ``ray.ObjectRef`` of the ``PolicySpec``.
        weights: ``ray.ObjectRef`` of the initial weights, version 0.
        connect: creates the NCCL transfer, given the vLLM's ``Control``.
    """

    def __init__(
        self,
        name: str,
        spec: Any,
        weights: Any,
        engine_args: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        limits: ActorLimits,
        shared_weights: SharedWeights,
        connect: Callable[[Control], NcclTransfer] | None = None,
    ) -> None:
        self._shared_weights, self._limits, self._connect = shared_weights, limits, connect
        self._loaded: tuple[Any, int] | None = None  # payload or its ref, and version
        self._transfer: NcclTransfer | None = None
        self._restarts = 0
        self.actor = Actor(
            name,
            lambda handle: handle.build.remote(
                InProcess,
                spec,
                weights,
                dict(engine_args),
                shares_gpu=options.get("num_gpus", 0) < 1,
            ),
            options=options,
            limits=limits,
            revive=self._revive,
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One result per request, in order; restarts the actor if it is lost."""
        return self.actor.call("generate", list(requests))

    @property
    def abilities(self) -> tuple[int, bool]:
        """Requests that it runs at once, and whether ``load`` may be called while it holds some."""
        abilities: tuple[int, bool] = self.actor.call("__getattribute__", "abilities")
        return abilities

    def serve(self, new: Mapping[int, GenerationRequest]) -> dict[int, GenerationResult]:
        """Hold new requests, by key, and sample for a short time; results by key.

        Raises:
            LostRequestsError: the actor was lost and restarted.
        """
        try:
            if self.actor.restarts != self._restarts:
                raise LostActorError(f"{self.actor.name} was restarted")
            results: dict[int, GenerationResult] = self.actor.once("serve", dict(new), _SECONDS)
        except LostActorError as error:
            self.cancel()  # restarts it, with its weights
            raise LostRequestsError(str(error)) from error
        return results

    def cancel(self) -> None:
        """Drop all requests that it holds."""
        self.actor.call("cancel")
        self._restarts = self.actor.restarts

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability (nats) of each token of each row but its first."""
        return self.actor.call("score", list(rows))

    def load(self, payload: WeightPayload, version: int) -> None:
        """Load the weights or the adapter, and reset the prefix cache."""
        adapter = payload.adapter
        if self._connect is not None and adapter is None:
            self.actor.call("version")  # restarts the actor first if it is lost
            try:
                self._send(payload, version)
            except LostActorError as error:
                raise RolloutError(
                    f"{error} while weights were sent to it over NCCL, which cannot be interrupted;"
                    " resume the run from its latest checkpoint"
                ) from error
            self._loaded = payload, version
            return
        ref = self._shared_weights.ref(
            dict(payload.named),
            lambda w: WeightPayload(tuple(w.items()), adapter, payload.dtype),
            dtype=payload.dtype,
        )
        self.actor.call("load", ref, version, within=self._limits.start)
        self._loaded = ref, version

    def _send(self, payload: WeightPayload, version: int) -> None:
        assert self._connect is not None
        if self._transfer is None:
            self._transfer = self._connect(ActorControl(self.actor, self._limits.start))
        self._transfer.send(payload)
        self.actor.once("finish_load", version)

    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        return int(self.actor.call("max_length"))

    def version(self) -> int:
        """Version of the weights that vLLM reports."""
        return int(self.actor.call("version"))

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory."""
        self.actor.call("sleep")

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate a part of the GPU memory again."""
        self.actor.call("wake", part)

    def close(self) -> None:
        """Kill the actor."""
        self.actor.close()

    def _revive(self, actor: Actor) -> None:
        self._transfer = None  # its process is gone
        if self._loaded is None:
            return
        payload, version = self._loaded
        if isinstance(payload, WeightPayload):
            self._send(payload, version)
        else:
            actor.once("load", payload, version, within=self._limits.start)


class ActorControl:
    """``Control`` of the ``InProcess`` in an actor; ``limit`` is in seconds, for each call."""

    def __init__(self, actor: Actor, limit: float) -> None:
        self._actor, self._limit = actor, limit

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the process group of ``init_info``."""
        self._call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        """Prepare to receive weights."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive the weights of ``update_info``."""
        self._call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish after all weights were received; ``finish_load`` sets the version."""
        self._call("finish_weight_update")

    def _call(self, method: str, **kwargs: Any) -> None:
        self._actor.once("transfer", method, within=self._limit, **kwargs)
