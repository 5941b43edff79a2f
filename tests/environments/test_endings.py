"""Why episodes end, in the metrics of a trainer."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.environments.episode import ENDINGS
from tests.e2e.small import rows
from tests.environments.test_limits import ppo
from tests.environments.test_tools import calculator
from tests.environments.toys import Echo


class Broken(Echo):
    """Fails in its second turn."""

    def step(self, response: Any) -> Any:
        if self.turn:
            raise RuntimeError("broken")
        return super().step(response)


class BadGrader(Echo):
    """Cannot say how good an episode was that a limit has ended."""

    def final_reward(self) -> float:
        raise ValueError("no verdict")


class CutOff(Echo):
    """Cuts the episode off itself."""

    def step(self, response: Any) -> Any:
        observation, reward, _, _, info = super().step(response)
        return observation, reward, False, self.turn == 2, info


@pytest.mark.parametrize(
    ("make", "options", "ending"),
    [
        (Echo, {}, "done"),
        (CutOff, {}, "truncated"),
        (Echo, {"max_turns": 1}, "turn_limit"),
        (lambda: Echo(turns=99), {"max_turn_tokens": 9}, "token_limit"),
        (Echo, {"max_episode_seconds": 1e-9}, "time_limit"),
        (Broken, {"on_env_error": "score"}, "environment_error"),
        (BadGrader, {"max_turns": 1, "on_env_error": "score"}, "grader_error"),
    ],
)
def test_the_share_of_each_ending(make: Any, options: dict[str, Any], ending: str) -> None:
    trainer = ppo(make, max_turn_tokens=options.pop("max_turn_tokens", 4), **options)
    trainer.train()
    row = rows(trainer)[0]
    assert {e: row[f"environment/ended_{e}"] for e in ENDINGS} == {
        e: float(e == ending) for e in ENDINGS
    }


def test_an_answer_without_a_call() -> None:
    reward = lambda completions, **_: [1.0] * len(completions)  # noqa: E731
    trainer = ppo(None, tools=[calculator], reward_funcs=reward, max_turn_tokens=8)
    trainer.train()
    row = rows(trainer)[0]
    shares = [row[f"environment/ended_{e}"] for e in ("answer", "token_limit")]
    assert sum(shares) == 1.0
    assert shares[1] == row["completions/truncated_ratio"]
