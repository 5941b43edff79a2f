"""Checks that a saved optimizer state fits an optimizer before it is loaded.

Fused kernels trust the shapes in the state: a wrong one writes past the end of a weight.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kedge.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)

_SIZES = (2, 3, 5, 7, 11, 13)  # of the dimensions of a sample weight
_PLAIN = {"fused": False, "foreach": False, "capturable": False}

Layout = Mapping[str, Tensor | None]  # None: not a tensor


def check_state(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Compare the tensors of a state with those that the optimizer makes for a small weight.

    Args:
        optimizer: optimizer that will load the state.
        state: as from its ``state_dict``.
        names: weight names by id, for errors.

    Raises:
        CheckpointError: the state is of an optimizer with different weights.
        DamagedCheckpointError: naming a tensor that is missing or has a wrong shape or dtype.
    """
    groups, saved = optimizer.param_groups, state["param_groups"]
    sizes, sizes_saved = ([len(g["params"]) for g in each] for each in (groups, saved))
    if sizes != sizes_saved:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {sizes_saved} weights, this run's"
            f" {type(optimizer).__name__} of {sizes}; train the same weights as in that run"
        )
    layouts: dict[tuple[int, int, torch.dtype], Layout | None] = {}
    for i, (group, of_group) in enumerate(zip(groups, saved, strict=True)):
        for weight, index in zip(group["params"], of_group["params"], strict=True):
            saved_state = state["state"].get(index)
            if not saved_state:  # no gradient so far
                continue
            key = (i, weight.dim(), weight.dtype)
            if key not in layouts:
                layouts[key] = _layout(optimizer, group, *key[1:])
            problem = _problem(saved_state, layouts[key], weight)
            if problem:
                name = names.get(id(weight), f"number {index}")
                raise DamagedCheckpointError(
                    f"the optimizer's tensor optimizer/state/{index}/{problem} (of the weight"
                    f" {name})"
                )


def _problem(saved_state: Mapping[str, Any], layout: Layout | None, weight: Tensor) -> str | None:
    for name, sample in (layout or {}).items():
        if name not in saved_state:
            return f"{name} is missing"
        if sample is None:
            continue
        x = saved_state[name]
        if not isinstance(x, Tensor):
            return f"{name} is {x!r}, not a tensor"
        shape = _shape(sample, weight)
        if shape is not None and tuple(x.shape) != shape:
            return f"{name} has the shape {tuple(x.shape)}, it must be {shape}"
        if x.dtype != sample.dtype:
            return f"{name} is {x.dtype}, it must be {sample.dtype}"
    return None


def _shape(sample: Tensor, weight: Tensor) -> tuple[int, ...] | None:
    """The shape of a state tensor; None if it does not follow from the weight's shape."""
    sizes = dict(zip(_SIZES, weight.shape, strict=False))  # sizes of the sample are all different
    sizes[1] = 1
    if any(size not in sizes for size in sample.shape):
        return None
    return tuple(sizes[size] for size in sample.shape)


def _layout(
    optimizer: Optimizer, group: Mapping[str, Any], dims: int, dtype: torch.dtype
) -> Layout | None:
    """State tensors that the optimizer keeps, tried on a sample weight; None if that fails."""
    if dims > len(_SIZES):
        return None
    sample = torch.nn.Parameter(torch.zeros(_SIZES[:dims], dtype=dtype))
    sample.grad = torch.zeros_like(sample)
    options = {k: _PLAIN.get(k, v) for k, v in group.items() if k != "params"}
    try:
        trial = type(optimizer)([{**options, "params": [sample]}])  # type: ignore[call-arg]
        trial.step()
    except Exception as error:  # a custom optimizer, or a GPU-only one
        logger.debug(
            "the state of %s is loaded without checks: %s", type(optimizer).__name__, error
        )
        return None
    kept = trial.state[sample]
    return {name: x if isinstance(x, Tensor) else None for name, x in kept.items()}
