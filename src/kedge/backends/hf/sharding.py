"""Weights, gradients and optimizer state cut over ranks (FSDP2, torch.distributed.fsdp).

Zhao et al. 2023 (arXiv:2304.11277); Rajbhandari et al. 2020 (ZeRO stage 3, arXiv:1910.02054).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.backends.hf.distributed import total
from kedge.backends.hf.fingerprint import full
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine
from kedge.types import PromptBatch, Receipt, Rollout, Sampling

T = TypeVar("T")
_INSIDE = "run_inside"
_AGAIN = "cut_again_after_forward"


def shards_asked(accelerator: Accelerator) -> Literal["none", "gradients", "weights"]:
    """What the launch configuration wants cut over ranks.

    "weights" is FSDP or ZeRO stage 3.  "gradients" is ZeRO stage 1 or 2: weights stay whole between
    forward and backward.  FSDP2 runs them all, configurations of DeepSpeed and of FSDP version 1
    too; the numbers are the same.

    Raises:
        ConfigError: offloading to the CPU or to disk.
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
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not asked and accelerator.distributed_type is not DistributedType.FSDP:
        return "none"
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise ConfigError("fsdp_offload_params: true is not supported; set it to false")
    again = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").upper()
    strategy = os.environ.get("FSDP_SHARDING_STRATEGY", again).upper()
    return "gradients" if strategy in {"FALSE", "SHARD_GRAD_OP", "2"} else "weights"


def shard(model: nn.Module, device: torch.device, ranks: int, *, again: bool) -> None:
    """Cut a model over ranks in place: each layer is a unit, what is left is another.

    Args:
        model: whole on every rank, with equal weights.
        device: where it is.
        ranks: number of processes.
        again: layers are cut again after each forward pass, and gathered again for the backward.
    """
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer, mesh=mesh, reshard_after_forward=again)
    # Embedding and head stay whole from the forward to the backward: the head is read directly.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for unit in _units([model]):
        setattr(unit, _AGAIN, again)
    setattr(model, _INSIDE, MethodType(_run, model))
    register_fsdp_forward_method(model, _INSIDE)


def _run(_: nn.Module, f: Callable[[], T]) -> T:
    return f()


def inside(model: nn.Module, f: Callable[[], T]) -> T:
    """``f()``, with the model's weights whole where ``f`` uses them."""
    run = getattr(model, _INSIDE, None)
    return f() if run is None else run(f)


def _units(models: Iterable[nn.Module]) -> list[Any]:
    return [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]


def reshard(models: Iterable[nn.Module]) -> None:
    """Drop whole weights that are left from a forward pass without backward."""
    for unit in _units(models):
        unit.reshard()


@contextmanager
def whole(models: Iterable[nn.Module]) -> Iterator[None]:
    """Every weight whole on every rank for the length of the block.

    In it ranks may run different numbers of forward passes: none of them communicates.
    """
    models = list(models)
    units = _units(models)
    for model in models:
        inside(model, lambda: None)  # the outermost unit must be the first that runs
    roots = {id(model) for model in models}
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            again = id(unit) not in roots and getattr(unit, _AGAIN, True)
            unit.set_reshard_after_forward(again, recurse=False)
            unit.reshard()


def full_tree(tree: T) -> T:
    """Nested dicts and lists with every tensor whole; cut ones come back on the CPU."""
    if isinstance(tree, DTensor):
        return full(tree).cpu()  # type: ignore[return-value]
    if isinstance(tree, dict):
        return {k: full_tree(v) for k, v in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, list):
        return [full_tree(v) for v in tree]  # type: ignore[return-value]
    return tree


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict with whole tensors; tied weights stay one.  Every rank calls it."""
    seen: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for x in state.values():
        if id(x) not in seen:
            seen[id(x)] = full_tree(x.detach())
    return {name: seen[id(x)] for name, x in state.items()}


def cut_like(x: Tensor, like: Tensor) -> Tensor:
    """``x`` cut over ranks as ``like`` is."""
    if not isinstance(like, DTensor):
        return x
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)


def cut_state(optimizer: Optimizer) -> None:
    """Cut an optimizer's whole state tensors as their weights are, in place."""
    for p, state in optimizer.state.items():
        for name, x in state.items():
            if isinstance(p, DTensor) and isinstance(x, Tensor) and x.shape == p.shape:
                state[name] = cut_like(x, p)


class GatheredEngine:
    """A rollout engine that samples from a sharded policy, whole for that long.

    Args:
        engine: samples from the policy itself.
        policy: the sharded policy.
    """

    def __init__(self, engine: RolloutEngine, policy: nn.Module) -> None:
        self.engine, self.policy = engine, policy

    @property
    def shares_weights(self) -> bool:
        """True: it samples from the learner's own modules."""
        return self.engine.shares_weights

    @property
    def logprobs(self) -> Literal["sampled", "raw", "none"]:
        """What the engine's log-probabilities are of."""
        return self.engine.logprobs

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row.  Every rank calls it, or rests."""
        self._any_asks(True)
        with whole([self.policy]):
            return self.engine.generate(prompts, sampling=sampling, seed=seed)

    def rest(self) -> None:
        """Help the other ranks to gather weights until none of them samples any more."""
        while self._any_asks(False):
            with whole([self.policy]):
                pass

    def _any_asks(self, mine: bool) -> bool:
        device = next(self.policy.parameters()).device
        return bool(total(torch.tensor(int(mine), device=device), device))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Tell the engine the version."""
        return self.engine.load_weights(weights, version)
