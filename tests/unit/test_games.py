"""The shipped games: experts, determinism, and what an impossible action is answered."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.environments import experts
from kedge.environments.experts import expert_episodes
from kedge.environments.games import Calculator, GuessNumber, TextWorld, calculate

GAMES = [Calculator, GuessNumber, TextWorld]
SEEDS = st.integers(0, 2**63)


def play(game: type, seed: int, **options: Any) -> dict[str, Any]:
    return next(expert_episodes(lambda: game(**options), [seed]))


@pytest.mark.parametrize("game", GAMES)
@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_the_expert_solves_every_seed(game: type, seed: int) -> None:
    """Text worlds in 6 to 12 turns."""
    episode = play(game, seed)
    assert episode["reward"] == 1
    assert game is not TextWorld or 12 <= len(episode["messages"]) <= 24


@pytest.mark.parametrize("game", GAMES)
@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_the_same_seed_and_actions_give_the_same_episode(game: type, seed: int) -> None:
    first, second = (list(expert_episodes(game, [seed], noise=0.5)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("game", GAMES)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 20), words=st.lists(st.text(max_size=20), max_size=6))
def test_any_text_is_answered_in_words(game: type, seed: int, words: list[str]) -> None:
    environment = game()
    environment.reset(seed=seed, options={})
    for response in words:
        observation, reward, terminated, truncated, _ = environment.step(response)
        assert observation
        assert reward in {0, 1}
        assert not truncated
        if terminated:
            break


@pytest.mark.parametrize(
    ("game", "seed", "response", "words"),
    [
        (Calculator, 0, "help", "Write calc and one operation"),
        (Calculator, 0, "calc 1 + 2 + 3", "'1 + 2 + 3' is not one operation"),
        (Calculator, 0, "answer many", "Write calc and one operation"),
        (GuessNumber, 0, "0", "one number from 1 to 64"),
        (GuessNumber, 0, "a lot", "one number from 1 to 64"),
        (TextWorld, 0, "go up", "There is no way."),
        (TextWorld, 0, "take gold", "That is not here."),
        (TextWorld, 0, "open up", "No locked door is there."),
        (TextWorld, 0, "sing", "Unknown command."),
    ],
)
def test_impossible_actions(game: type, seed: int, response: str, words: str) -> None:
    environment = game()
    environment.reset(seed=seed, options={})
    observation, reward, terminated, _, info = environment.step(response)
    assert words in observation
    assert (reward, terminated, info["metrics"]["illegal"]) == (0, False, 1)


def test_a_locked_door_needs_its_key() -> None:
    world = TextWorld()
    for seed in range(50):
        world.reset(seed=seed, options={})
        for direction, color in world.rooms[0, 0].doors.items():
            needs = world.step(f"open {direction}")[0]
            assert needs.startswith(f"You need the {color} key.")
            assert world.step(f"go {direction}")[0].startswith(f"The {color} door is locked.")
            return
    pytest.fail("no world begins at a locked door")


def test_a_wrong_answer_ends_the_sum() -> None:
    sum_ = Calculator()
    sum_.reset(seed=0, options={})
    assert sum_.step("answer 100000")[1:3] == (0.0, True)


def test_guesses_are_limited() -> None:
    game = GuessNumber(guesses=2)
    game.reset(seed=0, options={})
    wrong = str(game.number % 64 + 1)
    assert game.step(wrong)[2] is False
    assert game.step(wrong)[0] == f"It was {game.number}."


def test_calculate() -> None:
    assert [calculate(x) for x in ("17 + 25", "8-17", "-3 + -4")] == ["42", "-9", "-7"]
    with pytest.raises(ValueError, match="'2 \\* 3' is not one operation"):
        calculate("2 * 3")


@pytest.mark.parametrize(("noise", "low", "high"), [(1.0, 0.05, 0.35), (0.3, 0.5, 0.99)])
def test_noise_replaces_turns(noise: float, low: float, high: float) -> None:
    rows = list(expert_episodes(TextWorld, range(150), noise=noise))
    assert low < sum(row["reward"] for row in rows) / len(rows) <= high
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)


def test_episodes_are_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "episodes.jsonl"
    options = ["--episodes", "3", "--first_seed", "7", "--environment_kwargs", '{"rules": false}']
    experts.main(["kedge.environments.games:TextWorld", *options, "--output", str(file)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [play(TextWorld, seed, rules=False) for seed in (7, 8, 9)]


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="noise must be from 0 to 1, got 2"):
        next(expert_episodes(TextWorld, [0], noise=2))
    with pytest.raises(ValueError, match="Random has no expert; add a static method"):
        next(expert_episodes(random.Random, [0]))
    with pytest.raises(ValueError, match="rooms must be"):
        TextWorld(rooms=(2, 9))
    with pytest.raises(ValueError, match="terms must be"):
        Calculator(terms=(5, 2))
    with pytest.raises(ValueError, match="highest must be"):
        GuessNumber(highest=0)
