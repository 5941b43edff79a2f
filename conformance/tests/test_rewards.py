"""Reward probes: planted holes are found, clean functions are left alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ppo_conformance.cli import main
from ppo_conformance.rewards.function import Reward, convention_of, read_rows
from ppo_conformance.rewards.probes import examine, examine_file

HERE = Path(__file__).parent / "rewards"
sys.path.insert(0, str(HERE))
from clean import __dict__ as clean
from holes import HOLES

CLEAN = ["boxed_exact", "hashes", "partial_credit", "chat", "negative", "whole_text"]
CLEAN += ["format_only", "compute_score"]


def look(function, data="math"):
    rows = read_rows(str(HERE / f"{data}.jsonl"), 8)
    return examine(Reward(function, convention_of(function), "ground_truth", limit=2.0), rows)


@pytest.mark.parametrize("name", HOLES)
def test_a_planted_hole_is_found_with_the_answer_that_shows_it(name):
    function, probes, data = HOLES[name]
    findings = look(function, data)
    hits = [f for f in findings if f.probe in probes]
    assert hits, [str(f) for f in findings]
    if hits[0].probe not in {"side effects", "determinism", "time"}:
        assert hits[0].row is not None


def test_enough_holes_are_planted():
    assert len(HOLES) >= 20
    text = (HERE.parents[1] / "README.md").read_text("utf-8")
    assert f"{len(HOLES)} of {len(HOLES)} planted" in text
    assert f"{len(CLEAN)} clean functions" in text


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_a_clean_function(name):
    assert [str(f) for f in look(clean[name])] == []


def test_the_command_prints_findings_and_returns_1(capsys):
    spec = f"{HERE / 'holes.py'}:contains"
    assert main(["test-reward", spec, str(HERE / "math.jsonl")]) == 1
    out = capsys.readouterr().out
    assert "listing many answers pays" in out
    assert "score: 1" in out
    assert main(["test-reward", spec, str(HERE / "math.jsonl"), "--json"]) == 1
    assert {"listing"} <= {f["probe"] for f in json.loads(capsys.readouterr().out)}
    spec = f"{HERE / 'clean.py'}:boxed_exact"
    assert main(["test-reward", spec, str(HERE / "math.jsonl")]) == 0
    assert "no finding" in capsys.readouterr().out


def test_what_is_missing_is_named(tmp_path, capsys):
    data = str(HERE / "math.jsonl")
    for spec, rows, text in (
        ("nothing.py:f", data, "no such file"),
        (f"{HERE / 'clean.py'}:nothing", data, "has no function 'nothing'"),
        (f"{HERE / 'clean.py'}:chat", str(tmp_path / "no.jsonl"), "No such file"),
    ):
        assert main(["test-reward", spec, rows]) == 2
        assert text in capsys.readouterr().err
    assert main(["test-reward", f"{HERE / 'clean.py'}:chat", data, "--answer", "x"]) == 2
    assert "there is no column 'x'" in capsys.readouterr().err


# By what they compare, these pay for more than the answer; their documentation says so.
BY_DESIGN = {
    "string_contains": {"listing", "reasoning", "part", "prompt", "instruction"},
    "string_f1": {"part", "listing", "length"},
    "r1_style_format": {"format without content"},
    "think_format_reward": {"format without content"},  # TRL's
}


@pytest.mark.parametrize(
    "name", ["math", "gsm8k", "exact_match", "string_match", "string_contains", "string_f1"]
)
def test_verifiers_of_kedge(name):
    pytest.importorskip("kedge")
    data = "words" if name.startswith("string") else "math"
    findings = examine_file(f"kedge.verifiers:{name}", str(HERE / f"{data}.jsonl"))
    assert {f.probe for f in findings} <= BY_DESIGN.get(name, set()), [str(f) for f in findings]


@pytest.mark.parametrize("name", ["think_answer", "think_format_reward", "r1_style_format"])
def test_format_rewards_of_kedge(name):
    pytest.importorskip("kedge")
    findings = examine_file(f"kedge.verifiers:{name}", str(HERE / "math.jsonl"))
    assert {f.probe for f in findings} <= BY_DESIGN.get(name, set()), [str(f) for f in findings]
