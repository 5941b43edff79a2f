"""Cases: inputs and float64 answers, one JSON file per family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ppo_conformance.families import FAMILIES, Family

FOLDER = Path(__file__).parent / "cases"


@dataclass
class Case:
    """One input with its answer.

    Args:
        family: what is computed.
        name: ``family/name``.
        about: what is special about it.
        inputs: arguments of the adapter's function: arrays, numbers, words.
        expected: outputs in float64.
        conventions: other answers that are right, by the name of their convention.
        tells_apart: known errors whose answer differs from ``expected``.
        tolerance: ``rtol``, ``atol`` of this case.
    """

    family: Family
    name: str
    about: str
    inputs: dict[str, Any]
    expected: dict[str, Any] = field(default_factory=dict)
    conventions: dict[str, dict[str, Any]] = field(default_factory=dict)
    tells_apart: list[str] = field(default_factory=list)
    tolerance: dict[str, float] = field(default_factory=dict)

    @property
    def rtol(self) -> float:
        """Relative tolerance."""
        return self.tolerance.get("rtol", self.family.rtol)

    @property
    def atol(self) -> float:
        """Absolute tolerance."""
        return self.tolerance.get("atol", self.family.atol)

    def as_json(self) -> dict[str, Any]:
        """As it stands in a file."""
        out: dict[str, Any] = {"name": self.name}
        for key in ("about", "inputs", "expected", "conventions", "tells_apart", "tolerance"):
            if value := getattr(self, key):
                out[key] = _encode(value, digits=17 if key == "inputs" else 13)
        return out

    @classmethod
    def from_json(cls, family: Family, data: dict[str, Any]) -> Case:
        """Read one."""
        about = data.get("about", "")
        rest = {k: _decode(v) for k, v in data.items() if k not in {"name", "about", "tells_apart"}}
        return cls(family, data["name"], about, tells_apart=data.get("tells_apart", []), **rest)


def _encode(x: Any, digits: int) -> Any:
    if isinstance(x, dict):
        return {k: _encode(v, digits) for k, v in x.items()}
    if isinstance(x, np.ndarray) and x.dtype == bool:
        rows = ["".join(str(int(y)) for y in row) for row in np.atleast_2d(x)]
        return {"bool": rows if x.ndim == 2 else rows[0]}
    if isinstance(x, np.ndarray):
        return _encode(x.tolist(), digits)
    if isinstance(x, list):
        return [_encode(y, digits) for y in x]
    if isinstance(x, float | np.floating):
        return float(f"{x:.{digits}g}")
    return x


def _decode(x: Any) -> Any:
    if isinstance(x, dict) and set(x) == {"bool"}:
        rows = x["bool"]
        table = [[c == "1" for c in row] for row in ([rows] if isinstance(rows, str) else rows)]
        return np.array(table[0] if isinstance(rows, str) else table, bool)
    if isinstance(x, dict):
        return {k: _decode(v) for k, v in x.items()}
    return np.array(x) if isinstance(x, list) else x


def load(pattern: str = "") -> Iterator[Case]:
    """All cases whose name contains ``pattern``, family by family."""
    for family in FAMILIES.values():
        data = json.loads((FOLDER / f"{family.name}.json").read_text("utf-8"))
        for entry in data["cases"]:
            if pattern in entry["name"]:
                yield Case.from_json(family, entry)
