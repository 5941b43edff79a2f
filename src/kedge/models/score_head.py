"""Heads that give a number per state, in float32, and the constant that a model adds to scores."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

SHIFT = "kedge_score_shift"  # key of a model's config; added to every score
SHIFT_FILE = f"{SHIFT}.json"  # in an adapter's folder, which has no model configuration


def save_adapter_shift(folder: str | Path, shift: float) -> None:
    """Write the shift of scores next to an adapter, for ``adapter_shift``; 0 writes nothing."""
    file = Path(folder) / SHIFT_FILE
    if shift:
        file.write_text(json.dumps({SHIFT: shift}) + "\n")
    else:
        file.unlink(missing_ok=True)


def adapter_shift(source: str) -> float:
    """The shift of the scores of an adapter in a folder or on the hub, 0 if it has none."""
    from transformers.utils.hub import cached_file

    file = cached_file(source, SHIFT_FILE, _raise_exceptions_for_missing_entries=False)
    return 0.0 if file is None else float(json.loads(Path(file).read_text())[SHIFT])


def float32_head(head: nn.Module, hidden: Tensor) -> Tensor:
    """Apply a head to hidden states in float32, regardless of autocast.

    In bfloat16, values between 8 and 16 are 1/16 apart: differences between neighboring states
    and between responses would be lost.
    """
    dtype = next((p.dtype for p in head.parameters()), hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        if type(head) is nn.Linear and dtype in (torch.bfloat16, torch.float16):
            bias = None if head.bias is None else head.bias.float()
            return nn.functional.linear(hidden.float(), head.weight.float(), bias)
        output: Tensor = head(hidden.to(dtype))
    return output
