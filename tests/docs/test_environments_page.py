"""The page on environments: its example trains, its tool has a schema, its options exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kedge import PPOConfig
from kedge.environments import Response, ToolEnvironment

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
EXAMPLE, TOOL = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.usefixtures("demo")
def test_the_example_trains() -> None:
    names: dict[str, Any] = {}
    exec(EXAMPLE, names)
    row = names["trainer"].state.log_history[0]
    assert 1 < row["environment/turns"] <= 6
    game = names["GuessTheNumber"]()
    game.reset(seed=3, options={})
    answers = [game.step(Response(str(guess))) for guess in range(1, 10)]
    assert [answer[:3] for answer in answers].count((None, 1.0, True)) == 1


def test_the_tool_has_a_schema() -> None:
    names: dict[str, Any] = {}
    exec(TOOL, names)
    (schema,) = ToolEnvironment([names["calculator"]]).tools
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b", "operation"}


def test_the_options_exist() -> None:
    (table,) = re.findall(r"\| option \| limits \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)
    named = re.findall(r"`(\w+)`", table)
    assert len(named) == 6
    assert set(named) <= set(PPOConfig.__dataclass_fields__)
