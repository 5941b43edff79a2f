"""Runs a causal trunk over rows joined end to end, without padding.

All layers but attention treat tokens one by one: they run once over the tokens of all rows, however
different their lengths.  Attention runs row by row.  transformers hands the keyword ``row_lengths``
down to its attention function, also when a layer is recomputed in the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kedge.backends.hf.mask_checks import known_masks
from kedge.ops.cpu.low_precision import float32_attention

_ATTENTION = "sdpa"
_WINDOWS = ("sliding_window", "attention_chunk_size")  # need a mask of all rows by all rows
_PROBE = (5, 3, 7)  # tokens of the rows of the comparison


def join_rows(ids: Tensor, lengths: Tensor) -> Tensor:
    """The tokens int64 [1, T] of right-padded rows int64 [b, L] with lengths [b], joined."""
    return ids[torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]][None]


def run_joined(backbone: nn.Module, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Last hidden states float [1, T, H] of joined rows; ``joins_rows(backbone)`` must hold.

    Args:
        backbone: trunk of a transformers model.
        ids: int64 [1, T]; the tokens of all rows.
        lengths: tokens of each row; their sum is T.
    """
    positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths])[None]
    with known_masks():
        output = backbone(
            input_ids=ids, position_ids=positions, use_cache=False, row_lengths=list(lengths)
        )
    hidden: Tensor = output.last_hidden_state
    return hidden


@torch.no_grad()
def joins_rows(backbone: Any) -> bool:
    """Whether joined rows give the states of separate rows; tried on a few tokens.

    Always False on an accelerator, where padding is cheaper than many small attention kernels, and
    with KEDGE_CPU_KERNELS=0 in the environment.
    """
    weight = next(iter(backbone.parameters()), None)
    if weight is None or weight.device.type != "cpu" or os.environ.get("KEDGE_CPU_KERNELS") == "0":
        return False
    config = getattr(backbone, "config", None)
    if getattr(config, "_attn_implementation", None) != _ATTENTION:
        return False
    if any(getattr(config, name, None) for name in _WINDOWS):
        return False
    training = [m for m in backbone.modules() if m.training]
    backbone.eval()
    try:
        return _agrees(backbone)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        IndexError,
    ):  # it takes other arguments
        return False
    finally:
        for module in training:
            module.training = True


def _agrees(backbone: Any) -> bool:
    rows = [torch.arange(n)[None] for n in _PROBE]
    apart = torch.cat(
        [backbone(input_ids=row, use_cache=False).last_hidden_state for row in rows], dim=1
    )
    joined = run_joined(backbone, torch.cat(rows, dim=1), _PROBE)
    slack = 1e-4 if joined.dtype in (torch.float32, torch.float64) else 2e-2
    gap = (joined - apart).abs().max()
    return joined.shape == apart.shape and bool(gap <= slack * (1 + apart.abs().max()))


def _by_row(attention: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that obeys ``row_lengths``."""

    @wraps(attention)
    def by_row(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        row_lengths: list[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        if row_lengths is None:
            return attention(module, query, key, value, *args, **kwargs)
        rows = zip(*(x.split(row_lengths, dim=2) for x in (query, key, value)), strict=True)
        outputs = [attention(module, *row, *args, **kwargs)[0] for row in rows]
        return torch.cat(outputs, dim=1), None

    return by_row


ALL_ATTENTION_FUNCTIONS[_ATTENTION] = _by_row(
    float32_attention(ALL_ATTENTION_FUNCTIONS[_ATTENTION])
)
