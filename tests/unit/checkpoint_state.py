"""A state to save, equality to the bit, and the steps of a folder's checkpoints."""

import math
import struct
from pathlib import Path

import torch

from kedge.checkpoint import checkpoint


def state(step: int = 0) -> dict:
    g = torch.Generator().manual_seed(step)
    weight = torch.randn(5, 3, generator=g)
    return {
        "learner": {
            "model": {"w": weight, "tied": weight, "half": weight.bfloat16(), "empty": {}},
            "optimizer": {
                "state": {0: {"exp_avg": torch.randn(5, generator=g), "step": torch.tensor(3.0)}},
                "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.999), "params": [0]}],
            },
        },
        "kl": {"value": 0.1 + 0.2, "history": [], "big": 2**80, "nan": math.nan, "inf": -math.inf},
        "flags": [True, None, "text \u2603", {1: "int", "1": "str", (None): 2, 2.5: False}],
        "rng": torch.arange(8, dtype=torch.uint8),
        "ids": torch.tensor([[2**62, -1]]),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0, 4),
    }


def same(a: object, b: object) -> bool:
    """Equal in value, type, key types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    if isinstance(a, dict):
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


def steps(root: Path) -> list[int]:
    return [checkpoint.parse_step(p) for p in checkpoint.checkpoints(root)]
