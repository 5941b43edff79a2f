"""The pages on environments, games and adapters: examples run, options and extras exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kedge import PPOConfig
from kedge.cli.main import main
from kedge.environments import Response, ToolEnvironment

DOCS = Path(__file__).parents[2] / "docs"
AGENT, ADAPTERS, ENVIRONMENTS, CONTEXTS = (
    (DOCS / name).read_text(encoding="utf-8")
    for name in ("agents.md", "adapters.md", "environments.md", "contexts.md")
)


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


(TOOL,) = examples(AGENT)
LAKE, GAME = examples(ADAPTERS)
EXAMPLE, FUNCTION = examples(ENVIRONMENTS)
(COMPACT,) = examples(CONTEXTS)


def test_a_game_by_hand() -> None:
    exec(GAME, {})


def test_an_expert_plays_the_page_s_own_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named as for training; a step gets a ``Response``; mistakes have one line."""
    expert = """
    @staticmethod
    def expert(messages):
        low, high = 1, 9
        for guess, answer in zip(messages[1::2], messages[2::2]):
            if answer["content"] == "higher":
                low = int(guess["content"]) + 1
            else:
                high = int(guess["content"]) - 1
        return str((low + high) // 2)
"""
    file, out = tmp_path / "guess.py", tmp_path / "episodes.jsonl"
    file.write_text(EXAMPLE.split("trainer =")[0].rstrip() + "\n" + expert)
    words = ["expert", f"{file}:GuessTheNumber", "--episodes", "20", "--output", str(out)]
    assert main(words) == 0
    assert "20 episodes of mean reward 1 are in" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 20
    assert main([*words, "--noise", "0.2"]) == 2
    assert "GuessTheNumber has no random_action; add" in capsys.readouterr().err
    assert main(["expert", f"{file}:Nothing", "--output", str(out)]) == 2
    assert "does not define 'Nothing'" in capsys.readouterr().err


def test_gymnasium() -> None:
    pytest.importorskip("gymnasium")
    names: dict[str, Any] = {}
    exec(LAKE, names)
    lake = names["frozen_lake"]()
    assert "Walk from S to G" in lake.reset(seed=0, options={})[0]
    assert lake.step(Response("down"))[4]["prob"] == pytest.approx(1 / 3)


def test_all_extras_exist() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = set(re.findall(r"install -e '\.\[(\w+)\]'", ADAPTERS))
    assert len(extras) == 3
    assert all(f"\n{extra} = [" in project for extra in extras)


def test_a_tool() -> None:
    names: dict[str, Any] = {}
    exec(TOOL, names)
    game = names["Doubling"]()
    assert game.reset(seed=21, options={})[0] == "What is twice 21?"
    assert game.step(Response("42"))[1:4] == (1.0, True, False)
    assert game.step(Response("It is 42."))[1] == 1.0
    assert game.step(Response("40, 41, 42, 43"))[1] == game.step(Response("142"))[1] == 0.0


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


def test_a_new_context_has_the_messages_that_are_given() -> None:
    names: dict[str, Any] = {}
    exec(COMPACT, names)
    (message,) = names["compact"]("Find the key.", "The key is red.").messages
    assert message["content"].endswith("The key is red.")


def test_the_tool_has_a_schema() -> None:
    names: dict[str, Any] = {}
    exec(FUNCTION, names)
    (schema,) = ToolEnvironment([names["calculator"]]).tools
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b", "operation"}


def test_the_options_exist() -> None:
    (table,) = re.findall(r"\| option \| limits \|\n\|---\|---\|\n((?:\|.*\n)+)", ENVIRONMENTS)
    named = re.findall(r"`(\w+)`", table)
    assert len(named) == 7
    assert set(named) <= set(PPOConfig.__dataclass_fields__)
