"""The budget of each package in lines: what is added is deleted there, or traded."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "kedge"

# Raw lines, docstrings included. "." is the modules next to the packages.
BUDGETS = {
    ".": 2_000,
    "algorithms": 980,
    "checkpoint": 1_070,
    "classic": 4_040,
    "cli": 4_110,
    "compat": 820,
    "config": 3_590,
    "data": 850,
    "demo": 500,
    "environments": 2_490,
    "environments/adapters": 560,
    "environments/games": 500,
    "judges": 670,
    "learner": 1_900,
    "loop": 2_030,
    "math": 680,
    "models": 2_350,
    "ops": 630,
    "ops/cpu": 690,
    "pretrain": 540,
    "ray": 2_790,
    "reporting": 2_710,
    "rewards": 1_630,
    "rollout": 810,
    "rollout/embedded": 1_570,
    "rollout/scheduler": 1_750,
    "rollout/vllm": 3_320,
    "trainers": 4_080,
    "verifiers": 2_660,
    "verifiers/sandbox": 1_380,
}
TOTAL = 54_330
TESTS = 45_510


def count_lines(files: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def package_of(path: Path) -> str:
    """The longest name in the table that `path` lies in."""
    parts = path.relative_to(SRC).parts[:-1]
    names = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((name for name in names if name in BUDGETS), names[-1] if names else ".")


def sizes() -> dict[str, int]:
    found: dict[str, list[Path]] = {}
    for path in SRC.rglob("*.py"):
        found.setdefault(package_of(path), []).append(path)
    return {name: count_lines(files) for name, files in found.items()}


def test_every_package_has_a_budget() -> None:
    assert sizes().keys() == BUDGETS.keys()


@pytest.mark.parametrize("name", BUDGETS)
def test_package_is_within_its_budget(name: str) -> None:
    lines = sizes()[name]
    assert lines <= BUDGETS[name], f"{name}: {lines} lines, the budget is {BUDGETS[name]}"


def test_total() -> None:
    assert sum(sizes().values()) <= TOTAL
    assert count_lines(list((ROOT / "tests").rglob("*.py"))) <= TESTS
