"""The command: run, explain, new, mutants, table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ppo_conformance import cases, mutants, table
from ppo_conformance.cli import main
from ppo_conformance.families import FAMILIES

ROOT = Path(__file__).parents[1]
GOOD = """
import numpy as np
from ppo_conformance import NotOffered

LIBRARY, VERSION = "toy", lambda: "1.0"
NOT_CALLABLE = {"gspo": "written inline"}
DOCUMENTED = {"overlong/paper": "its README"}


def gae(rewards, values, mask, gamma, lam, last_values):
    if last_values.any():
        raise NotOffered("no bootstrap")
    out = np.zeros(mask.shape)
    for b, row in enumerate(mask):
        following = trace = 0.0
        for t in reversed(np.flatnonzero(row)):
            trace = rewards[b, t] + gamma * following - values[b, t] + gamma * lam * trace
            out[b, t], following = trace, values[b, t]
    return {"advantages": out}
"""
BAD = (
    GOOD
    + """

def overlong(lengths, longest, buffer):
    return np.minimum((longest - buffer - lengths) / buffer, 0) * (2 if longest > 1000 else 1)


def kl(logp, ref, mask, estimator):
    return logp[:0]


def leave_one_out(scores, group, valid):
    raise RuntimeError("of the library")
"""
)


def write(tmp_path, text):
    path = tmp_path / "toy_adapter.py"
    path.write_text(text)
    return str(path)


def test_an_adapter_that_is_right_passes(tmp_path, capsys):
    assert main(["run", write(tmp_path, GOOD)]) == 0
    out = capsys.readouterr().out
    assert "ok      generalized advantage estimation: 13 of 13" in out
    assert "GSPO: not offered (written inline)" in out
    assert "13 of 13 cases agree" in out


def test_a_wrong_one_fails_and_the_known_error_is_named(tmp_path, capsys):
    assert main(["run", write(tmp_path, BAD)]) == 1
    out = capsys.readouterr().out
    assert "looks like: no floor at -1" in out
    assert "documented: its README" in out
    assert "shape [0, 6], expected [3, 6]" in out
    assert "RuntimeError: of the library" in out


def test_a_record_is_json(tmp_path, capsys):
    assert main(["run", write(tmp_path, BAD), "--json", "--case", "overlong"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["library"], record["version"]) == ("toy", "1.0")
    assert record["cases"]["overlong/beyond_the_limit"]["status"] == "differs"
    assert record["cases"]["overlong/paper"]["documented"] == "its README"


def test_an_optional_input_comes_when_asked_for(tmp_path, capsys):
    gae = "def gae(rewards, values, mask, gamma, lam, last_values{}):\n    raise RuntimeError({})"
    for more, shown, text in (
        (", attention_mask", "attention_mask.sum()", "RuntimeError: 17"),
        ("", "mask.sum()", "RuntimeError: 13"),
    ):
        assert main(["run", write(tmp_path, gae.format(more, shown)), "--case", "gae/holes"]) == 1
        assert text in capsys.readouterr().out


def test_an_adapter_imports_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_ppo.py").write_text("ANSWER = 1")
    monkeypatch.chdir(tmp_path)
    assert main(["run", write(tmp_path, "import my_own_ppo"), "--case", "kl"]) == 0


def test_an_adapter_may_be_a_dictionary_and_return_tuples(tmp_path):
    mask = "lambda tokens, eos: ((tokens == eos).cumsum(1) - (tokens == eos) == 0,)"
    text = f"adapter = {{'response_mask': {mask}}}"
    assert main(["run", write(tmp_path, text)]) == 0


def test_explain_shows_the_answer_and_the_wrong_ones(capsys):
    assert main(["explain", "gae/holes"]) == 0
    out = capsys.readouterr().out
    for text in (
        "arXiv:1506.02438",
        "last_values",
        "wrong: steps over observation tokens",
        "returns",
    ):
        assert text in out
    assert main(["explain", "gae/nothing"]) == 2
    assert "gae/holes" in capsys.readouterr().err


def test_a_skeleton_runs_and_offers_nothing_yet(tmp_path, capsys):
    path = tmp_path / "mine.py"
    assert main(["new", str(path)]) == 0
    assert main(["run", str(path)]) == 0
    assert "0 of 0 cases agree" in capsys.readouterr().out
    assert main(["new", str(path)]) == 2  # it is not overwritten
    for family in ("gae", "gspo"):
        assert f"def {family}(" in path.read_text()


def test_mutants_prints_who_catches_each_and_who_catches_none(capsys):
    assert main(["mutants"]) == 0
    out = capsys.readouterr().out
    assert "**no case**" not in out
    assert "cases that catch none: entropy/certain" in out


def test_errors_of_the_user_are_sentences(tmp_path, capsys):
    assert main(["run", str(tmp_path / "missing.py")]) == 2
    assert "conformance new" in capsys.readouterr().err
    assert main(["run", write(tmp_path, "adapter = {'gea': print}")]) == 2
    assert "no family is called ['gea']" in capsys.readouterr().err


def test_the_table_is_that_of_the_records():
    records = sorted((ROOT / "records").glob("*.json"))
    assert len(records) >= 6
    text = (ROOT / "TABLE.md").read_text("utf-8")
    assert table.conformance_table(records) in text
    assert table.summary_table(records) in (ROOT / "README.md").read_text("utf-8")


def test_the_readme_counts_what_is_there():
    text = (ROOT / "README.md").read_text("utf-8")
    text = text.replace("\n", " ")
    assert f"{len(list(cases.load()))} small cases that cover {len(FAMILIES)} formulas" in text
    assert f"{len(mutants.MUTANTS)} known errors" in text


def test_the_package_needs_numpy_alone_and_knows_nothing_of_kedge():
    for path in ROOT.rglob("*.py"):
        text = path.read_text("utf-8")
        if path.parts[-2:] != ("adapters", "kedge.py") and "tests" not in path.parts:
            assert not re.search(r"^\s*(from|import) kedge", text, re.M), path
    code = "import ppo_conformance.cli, sys; print(sorted({'torch', 'kedge'} & set(sys.modules)))"
    env = {"PYTHONPATH": str(ROOT / "src")}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_kedge_agrees():
    pytest.importorskip("kedge")
    from ppo_conformance.runner import Adapter, check

    adapter = Adapter.load(str(ROOT / "adapters" / "kedge.py"))
    found = {case.name: check(adapter, case) for case in cases.load()}
    wrong = {n: v.message for n, v in found.items() if v.status in {"differs", "fails"}}
    assert not wrong
    assert sum(v.status == "agrees" for v in found.values()) >= 150
