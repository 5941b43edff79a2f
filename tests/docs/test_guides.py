"""What guides and cookbook name in Kedge exists: options, commands, metrics, pages."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from docs.generate import metrics_page

from docs import redraw
from kedge import PPOConfig
from kedge.cli import main as cli
from kedge.ext.trl import GRPOConfig, RLOOConfig, v0_17
from kedge.loop.metrics import NAMES, PREFIXES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
OF_COMMANDS = {  # options of the command line alone
    *("model_name_or_path", "dataset_name", "reward_funcs", "algorithm", "config_file"),
    *("use_peft", "lora_r", "lora_alpha", "dataset_mixer_list"),
    *("apply_verifiable_reward", "verification_reward", "reward_model_multiplier"),
    "add_r1_style_format_reward",
}


def options() -> set[str]:
    """Fields, and the other names that they are set by."""
    configs = (PPOConfig, RLOOConfig, GRPOConfig, v0_17.RLOOConfig)
    return {f.name for config in configs for f in fields(config)}


def own_column(page: Path) -> list[str]:
    """The last cell of every row, and where that is unchanged, the first."""
    found = []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if len(cells) > 1 and not set(cells[0]) <= {"-"}:
            found.append(" ".join(cells) if cells[-1].startswith("unchanged") else cells[-1])
    return found


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.stem)
def test_options_of_guides_exist(page: Path) -> None:
    named = {n for cell in own_column(page) for n in re.findall(r"`--([a-z_0-9]+)", cell)}
    assert named - options() - OF_COMMANDS == set()
    commands = {n for n in re.findall(r"`kedge ([a-z-]+)", page.read_text())}
    assert commands <= {*cli.commands()}


def test_the_same_means_the_same() -> None:
    text = (DOCS / "guides" / "from-trl-rloo.md").read_text()
    named = set(re.findall(r"`([a-z_]+)`", text)) - {"kedge"}
    assert {n for n in named if n in options()} >= {"rloo_k", "token_level_kl", "num_iterations"}


def test_the_cookbook_names_metrics_and_options_that_exist() -> None:
    text = (DOCS / "cookbook.md").read_text()
    first = re.findall(r"^\| (`[^|]*)\|", text, flags=re.MULTILINE)
    for name in {n for cell in first for n in re.findall(r"`([^`]+)`", cell)}:
        assert name in NAMES or name.startswith(tuple(PREFIXES)), name
    known = options() | {*NAMES} | {*OF_COMMANDS, "length_close_to", "eval_completions"}
    for name in set(re.findall(r"`([a-z]+_[a-z_]+)`", text)):
        assert name in known, name


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {page for page in listed if not (DOCS / page).is_file()} == set()
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert {page for page in there - listed if not page.startswith("adr/")} == set()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = shutil.which("mkdocs", path=str(Path(sys.executable).parent)) or shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: pip install 'kedge-rl[docs]'")
    command: list[Any] = [mkdocs, "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("index.html"))
    assert len(pages) >= len(list(DOCS.rglob("*.md")))
    outside = [p for p in pages if "fonts.googleapis" in p.read_text(encoding="utf-8")]
    assert outside == []


def test_the_page_is_current() -> None:
    file = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    assert file.read_text() == metrics_page(), "python docs/generate.py"


RATE = r"([\d.]+)%"

# Where each figure stands: the page, and an expression whose groups are the figure.
FIGURES = {
    "chat model, right and as asked": {
        "docs/results.md": rf"follow the instruction rises from {RATE} to {RATE}",
        "docs/chat_model.md": rf"went from {RATE} to {RATE}",
    },
    "chat model, minutes": {
        "docs/results.md": r"GRPO in ([\d.]+) minutes on two CPU cores",
        "docs/chat_model.md": r"([\d.]+) minutes on two CPU cores",
    },
    "demo, mean and worst seed": {
        "README.md": rf"to {RATE} \({RATE} for the worst seed",
        "docs/results.md": rf"trained with PPO is {RATE}; the worst seed's policy reaches {RATE}",
        "docs/demo.md": rf"PPO wins {RATE} of [^%]* {RATE} with the worst seed",
    },
    "demo, perfect summaries": {
        "README.md": rf"Perfect summaries would win {RATE}",
        "docs/results.md": rf"Perfect summaries have a win rate of {RATE}",
        "docs/demo.md": rf"Perfect summaries would win {RATE}",
    },
    "demo, minutes": {
        "README.md": r"make demo +# about (\w+) minutes",
        "docs/demo.md": r"takes about (\w+) minutes",
        "examples/demo/run.py": r"about (\w+) minutes on one core",
    },
    "schedules in order": {
        "docs/async.md": r"In ([\d,]+) random schedules",
        "tests/property/test_staleness.py": r"SCHEDULES = ([\d_]+)",
    },
    "schedules as completed": {
        "docs/async.md": r"In ([\d,]+) simulated schedules",
        "tests/property/test_as_completed.py": r"SCHEDULES = ([\d_]+)",
    },
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_is_the_same_on_every_page(name: str) -> None:
    found = {}
    for page, expression in FIGURES[name].items():
        match = re.search(expression, " ".join((ROOT / page).read_text(encoding="utf-8").split()))
        assert match, f"{page} does not state: {name}"
        found[page] = [figure.replace("_", ",") for figure in match.groups()]
    assert len(set(map(tuple, found.values()))) == 1, found


PAGES = sorted((ROOT / "docs" / "trust").glob("*.md"))


@functools.cache
def functions_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_named_test_exists(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    assert len(named) > 20
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert not test or test in functions_in(ROOT / file), f"{file}::{test}"


@pytest.mark.smoke
def test_every_figure_is_drawn_from_its_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert redraw.main(["--check"]) == 0, capsys.readouterr().err


def test_what_the_answers_to_questions_name_exists() -> None:
    page = (DOCS / "questions.md").read_text()
    known = options() | OF_COMMANDS | {"measure", "value_model", "value_model_path"}
    assert set(re.findall(r"--([a-z_][a-z_0-9]*)", page)) - known == set()
    metrics = set(re.findall(r"`([a-z]+/[a-z_]+)`", page))
    assert {name for name in metrics if name not in NAMES} == set()
    commands = set(re.findall(r"`kedge ([a-z-]+)", page))
    assert commands <= set(cli.commands())
