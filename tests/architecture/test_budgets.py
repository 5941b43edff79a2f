"""The budget of each package in lines: what is added is deleted there, or traded."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "kedge"

# Raw lines, docstrings included. "." is the modules next to the packages.
BUDGETS = {
    ".": 2_545,
    "algorithms": 1_038,
    "checkpoint": 862,
    "classic": 3_663,
    "cli": 3_580,
    "compat": 716,
    "config": 3_039,
    "data": 704,
    "demo": 443,
    "environments": 3_730,
    "learner": 1_627,
    "loop": 1_946,
    "math": 773,
    "models": 2_158,
    "ops": 580,
    "ops/cpu": 622,
    "pretrain": 659,
    "ray": 1_974,
    "reporting": 2_256,
    "rewards": 1_526,
    "rollout": 612,
    "rollout/embedded": 1_354,
    "rollout/scheduler": 1_641,
    "rollout/vllm": 2_530,
    "trainers": 3_614,
    "verifiers": 2_504,
    "verifiers/sandbox": 1_323,
}
TOTAL = 48_019
TESTS = 41_657


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
