"""A state to save, equality to the bit, and the steps of a folder's checkpoints."""

import math
import struct
from dataclasses import fields, is_dataclass
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
        "keys": {1: torch.zeros(1), "1": torch.ones(1), "a/b": torch.ones(2)},
        "types": [torch.tensor([0.0, -1.5, 3.0]).to(dtype) for dtype in DTYPES],
        "signed": torch.tensor([-0.0, math.nan, math.inf]),
        "negative zero": -0.0,
        "nothing": torch.empty(0, 4),
    }


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]


def same(a: object, b: object) -> bool:
    """Equal in value, type, key types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = a.dtype == b.dtype and a.shape == b.shape
        return bits and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


def steps(root: Path) -> list[int]:
    return [checkpoint.parse_step(p) for p in checkpoint.checkpoints(root)]
