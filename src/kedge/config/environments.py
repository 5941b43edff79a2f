"""Options of environments, for tasks of many turns."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kedge.config.declare import option
from kedge.config.values import SECONDS

_environment = partial(option, acts_in="environments")


@dataclass
class EnvironmentArguments:
    """Environment options of every config; they act if the policy plays in environments."""

    environment: str | None = _environment(
        None,
        "Class or function that makes an environment: module:Class or file.py:Class.",
    )
    environment_kwargs: dict[str, Any] | str | None = _environment(
        None, "Arguments of environment by name; JSON on the command line."
    )
    max_turns: int | None = _environment(
        None, "Turns per episode. Unset: as many as response_length has room for.", ge=1
    )
    max_turn_tokens: int | None = _environment(
        None, "Tokens per turn. Unset: what is left of response_length.", ge=1
    )
    max_episode_seconds: float | None = _environment(
        None,
        "Seconds that the environment of an episode may work, without sampling, before the episode"
        " is truncated; in order, those of the whole batch.",
        gt=0,
        le=SECONDS,
    )
    max_tool_calling_iterations: int | None = _environment(
        None, "Turns of an episode whose tool calls are made. Unset: no limit.", ge=1
    )
    environment_timeout: float = _environment(
        60.0,
        "Seconds that a call of an environment may take.",
        gt=0,
        le=SECONDS,
        resume="may_change",
    )
    environment_concurrency: int = _environment(
        256, "Calls of environments that run at the same time.", ge=1, resume="may_change"
    )
    on_env_error: Literal["raise", "drop", "score"] = _environment(
        "raise",
        "What an exception or timeout of an environment does: stop, drop the episode, or score it.",
    )
    env_error_score: float = _environment(
        0.0, "Reward of the last turn of an episode whose environment failed, with score."
    )
