"""A rollout engine in a Ray actor (the embedded one, or vLLM), with weights in the object store."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from kedge.ext.ray.actor import Actor, LostActorError, SharedArgument
from kedge.ext.ray.cluster import ActorProcess
from kedge.ext.ray.placement import ActorResources, reserve
from kedge.ext.vllm.build import build_template
from kedge.ext.vllm.engine import VLLMEngine
from kedge.ext.vllm.inprocess import InProcess
from kedge.ext.vllm.policy_template import Expected, PolicyTemplate, meta_model, on_cpu
from kedge.ext.vllm.weights import NcclGroup, buckets, use_nccl
from kedge.models.fingerprint import WeightsCopy, as_copy, policy_weights
from kedge.records.errors import RolloutError, SyncError
from kedge.records.protocols import EngineInfo, RolloutEngine
from kedge.records.types import PromptBatch, Receipt, Rollout, Sampling, group_rows
from kedge.rollout.embedded.engine import EmbeddedEngine, check_prompts
from kedge.rollout.engines import (
    EngineInputs,
    ShardedEngine,
    start_all,
    with_prompts,
    without_columns,
)
from kedge.rollout.liveness import WorkerLimits

if TYPE_CHECKING:
    from kedge.config.base import OnPolicyConfig

_SECONDS = 0.05  # seconds of sampling per call of an actor
NCCL = {"backend": "nccl"}  # vLLM's weight_transfer_config
Request = tuple[PromptBatch, Sampling, int]  # with the seed


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights in the object store, which stay there as long as this exists; can be pickled.

    Each of ``buckets`` is a ``ray.ObjectRef`` of names, dtypes, shapes and bytes (numpy uint8 [n]).
    """

    buckets: tuple[Any, ...]

    @classmethod
    def put(
        cls, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> StoredWeights:
        """Store weights, a bucket at a time; floating-point ones as ``dtype`` if it is given."""
        import ray

        named = ((n, x.detach().to(dtype if x.is_floating_point() else None)) for n, x in weights)
        try:
            return cls(
                tuple(
                    ray.put([(n, x.dtype, tuple(x.shape), _octets(x)) for n, x in bucket])
                    for bucket in buckets(named)
                )
            )
        except ray.exceptions.ObjectStoreFullError as error:
            raise SyncError(
                "Ray's object store has no room for the weights of the rollout engines; the engines"
                " keep those that they have. Start Ray with a larger object_store_memory"
                f" ({str(error).splitlines()[0]})"
            ) from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights; views of the store's memory, which must not be written to."""
        import ray

        for ref in self.buckets:
            for name, dtype, shape, octets in ray.get(ref):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*not writable")
                    flat = torch.from_numpy(octets)
                yield name, flat.view(dtype).view(shape)


def _octets(x: Tensor) -> Any:
    return x.view(-1).view(torch.uint8).numpy()


def stage_weights(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> WeightsCopy:
    """Put weights into the store, a bucket at a time; return views of the stored weights."""
    stored = StoredWeights.put(weights, dtype)
    staged = WeightsCopy(stored.tensors())
    staged.stored = stored
    return staged


def store_weights(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> StoredWeights:
    """Return staged weights as stored weights, or put others into the store."""
    stored: StoredWeights | None = as_copy(weights).stored
    return StoredWeights.put(weights.items(), dtype) if stored is None else stored


class RayEngine:
    """A rollout engine whose engine, of class ``kind``, runs in an actor.

    If the actor is lost, it is restarted with the same weights and samples the unfinished rows
    again, by the same version.  Weights are read from Ray's object store (``stored``: version
    0, in ``dtype``) or, with ``group``, broadcast over NCCL from GPU to GPU.  ``model`` is the
    first argument of ``kind``, shared by all engines, and ``settings`` its keyword arguments.
    """

    shares_weights: Literal[False] = False
    logprob_kind: Literal["sampled"] = "sampled"

    def __init__(
        self,
        name: str,
        kind: type[HostedEngine | HostedVLLM],
        model: SharedArgument,
        stored: StoredWeights,
        settings: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        limits: WorkerLimits,
        dtype: torch.dtype | None = None,
        template: PolicyTemplate | None = None,
        group: NcclGroup | None = None,
    ) -> None:
        self._limits, self._template, self._group = limits, template, group
        self._dtype = dtype
        self._stored = stored  # the current weights, for a restart
        self._loaded: tuple[int, Receipt, Expected | None] | None = None
        self.unfinished = 0  # responses that are being sampled
        self._in_flight: dict[int, Request] = {}  # by group
        self._new: list[Request] = []  # rows not sent yet
        self.actor = Actor(
            name,
            lambda handle: handle.build.remote(
                kind, model.reference(), self._stored, dict(settings)
            ),
            options=options,
            limits=limits,
            revive=self._revive,
        )

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed) alone."""
        sent = without_columns(prompts)
        rollout: Rollout = self.actor.call("generate", sent, sampling=sampling, seed=seed)
        version = self._loaded[0] if self._loaded is not None else 0
        if (versions := rollout.policy_version.unique().tolist()) != [version]:
            raise SyncError(
                f"{self.actor.name} sampled with version {min(versions)} instead of {version}"
            )
        return with_prompts(rollout, prompts)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt:
        """Load ``weights``; the receipt describes the weights in the actor."""
        expected = None if self._template is None else self._template.expected(weights)
        stored = store_weights(weights, self._dtype)
        if self._group is None:
            self._stored, self._loaded = stored, None  # a lost actor now restarts with them
            within = self._limits.start
            receipt = self.actor.call("load_stored", stored, version, expected, within=within)
        else:
            if not self._group.shared:
                self.prepare(version)
                self._group.send([self], weights)
            receipt = self._once("receive", version, expected)
            self._stored = stored
        self._loaded = version, receipt, expected
        return receipt

    def prepare(self, version: int) -> None:
        """Weights of this version will be sent over NCCL; restarts an actor that is lost."""
        self.actor.call("prepare", version)

    def transfer(self, method: str, **arguments: Any) -> None:
        """Call a method of vLLM's weight transfer."""
        self._once("transfer", method, **arguments)

    @property
    def process(self) -> ActorProcess:
        """Node and process of the actor."""
        return self.actor.process

    def _once(self, method: str, *args: Any, **named: Any) -> Any:
        try:
            return self.actor.once(method, *args, within=self._limits.start, **named)
        except LostActorError as error:
            raise RolloutError(
                f"{error} while weights were sent to it over NCCL, which cannot be interrupted;"
                " resume the run from its latest checkpoint"
            ) from error

    @cached_property
    def info(self) -> EngineInfo:
        """What the engine in the actor can do, with weights in the object store."""
        slots, updates_in_flight = self.actor.call("abilities")
        return EngineInfo(
            slots=slots,
            updates_in_flight=updates_in_flight,
            sync_dtype=self._dtype,
            stage_weights=partial(stage_weights, dtype=self._dtype),
        )

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        """Add rows, which are sent with the next ``advance``."""
        self._new.append((prompts, sampling, seed))
        self.unfinished += len(prompts)

    def advance(self) -> Rollout | None:
        """Sample for a short time; returns complete groups.

        Nothing is sampled in a call that restarts a lost actor, which may need newer weights then.
        """
        new, self._new = self._new, []
        for prompts, sampling, seed in new:
            for number, rows in zip(*group_rows(prompts), strict=True):
                self._in_flight[number] = prompts.rows(rows), sampling, seed
        sent = [(without_columns(prompts), sampling, seed) for prompts, sampling, seed in new]
        try:
            groups, rollout, self.unfinished = self.actor.once("serve", sent)
        except LostActorError:
            self.unfinished = self.actor.call("__getattribute__", "unfinished")  # restarts it
            return None
        if rollout is None:
            return None
        return with_prompts(rollout, PromptBatch.cat([self._in_flight.pop(n)[0] for n in groups]))

    def cancel(self) -> None:
        """Drop all requests."""
        self._in_flight.clear()
        self._new.clear()
        self.unfinished = 0
        self.actor.call("cancel")

    def close(self) -> None:
        """Kill the actor."""
        self.actor.close()

    def _revive(self, actor: Actor) -> None:
        if self._loaded is not None:
            version, before, expected = self._loaded
            receipt = actor.once("load_stored", self._stored, version, expected)
            if receipt != before:
                raise SyncError(
                    f"{actor.name} was restarted with version {version} and reports {receipt}"
                    f" instead of {before}"
                )
        for prompts, sampling, seed in self._in_flight.values():
            actor.once("submit", without_columns(prompts), sampling=sampling, seed=seed)


class Hosted:
    """What `RayEngine` calls of the engine in its actor."""

    def serve(self: Any, new: Sequence[Request]) -> tuple[list[int], Rollout | None, int]:
        """Add rows and sample for a short time; returns complete groups, and ``unfinished``."""
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
        return rollout.prompts.group.unique_consecutive().tolist(), rollout, self.unfinished

    def abilities(self: Any) -> tuple[int, bool]:
        """``slots`` and ``updates_in_flight`` of its info."""
        return self.info.slots, self.info.updates_in_flight


class HostedEngine(Hosted, EmbeddedEngine):
    """The embedded engine in the actor, on the GPU that Ray assigned to this process, if any."""

    def __init__(
        self, meta_model: nn.Module, stored: StoredWeights, settings: Mapping[str, Any]
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _allocate(meta_model)
        super().__init__(meta_model, shares_weights=False, device=device, **settings)
        self.load_stored(stored, 0, None)

    def load_stored(self, stored: StoredWeights, version: int, expected: None) -> Receipt:
        """Load weights from the object store; they are then compared bit by bit."""
        return self.load_weights(dict(stored.tensors()), version)


class HostedVLLM(Hosted, VLLMEngine):
    """VLLM in the actor; ``settings`` are those of ``VLLMEngine``, and ``service`` builds it."""

    def __init__(
        self, template: PolicyTemplate, stored: StoredWeights, settings: Mapping[str, Any]
    ) -> None:
        named = dict(settings)
        service = named.pop("service")(template, dict(stored.tensors()))
        super().__init__(service, template, **named)

    def load_stored(self, stored: StoredWeights, version: int, expected: Expected) -> Receipt:
        """Load weights from the object store."""
        payload = self.spec.payload(dict(stored.tensors()))
        return self.load(partial(self.service.load, payload, version), version, expected)

    def prepare(self, version: int) -> None:
        """Wait for weights of this version; sampling stops until they are verified."""
        self._wake("weights")
        self._incomplete = version

    def transfer(self, method: str, **arguments: Any) -> None:
        """Call a method of vLLM's weight transfer."""
        cast(InProcess, self.service).transfer(method, **arguments)

    def receive(self, version: int, expected: Expected) -> Receipt:
        """Verify the weights of this version, which have all been sent."""
        service = cast(InProcess, self.service)
        return self.load(partial(service.finish_load, version), version, expected)


def _allocate(model: nn.Module) -> None:
    """Replace weights on the meta device by empty ones on the CPU; tied ones stay tied."""
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if p.is_meta:
                empty = nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=False)
                setattr(module, name, allocated.setdefault(id(p), empty))


def build_embedded(inputs: EngineInputs, args: OnPolicyConfig) -> RolloutEngine:
    """Embedded engines in actors that share the rows of each batch."""
    settings = {
        "pad_id": inputs.pad_id,
        "extra_column": inputs.extra_column,
        "tokenizer": inputs.tokenizer,
        "chunk_rows": inputs.chunk_rows,
        "autocast": inputs.dtype,
    }
    return _start(
        inputs,
        args,
        reserve("engine", args),
        kind=HostedEngine,
        make_model=partial(on_cpu, meta_model(inputs.policy)),
        dtype=None,
        settings=settings,
    )


def build_vllm(inputs: EngineInputs, args: OnPolicyConfig) -> RolloutEngine:
    """VLLM engines in actors that share the rows of each batch."""
    template, arguments = build_template(inputs, args)
    each = int(arguments.get("tensor_parallel_size", 1))
    resources = reserve("engine", args, gpus_per_engine=each)
    weights = policy_weights(inputs.policy)
    gpus = min(slot.gpus for slot in resources.slots)
    groups: list[NcclGroup | None] = [None] * len(resources.slots)
    adapter = template.adapter is not None
    if use_nccl(weights, gpus=gpus, adapter=adapter, transfer=args.vllm_transfer):
        arguments |= {"weight_transfer_config": NCCL}
        shared = args.rollout_schedule == "in_order"
        new = partial(
            NcclGroup,
            template.payload,
            gpus=int(gpus),
            address=ActorProcess.current().address,
            limit=args.worker_start_timeout,
            device=next(iter(weights.values())).device,
            shared=shared,
        )
        groups = [new()] * len(groups) if shared else [new() for _ in groups]
    settings = {
        "service": partial(InProcess, engine_args=arguments, shares_gpu=gpus < 1),
        "pad_id": inputs.pad_id,
        "tolerance": args.vllm_tolerance,
        "extra_column": inputs.extra_column,
        "sleeps": args.vllm_sleep,
    }
    return _start(
        inputs,
        args,
        resources,
        kind=HostedVLLM,
        make_model=template.on_cpu,
        dtype=template.dtype if template.adapter is None else None,
        settings=settings,
        template=template,
        groups=groups,
    )


def _start(
    inputs: EngineInputs,
    args: OnPolicyConfig,
    resources: ActorResources,
    *,
    make_model: Callable[[], Any],
    dtype: torch.dtype | None,
    template: PolicyTemplate | None = None,
    groups: Sequence[NcclGroup | None] | None = None,
    **named: Any,
) -> ShardedEngine:
    """Start engines in actors; for the other arguments see ``RayEngine``."""
    slots = resources.slots
    groups = groups or [None] * len(slots)
    model = SharedArgument(make_model, len(slots))
    stored = StoredWeights.put(policy_weights(inputs.policy).items(), dtype)
    makers = [
        partial(
            RayEngine,
            f"engine {slot.index}",
            model=model,
            stored=stored,
            options=resources.placement.options(slot),
            limits=WorkerLimits.of(args),
            dtype=dtype,
            template=template,
            group=group,
            **named,
        )
        for slot, group in zip(slots, groups, strict=True)
    ]
    return ShardedEngine(
        start_all(makers, undo=resources.release),
        pad_id=inputs.pad_id,
        check=partial(check_prompts, config=inputs.policy.config),
        on_close=resources.release,
        send=groups[0].send if groups[0] is not None and groups[0].shared else None,
    )
