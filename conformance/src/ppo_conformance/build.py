"""Compute the answers of the cases from their inputs, and write ``cases/*.json`` again.

    python -m ppo_conformance.build

A new case is a line in its family's file with a name, inputs and what is special about it; this
adds the rest.  Inputs are multiples of 1/64 where possible, so that they are the same in float32.
"""

from __future__ import annotations

import json
from typing import Any

from ppo_conformance import cases, compare, mutants
from ppo_conformance.cases import Case
from ppo_conformance.families import FAMILIES
from ppo_conformance.references import first


def build(family: str) -> list[Case]:
    """The cases of a family, with expected outputs and the errors that each one tells apart."""
    function, built = getattr(first, family), []
    for given in (c for c in cases.load(f"{family}/") if c.family.name == family):
        inputs, about = given.inputs, given.about
        case = Case(given.family, given.name, about, inputs, function(**inputs))
        case.tolerance = given.tolerance
        for convention, keywords in case.family.conventions.items():
            other = function(**inputs, **keywords)
            if compare.differences(case, other):
                case.conventions[convention] = other
        for mutant in mutants.of(family):
            if compare.verdict(case, mutant(**inputs)).differs:
                case.tells_apart.append(mutant.name)
        built.append(case)
    return built


def text(family: str) -> str:
    """The file of a family: a case per line."""
    data: list[dict[str, Any]] = [case.as_json() for case in build(family)]
    lines = json.dumps(data).replace('{"name": ', '\n{"name": ')
    return f'{{"family": "{family}", "cases": {lines}}}\n'


if __name__ == "__main__":
    for name in FAMILIES:
        (cases.FOLDER / f"{name}.json").write_text(text(name), "utf-8")
