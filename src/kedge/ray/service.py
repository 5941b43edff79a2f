"""A vLLM in a Ray actor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from kedge.errors import LostNodeError, LostRequestsError, RolloutError
from kedge.ray.actor import Actor, ActorLimits, LostActorError
from kedge.ray.resources import SharedArgument
from kedge.ray.weight_store import SharedWeights, StoredWeights
from kedge.rollout.vllm import GenerationRequest, GenerationResult, InProcess
from kedge.rollout.vllm.nccl_transfer import EngineGroup
from kedge.rollout.vllm.policy_template import PolicyTemplate
from kedge.rollout.vllm.weight_payload import WeightPayload

_SECONDS = 0.05  # of sampling in one call of an actor


class RayService:
    """A vLLM in an actor, as a service of ``kedge.rollout.vllm.VLLMEngine``.

    If the actor is lost while it generates, it is restarted with the same weights and gets its rows
    again: every row is sampled by the same version.

    With ``group``, weights are broadcast over NCCL from GPU to GPU, otherwise they are read from
    Ray's object store.

    Args:
        name: for messages; with ``options`` and ``limits`` as for ``Actor``.
        spec: the ``PolicyTemplate``, of all engines.
        payload: the initial weights, version 0.
        shared_weights: of all engines.
        group: of the engines that load the same versions at the same time.
    """

    def __init__(
        self,
        name: str,
        spec: SharedArgument,
        payload: WeightPayload,
        engine_args: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        limits: ActorLimits,
        shared_weights: SharedWeights,
        group: EngineGroup | None = None,
    ) -> None:
        self._shared_weights, self._limits, self._group = shared_weights, limits, group
        self.stage = shared_weights.stage
        self._version: int | None = None
        # The current weights in the object store, for a restart; those that were sent over NCCL
        # are stored in the background, so that no GPU holds a copy of them.
        self._stored = shared_weights.begin(payload)
        self._restarts = 0
        self.actor = Actor(
            name,
            lambda handle: handle.build.remote(
                hosted_vllm,
                InProcess,
                spec.reference(),
                self._stored.result(),
                dict(engine_args),
                shares_gpu=options.get("num_gpus", 0) < 1,
            ),
            options=options,
            limits=limits,
            revive=self._revive,
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One result per request, in order; restarts the actor if it is lost."""
        with self._failing_group():
            results: list[GenerationResult] = self.actor.call("generate", list(requests))
        return results

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
        if self._group is not None and payload.adapter is None:
            try:
                self.actor.call("version")  # restarts the actor first if it is lost
            except RolloutError as error:
                self._group.fail(error)
                raise
            try:
                call = partial(self.actor.once, "transfer", within=self._limits.start)
                self._group.send(self, call, payload)
                self.actor.once("finish_load", version)
            except LostActorError as error:
                raise RolloutError(
                    f"{error} while weights were sent to it over NCCL, which cannot be interrupted;"
                    " resume the run from its latest checkpoint"
                ) from error
            self._stored, self._version = self._shared_weights.begin(payload), version
            return
        stored = self._shared_weights.begin(payload)
        weights = stored.result()
        self._stored, self._version = stored, None  # an actor that is lost now restarts with them
        self.actor.call("load_stored", weights, version, within=self._limits.start)
        self._version = version

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

    @contextlib.contextmanager
    def _failing_group(self) -> Iterator[None]:
        """Context in which a lost node ends the group, which cannot form without this engine."""
        try:
            yield
        except LostNodeError as error:
            if self._group is not None:
                self._group.fail(error)
            raise

    def _revive(self, actor: Actor) -> None:
        if self._group is not None:
            self._group.reset()  # a process of it is gone
        if self._version is not None:
            actor.once("finish_load", self._version)


def hosted_vllm(
    kind: type[InProcess],
    spec: PolicyTemplate,
    stored: StoredWeights,
    engine_args: Mapping[str, Any],
    *,
    shares_gpu: bool,
) -> InProcess:
    """The vLLM in the actor: ``InProcess``, with a method that loads stored weights."""

    class HostedVLLM(kind):  # type: ignore[misc, valid-type]
        def load_stored(self, stored: StoredWeights, version: int) -> None:
            self.load(spec.payload(dict(stored.tensors())), version)

    return HostedVLLM(spec, dict(stored.tensors()), engine_args, shares_gpu=shares_gpu)
