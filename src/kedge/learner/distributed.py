"""Collectives between ranks, and the accelerator."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from kedge.errors import KedgeError, SyncError
from kedge.records import widen_field
from kedge.types import Experience

_SENT_AS = {torch.bool: torch.uint8, torch.int64: torch.int32}  # the integers are token ids


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
    """Raise if a rank has an error; every rank gets the same message.  Collective.

    Raises:
        SyncError: this rank's error, or the message of the first rank with one.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        texts: list[str | None] = [None] * dist.get_world_size()
        text = str(error) if isinstance(error, KedgeError) else f"{type(error).__name__}: {error}"
        dist.all_gather_object(texts, None if error is None else text)
        if first := next(filter(None, texts), None):
            raise SyncError(first) from error
    elif error is not None:
        raise error


def all_gather_rows(local: Experience, device: torch.device, ranks: int) -> Experience:
    """Gather the rows of all ranks in rank order, padded to the widest; equally many per rank."""
    if ranks == 1:
        return local
    pooled = {}
    for f in fields(local):
        x = getattr(local, f.name)
        if x is None:
            continue
        sizes = torch.tensor(x.shape[1:], device=device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        padded = widen_field(f, x.to(_SENT_AS.get(x.dtype, x.dtype)), sizes.tolist())
        padded = padded.to(device).contiguous()
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded)
        pooled[f.name] = torch.cat(parts).to(device=x.device, dtype=x.dtype)
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
