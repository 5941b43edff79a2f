"""Optimiser, schedule and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from kedge.errors import ConfigError

_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def parameter_groups(
    models: Mapping[str, tuple[nn.Module, float]], weight_decay: float
) -> list[dict[str, Any]]:
    """Weights that train, with decay (matrices) and without (biases, norms), per model.

    Args:
        models: name -> (model, learning rate).
        weight_decay: of the matrices.
    """
    groups = []
    seen: set[int] = set()
    for name, (model, rate) in models.items():
        decays = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        for decay in (True, False):
            params = [p for n, p in named if (n in decays) == decay and id(p) not in seen]
            seen.update(map(id, params))
            if params:
                amount = weight_decay if decay else 0.0
                groups.append({"params": params, "lr": rate, "weight_decay": amount, "name": name})
    return groups


def build_optimizer(args: TrainingArguments, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimiser that ``args.optim`` names, over these groups.

    Raises:
        ConfigError: nothing trains, or an optimiser that wants the whole model.
    """
    if not groups:
        raise ConfigError("no weight has requires_grad=True: there is nothing to train")
    made, options = Trainer.get_optimizer_cls_and_kwargs(args)
    if not isinstance(made, type) or not issubclass(made, Optimizer) or "params" in options:
        raise ConfigError(
            f"optim={str(args.optim)!r} needs more than parameter groups and is not supported; "
            "pass optimizers=(optimizer, scheduler)"
        )
    return made(groups, **options)


def build_schedule(args: TrainingArguments, optimizer: Optimizer, updates: int) -> LRScheduler:
    """The learning-rate schedule that ``args`` names, over ``updates`` training steps."""
    options = args.lr_scheduler_kwargs
    return get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(updates),
        num_training_steps=updates,
        scheduler_specific_kwargs=dict(options) if options else None,  # type: ignore[arg-type]
    )


def norms(grads: Mapping[str, Iterable[Tensor]]) -> dict[str, Tensor]:
    """The L2 norm of each named set of gradients, and of all of them under ``""``."""
    found = {
        name: torch.nn.utils.get_total_norm(list(tensors)).float()
        for name, tensors in grads.items()
    }
    total = torch.stack(list(found.values())).square().sum().sqrt()
    return {"": total, **found}


def scale_(grads: Iterable[Tensor], norm: float, largest: float) -> None:
    """Shrink gradients of this norm to ``largest``, in place; shorter ones are left as they are."""
    if norm > largest:
        torch._foreach_mul_(list(grads), largest / norm)
