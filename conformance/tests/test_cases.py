"""The cases: two computations that agree, and what each case tells apart."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ppo_conformance import build, cases, compare, mutants, runner
from ppo_conformance.families import FAMILIES
from ppo_conformance.references import first, second

CASES = list(cases.load())


def by_name(case):
    return case.name


def close(case, got, want, rtol):
    for name, value in want.items():
        where, expected = case.family.outputs[name], np.asarray(value, float)
        inside = np.ones(expected.shape, bool) if where is None else case.inputs[where]
        found = np.asarray(got[name], float)
        assert found.shape == expected.shape
        bad = np.abs(found - expected) > rtol * (1 + np.abs(expected))
        assert not (bad & inside).any(), f"{name}: {found} {expected}"


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_two_computations_that_share_nothing_agree(case):
    function, other = getattr(first, case.family.name), getattr(second, case.family.name)
    rtol = 1e-7 if "gradient" in case.family.outputs else 1e-10  # finite differences
    close(case, function(**case.inputs), case.expected, 1e-11)
    close(case, other(**case.inputs), case.expected, rtol)
    for convention, expected in case.conventions.items():
        keywords = case.family.conventions[convention]
        close(case, other(**case.inputs, **keywords), expected, rtol)


def test_the_second_computation_shares_no_code_with_the_first():
    names = vars(second)
    assert not {"np", "numpy", "first"} & set(names)
    assert not any(getattr(x, "__module__", "") == first.__name__ for x in names.values())


def test_there_are_enough_cases_in_every_family():
    assert len(CASES) >= 150
    assert len({case.name for case in CASES}) == len(CASES)
    counts = {name: sum(c.family.name == name for c in CASES) for name in FAMILIES}
    assert min(counts.values()) >= 4, counts


def test_files_are_what_build_writes():
    for family in FAMILIES:
        written = json.loads((cases.FOLDER / f"{family}.json").read_text("utf-8"))["cases"]
        built = json.loads(build.text(family))["cases"]
        for a, b in zip(built, written, strict=True):
            assert (a["name"], a["inputs"]) == (b["name"], b["inputs"])
            assert a.get("tells_apart") == b.get("tells_apart"), a["name"]


def test_inputs_are_the_same_numbers_in_float32():
    for case in CASES:
        for name, value in case.inputs.items():
            floats = isinstance(value, np.ndarray) and value.dtype.kind == "f"
            if floats and np.abs(value).max() < 1e8:  # a forbidden word is -1e9
                assert (value.astype("float32") == value).all(), (case.name, name)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: f"{m.family}: {m.name}")
def test_every_known_error_is_caught_and_named(mutant):
    adapter = runner.Adapter("mutant", "", {mutant.family: mutant})
    found = [runner.check(adapter, case) for case in CASES if case.family.name == mutant.family]
    wrong = [v for v in found if v.status in {"differs", "fails"}]
    assert wrong
    assert any(mutant.label in v.looks_like for v in wrong), [v.message for v in wrong]


def test_the_references_agree_with_every_case_in_single_precision():
    def reference(family):
        def function(**inputs):
            return getattr(first, family)(**inputs)

        return function

    adapter = runner.Adapter("reference", "", {name: reference(name) for name in FAMILIES})
    for case in CASES:
        assert runner.check(adapter, case).status == "agrees", case.name


def test_what_a_case_tells_apart_is_true():
    known = {(m.family, m.name): m for m in mutants.MUTANTS}
    assert len(known) == len(mutants.MUTANTS) >= 30
    for case in CASES:
        for name in case.tells_apart:
            answer = known[case.family.name, name](**case.inputs)
            assert compare.verdict(case, answer).differs, (case.name, name)
