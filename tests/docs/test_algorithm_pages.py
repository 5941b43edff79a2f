"""The pages on algorithms: tables as the code has them, examples that run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docs.generate import OF_ALGORITHM, OF_ALL_ALGORITHMS, described, renewed

from kedge.algorithms import BUILTIN, reinforce_pp, remax
from tests.e2e.small import rows, small
from tests.e2e.test_groups import grpo, rloo

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"


@pytest.mark.parametrize("name", BUILTIN)
def test_the_tables_are_those_of_the_code(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert renewed(page, name) == page, "python docs/generate.py"
    assert all(described(BUILTIN[name]).values())


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.usefixtures("demo")
def test_the_example_runs(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["trainer"].state.global_step == 1
    assert logged(names["trainer"]) <= {*OF_ALL_ALGORITHMS, *OF_ALGORITHM[name], *OF_GROUPS}


OF_GROUPS = {"objective/uniform_groups"}  # logged by every rule that gets several responses
RUNS: dict[str, Callable[[], Any]] = {
    "ppo": small,
    "rloo": lambda: rloo(mask_truncated_completions=True),
    "reinforce_pp": lambda: rloo(algorithm=reinforce_pp(baseline=True, beta=0.1)),
    "grpo": lambda: grpo(
        beta=0.1, kl_coef=0.1, dynamic_sampling=1, mask_truncated_completions=True
    ),
    "remax": lambda: small(algorithm=remax()),
}


@pytest.mark.parametrize("name", BUILTIN)
def test_a_run_logs_every_metric_of_the_page(name: str) -> None:
    trainer = RUNS[name]()
    trainer.train()
    assert logged(trainer) == {*OF_ALL_ALGORITHMS, *OF_ALGORITHM[name]}


def logged(trainer: Any) -> set[str]:
    """Names that say something of learning, of the last update."""
    shared = {
        "rollout/lag",
        "rollout/lag_max",
        "rollout/dropped_rows",
        "rollout/logprob_gap",
        "rollout/stale_gap",
    }
    shared |= {"rollout/tokens", "clip_ratio/region_mean"}  # the last is TRL's name of another
    kinds = ("objective/", "clip_ratio/", "policy/", "loss/", "val/", "rollout/")
    return {name for name in rows(trainer)[-1] if name.startswith(kinds)} - shared


def test_the_overview_names_every_page() -> None:
    overview = (PAGES / "index.md").read_text(encoding="utf-8")
    assert all(f"({name}.md)" in overview for name in BUILTIN)
