"""The examples of the page on games and adapters run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kedge.environments import Response

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
GAME, TOOL, LAKE, TIC_TAC_TOE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_a_game_by_hand() -> None:
    exec(GAME, {})


def test_gymnasium() -> None:
    pytest.importorskip("gymnasium")
    names: dict[str, Any] = {}
    exec(LAKE, names)
    lake = names["frozen_lake"]()
    assert "Walk from S to G" in lake.reset(seed=0, options={})[0]
    assert lake.step(Response("down"))[4]["prob"] == pytest.approx(1 / 3)


@pytest.mark.filterwarnings("ignore")
def test_textarena() -> None:
    pytest.importorskip("textarena")
    names: dict[str, Any] = {}
    exec(TIC_TAC_TOE, names)
    game = names["tic_tac_toe"]()
    game.reset(seed=0, options={})
    assert "[Player 1] [0]" in game.step(Response("[4]"))[0]


def test_all_extras_exist() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = re.findall(r"install -e '\.\[(\w+)\]'", PAGE)
    assert len(extras) == 4
    assert all(f"\n{extra} = [" in project for extra in extras)


def test_a_tool() -> None:
    names: dict[str, Any] = {}
    exec(TOOL, names)
    game = names["Doubling"]()
    assert game.reset(seed=21, options={})[0] == "What is twice 21?"
    assert game.step(Response("42"))[1:4] == (1.0, True, False)
