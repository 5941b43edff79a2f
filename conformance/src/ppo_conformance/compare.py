"""Is an answer right; by which convention; and which known error does it look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ppo_conformance import mutants
from ppo_conformance.cases import Case


@dataclass
class Verdict:
    """Outcome of one case."""

    status: str  # "agrees", "differs", "not offered", "fails"
    message: str = ""
    convention: str = ""
    looks_like: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the answer is another one."""
        return self.status == "differs"


def as_outputs(case: Case, answer: Any) -> dict[str, np.ndarray]:
    """An adapter's answer by name: a dict, a tuple in the order of the outputs, or one array."""
    names = list(case.family.outputs)
    if not isinstance(answer, dict):
        values = answer if isinstance(answer, tuple) else (answer,)
        if len(values) > len(names):
            raise ValueError(f"{case.family.name} has the outputs {names}, got {len(values)}")
        answer = dict(zip(names, values, strict=False))
    unknown = set(answer) - set(names)
    if unknown or not answer:
        raise ValueError(f"{case.family.name} has the outputs {names}, got {sorted(answer)}")
    return {name: _array(value) for name, value in answer.items()}


def _array(x: Any) -> np.ndarray:
    if hasattr(x, "detach"):  # a tensor, perhaps in bfloat16
        x = x.detach().cpu().double().numpy()
    return np.asarray(x, float)


def differences(case: Case, answer: dict[str, Any], expected: dict | None = None) -> list[str]:
    """Sentences about the outputs that are not within the tolerance of ``expected``."""
    out = []
    for name, value in answer.items():
        want, got = np.asarray((expected or case.expected)[name], float), np.asarray(value, float)
        if got.shape != want.shape:
            out.append(f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
            continue
        where = case.family.outputs[name]
        inside = np.ones(want.shape, bool) if where is None else case.inputs[where]
        bad = inside & ~(np.abs(got - want) <= case.atol + case.rtol * np.abs(want))
        if bad.any():
            out.append(_sentence(name, got, want, bad))
    return out


def _sentence(name: str, got: np.ndarray, want: np.ndarray, bad: np.ndarray) -> str:
    gap = np.where(bad, np.nan_to_num(np.abs(got - want), nan=np.inf), -1)
    place = np.unravel_index(gap.argmax(), gap.shape)
    where = f" at {[int(i) for i in place]}" if place else ""
    count = f", {int(bad.sum())} of {bad.size} numbers" if bad.size > 1 else ""
    return f"{name}{where}: expected {want[place]:.6g}, got {got[place]:.6g}{count}"


def verdict(case: Case, answer: Any) -> Verdict:
    """Compare an answer with the expected one, and with those of other conventions."""
    got = as_outputs(case, answer)
    wrong = differences(case, got)
    if not wrong:
        return Verdict("agrees")
    for name, expected in case.conventions.items():
        if not differences(case, got, expected):
            return Verdict("agrees", convention=name)
    return Verdict("differs", "; ".join(wrong))


def looks_like(case: Case, answer: Any) -> tuple[str, ...]:
    """Known errors that give the same answer."""
    got, out = as_outputs(case, answer), []
    for mutant in mutants.of(case.family.name):
        if mutant.name in case.tells_apart:
            wrong = mutant(**case.inputs)
            if not differences(case, got, {k: np.asarray(v, float) for k, v in wrong.items()}):
                out.append(mutant.label)
    return tuple(out)
