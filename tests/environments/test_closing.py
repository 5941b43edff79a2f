"""Every environment is closed once, however training ends, and a later call makes others."""

from __future__ import annotations

import signal
import sqlite3
import threading
from typing import Any

import pytest
from transformers import TrainerCallback

from kedge.environments.episode import Episode
from kedge.environments.pool import Calls, EnvironmentPool
from kedge.records.errors import RewardError, RolloutError
from tests.e2e.small import length_reward
from tests.environments.toys import PROMPTS, Echo, played, prompts, sampling


class Held(Echo):
    """Counts the calls of ``close``; all environments of one test share a list."""

    def __init__(self, made: list[Held], wrong: str = "") -> None:
        super().__init__()
        self.closed, self.wrong, self.number = 0, wrong, len(made)
        self.leave = threading.Event()
        made.append(self)
        if wrong == "making hangs" and self.number == 1:
            self.leave.wait(1.5)

    def step(self, response: Any) -> Any:
        if self.number == 1 and self.turn == 1:
            if self.wrong == "raises":
                raise ValueError("the door is locked")
            if self.wrong == "hangs":
                self.leave.wait(5.0)
        return super().step(response)

    def close(self) -> None:
        self.closed += 1
        self.leave.set()
        if self.wrong == "close fails":
            raise OSError("gone")


class HeldAsync(Held):
    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1


class Stop(TrainerCallback):
    def __init__(self, signaled: bool) -> None:
        self.signaled = signaled

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.signaled:
            signal.raise_signal(signal.SIGINT)
        else:
            control.should_training_stop = True


def failing_reward(completions: Any, trainer_state: Any, **_: Any) -> list[float]:
    if trainer_state.global_step:
        raise ValueError("no score")
    return length_reward(["w5 w6"] * len(completions))


DROP = {"on_env_error": "drop", "environment_timeout": 0.3}
AHEAD: dict[str, Any] = {"max_lag": 1, "rollout_schedule": "as_completed"}


@pytest.mark.parametrize(
    ("wrong", "options", "error"),
    [
        ("", {}, None),
        ("", AHEAD, None),
        ("", {"callbacks": [Stop(False)]}, None),
        ("", {"callbacks": [Stop(False)]} | AHEAD, None),
        ("", {"callbacks": [Stop(True)]}, KeyboardInterrupt),
        ("", {"reward_funcs": [failing_reward]}, RewardError),
        ("", {"eval_dataset": PROMPTS[:2], "eval_strategy": "steps", "eval_steps": 1}, None),
        ("raises", {}, RolloutError),
        ("raises", {"on_env_error": "drop"}, None),
        ("hangs", DROP, None),
        ("making hangs", DROP | {"environment_timeout": 1.0}, None),
        ("close fails", {}, None),
    ],
)
def test_every_environment_is_closed_once(wrong: str, options: Any, error: Any) -> None:
    made: list[Held] = []
    trainer = played(environment=lambda: Held(made, wrong), **options)
    if error is None:
        trainer.train()
    else:
        with pytest.raises(error):
            trainer.train()
    for environment in made if wrong == "making hangs" else []:
        environment.leave.wait(10.0)  # closed as soon as it is made
    assert len(made) >= 4
    assert [environment.closed for environment in made] == [1] * len(made)
    if error is None and "callbacks" in options:  # training continues with other environments
        before = len(made)
        trainer.train()
        assert trainer.engine.step == 2
        assert [environment.closed for environment in made] == [1] * len(made)
        assert len(made) > before or "max_lag" in options  # its second batch was sampled ahead


@pytest.mark.parametrize("kind", [Held, HeldAsync])
def test_evaluation_closes_what_it_has_made(kind: Any) -> None:
    made: list[Held] = []
    trainer = played(environment=lambda: kind(made), eval_dataset=PROMPTS[:2])
    trainer.evaluate()
    trainer.generate_completions()
    assert len(made) >= 2
    assert [environment.closed for environment in made] == [1] * len(made)


class Table(Held):
    """Its connection can be used only in the thread that made it, as everybody writes it."""

    def __init__(self, made: list[Any]) -> None:
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table turns (text)")
        super().__init__(made)

    def reset(self, **options: Any) -> Any:
        self.db.execute("delete from turns")
        return super().reset(**options)

    def step(self, response: Any) -> Any:
        """Count the turns by SQL; what fails is an observation, as in many agents."""
        done = super().step(response)
        try:
            self.db.execute("insert into turns values (?)", [response.text])
            (turns,) = self.db.execute("select count(*) from turns").fetchone()
        except sqlite3.Error as error:
            return str(error), 0.0, True, False, {}
        return done[0], float(turns), *done[2:]

    def close(self) -> None:
        self.db.close()
        super().close()


def test_the_methods_of_an_environment_run_in_one_thread(caplog: Any) -> None:
    """Counted by SQL; 0 if ``step`` cannot use the connection that ``__init__`` has made."""
    made: list[Table] = []
    trainer = played(environment=lambda: Table(made))
    trainer.train()
    assert [row["objective/scores"] for row in trainer.state.log_history[:2]] == [
        1 + 2 + 3,
        1 + 2 + 3,
    ]
    assert [environment.closed for environment in made] == [1] * len(made)
    assert "close() of" not in caplog.text


def test_failures_of_closing_failed_environments_are_counted(caplog: Any) -> None:
    """Of three, all of which failed before the pool is closed."""
    pool = EnvironmentPool(lambda: Held([], "close fails"), Calls(timeout=5.0), on_error="drop")
    for key in range(3):
        episode = Episode(key=key, group=0, prompts=prompts(1), sampling=sampling(), seed=0)
        pool.reset(episode, 0)()
        episode.error = "the door is locked"
        pool.release(episode)
    pool.close()
    assert "close() of 3 environments failed, the last with OSError: gone" in caplog.text


def test_environments_that_failed_while_all_threads_hung_are_closed_at_the_end() -> None:
    made: list[Held] = []
    pool = EnvironmentPool(lambda: Held(made), Calls(timeout=1.0, most=1), on_error="drop")
    episode = Episode(key=0, group=0, prompts=prompts(1), sampling=sampling(), seed=0)
    pool.reset(episode, 0)()
    episode.error = "late"
    with pool.calls.room:
        pool.release(episode)
        assert made[0].closed == 0
    pool.close()
    pool.close()
    assert made[0].closed == 1
