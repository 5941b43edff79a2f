"""What is checked: one family per formula; its inputs, outputs and source are in families.json.

B rows, T tokens, V words.  A mask is True on the tokens that the policy produced; False are padding
and tokens of an environment (tool output), which may lie between them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Family:
    """One formula.

    Args:
        name: name of the function that an adapter offers.
        title: for tables.
        inputs: name of each argument, with its shape and meaning.
        outputs: name of each output, and the input that says where it is compared; None: all.
        formula: in plain text.
        source: paper and equation.
        conventions: other answers that are right, by name; keywords of the references.
        rtol: relative to the expected number; ``atol`` absolute.  Adapters compute in float32.
        atol: absolute tolerance.
        optional: inputs that only a function with a parameter of that name gets.
    """

    name: str
    title: str
    inputs: dict[str, str]
    outputs: dict[str, str | None]
    formula: str
    source: str
    conventions: dict[str, dict[str, Any]] = field(default_factory=dict)
    rtol: float = 3e-5
    atol: float = 3e-6
    optional: dict[str, str] = field(default_factory=dict)

    @property
    def signature(self) -> str:
        """The function that an adapter offers."""
        return f"{self.name}({', '.join(self.inputs)})"


def _read() -> dict[str, Family]:
    text = resources.files("ppo_conformance").joinpath("families.json").read_text("utf-8")
    return {name: Family(name=name, **entry) for name, entry in json.loads(text).items()}


FAMILIES = _read()
