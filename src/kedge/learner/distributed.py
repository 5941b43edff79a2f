"""Ranks that train together: collectives, the accelerator, and sharding.

Weights, gradients and optimizer state are sharded by FSDP2 (torch.distributed.fsdp): Zhao et al.
2023 (arXiv:2304.11277); Rajbhandari et al. 2020 (ZeRO stage 3, arXiv:1910.02054).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.records.base import keep_field, widen_field
from kedge.records.errors import ConfigError, KedgeError, SyncError
from kedge.records.protocols import EngineInfo, RolloutEngine
from kedge.records.types import Experience, PromptBatch, Receipt, Rollout, Sampling

_SENT_AS = {torch.bool: torch.uint8, torch.int64: torch.int32}  # the integers are token ids
T = TypeVar("T")
_CALL = "call_within"  # registered with FSDP: unshards the root's weights
_RESHARD = "reshard_layers_after_forward"


def broadcast_parameters(models: Iterable[nn.Module]) -> None:
    """Broadcast the weights and buffers of rank 0 to all ranks, shared ones once."""
    tensors = {id(x): x for m in models for x in [*m.parameters(), *m.buffers()]}
    for tensor in tensors.values():
        dist.broadcast(tensor.detach(), src=0)


def all_reduce(x: Tensor, device: torch.device) -> Tensor:
    """Sum of ``x`` over all ranks, on the device it came from."""
    summed = x.to(device, copy=True)
    dist.all_reduce(summed)
    return summed.to(x.device)


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise if a rank has an error: SyncError with the same message on every rank.  Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        texts: list[str | None] = [None] * dist.get_world_size()
        text = str(error) if isinstance(error, KedgeError) else f"{type(error).__name__}: {error}"
        dist.all_gather_object(texts, None if error is None else text)
        if first := next(filter(None, texts), None):
            raise SyncError(first) from error
    elif error is not None:
        raise error


def all_gather_rows(local: Experience, device: torch.device, ranks: int) -> Experience:
    """Gather the rows of all ranks in rank order, padded to the widest; equally many per rank.

    Fields that only some ranks have are filled or refused as in ``Record.cat``, on all ranks alike.

    Raises:
        RolloutError: only some ranks have a field that has no default.
    """
    if ranks == 1:
        return local
    own = {f.name: getattr(local, f.name) for f in fields(local)}
    shapes: list[Any] = [None] * ranks
    dist.all_gather_object(
        shapes, {n: None if x is None else (x.dtype, x.shape[1:]) for n, x in own.items()}
    )
    pooled: dict[str, Any] = {}
    for f in fields(local):
        each = [shape[f.name] for shape in shapes]
        present = [shape for shape in each if shape is not None]
        if not present or not keep_field(f, each, [f"rank {rank}" for rank in range(ranks)]):
            pooled[f.name] = None
            continue
        dtype, widths = present[0][0], [widths for _, widths in present]
        wide = [max(sizes) for sizes in zip(*widths, strict=True)]
        if like := f.metadata.get("wide_as"):
            wide[0] = max(shape[like][1][0] for shape in shapes)
        x = own[f.name]
        if x is None:
            x = torch.full((len(local), *wide), f.metadata.get("fill", 0), dtype=dtype)
        padded = widen_field(f, x.to(_SENT_AS.get(dtype, dtype)), wide)
        padded = padded.to(device).contiguous()
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded)
        pooled[f.name] = torch.cat(parts).to(device=local.ids.device, dtype=dtype)
    return replace(local, **pooled)


def avoid_cudnn_attention() -> None:
    """Make torch prefer FlashAttention to cuDNN's attention.

    cuDNN plans every new shape for tenths of a second (seen on an H100 with torch 2.11), and the
    width of a batch of responses is new in almost every forward pass.
    """
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)


def accelerator_for(args: TrainingArguments) -> Accelerator:
    """The accelerator of a run: device, precision and the processes that ``launch`` started."""
    # Otherwise transformers loads random weights on every rank but the first.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    accelerator = Accelerator(cpu=args.use_cpu, mixed_precision=precision)
    avoid_cudnn_attention()
    unset_hf_deepspeed_config()  # otherwise transformers loads empty weights under ZeRO stage 3
    if accelerator.num_processes > 1:
        atexit.register(_destroy_process_group)
    return accelerator


def _destroy_process_group() -> None:
    """Destroy the process group before Python exits; later, gloo's threads may abort."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def sharding_strategy(accelerator: Accelerator) -> Literal["none", "gradients", "weights"]:
    """Which tensors the launch configuration shards over ranks.

    "weights" is FSDP or ZeRO stage 3.  "gradients" is ZeRO stage 1 or 2: weights stay unsharded
    between forward and backward.  FSDP2 runs all of them, including configurations of DeepSpeed and
    FSDP version 1; the numbers are the same.
    """
    if accelerator.num_processes == 1:
        return "none"
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        devices = {plugin.offload_optimizer_device, plugin.offload_param_device}
        if not devices <= {None, "none"}:
            raise ConfigError(
                f"DeepSpeed offloading to {devices - {None, 'none'}} is not supported; set "
                "offload_optimizer_device and offload_param_device to none"
            )
        return {0: "none", 1: "gradients", 2: "gradients"}.get(plugin.zero_stage, "weights")  # type: ignore[return-value]
    uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not uses_fsdp and accelerator.distributed_type is not DistributedType.FSDP:
        return "none"
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise ConfigError("fsdp_offload_params: true is not supported; set it to false")
    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")
    strategy = os.environ.get("FSDP_SHARDING_STRATEGY", reshard).upper()
    return "gradients" if strategy in {"FALSE", "SHARD_GRAD_OP", "2"} else "weights"


def shard(
    model: nn.Module,
    device: torch.device,
    ranks: int,
    *,
    reshard_after_forward: bool,
    dtype: torch.dtype | None = None,
) -> None:
    """Shard a model over ranks in place: each layer is a unit, the rest of the model another.

    Units move to the device, take the weights of rank 0 and are cut one after another, so that no
    rank has the whole model on its device; on ranks above 0 it may be on ``meta``.  Layers are
    gathered in ``dtype``, with which autocast computes: half the bytes of float32.  Gradients are
    summed over ranks in float32, and activations keep their types.
    """
    mesh = init_device_mesh(device.type, (ranks,))
    rounding = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {} if dtype is None else {"mp_policy": rounding}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            broadcast_unsharded(layer, device)
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, **options)
    broadcast_unsharded(model, device)
    # Embedding and head stay unsharded from the forward to the backward, in float32: the head is
    # read directly, and its gradients are sums over chunks of tokens.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for unit in _units([model]):
        setattr(unit, _RESHARD, reshard_after_forward)
    setattr(model, _CALL, MethodType(lambda _, f: f(), model))
    register_fsdp_forward_method(model, _CALL)


def broadcast_unsharded(unit: nn.Module, device: torch.device) -> None:
    """Move unsharded tensors to the device, with the values of rank 0; keeps ties."""
    received: dict[int, Tensor] = {}
    for module in unit.modules():
        tensors: list[tuple[dict[str, Any], str, Tensor]] = [
            (kind, name, x)
            for kind in (module._parameters, module._buffers)
            for name, x in kind.items()
            if x is not None and not isinstance(x, DTensor)
        ]
        for kind, name, x in tensors:
            if id(x) not in received:
                received[id(x)] = _receive_tensor(x, device)
            kind[name] = received[id(x)]


def _receive_tensor(x: Tensor, device: torch.device) -> Tensor:
    data = torch.empty_like(x, device=device) if x.is_meta else x.detach().to(device)
    dist.broadcast(data, src=0)
    if not isinstance(x, nn.Parameter):
        return data
    if x.is_meta:
        return nn.Parameter(data, requires_grad=x.requires_grad)
    x.data = data
    return x


def call_within(model: nn.Module, f: Callable[[], T]) -> T:
    """Call ``f()``, inside a forward pass of the model if it is sharded."""
    call = getattr(model, _CALL, None)
    return f() if call is None else call(f)


def _units(models: Iterable[nn.Module]) -> list[Any]:
    return [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]


def reshard(models: Iterable[nn.Module]) -> None:
    """Free the unsharded weights left by a forward pass without backward."""
    for unit in _units(models):
        unit.reshard()


@contextmanager
def unsharded(models: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which every rank has all weights.

    Forward passes in it do not communicate, so ranks may run different numbers of them.
    """
    models = list(models)
    units = _units(models)
    for model in models:
        call_within(model, lambda: None)  # FSDP needs the outermost unit to run first
    roots = {id(model) for model in models}
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            reshard_unit = id(unit) not in roots and getattr(unit, _RESHARD, True)
            unit.set_reshard_after_forward(reshard_unit, recurse=False)
            unit.reshard()


def shard_like(x: Tensor, like: Tensor) -> Tensor:
    """Shard ``x`` like ``like``."""
    if not isinstance(like, DTensor) or isinstance(x, DTensor):
        return x
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)


def shard_optimizer_state(optimizer: Optimizer) -> None:
    """Shard an optimizer's full state tensors like their weights, in place."""
    for p, state in optimizer.state.items():
        for name, x in state.items():
            if isinstance(p, DTensor) and isinstance(x, Tensor) and x.shape == p.shape:
                state[name] = shard_like(x, p)


class GatheredEngine:
    """A rollout engine that samples from the sharded policy itself, unsharded in the meantime."""

    def __init__(self, engine: RolloutEngine, policy: nn.Module) -> None:
        self.engine, self.policy = engine, policy
        self.shares_weights, self.logprob_kind = engine.shares_weights, engine.logprob_kind

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row.  Every rank calls this or ``wait_for_other_ranks``."""
        self._any_rank_samples(True)
        with unsharded([self.policy]):
            return self.engine.generate(prompts, sampling=sampling, seed=seed)

    @property
    def info(self) -> EngineInfo:
        """Says that the ranks sample together."""
        return EngineInfo(wait_for_other_ranks=self.wait_for_other_ranks)

    def wait_for_other_ranks(self) -> None:
        """Take part in gathering weights until no rank samples any more."""
        while self._any_rank_samples(False):
            with unsharded([self.policy]):
                pass

    def _any_rank_samples(self, local: bool) -> bool:
        device = next(self.policy.parameters()).device
        return bool(all_reduce(torch.tensor(int(local), device=device), device))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Pass the version to the engine."""
        return self.engine.load_weights(weights, version)
