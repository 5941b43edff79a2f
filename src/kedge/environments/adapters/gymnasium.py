"""Gymnasium environments whose observations and actions can be written as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kedge.environments.adapters.packages import import_package
from kedge.errors import ConfigError
from kedge.protocols import Observation, Step
from kedge.types import Response


class Gymnasium:
    """A Gymnasium environment (``reset`` and ``step`` of ``gymnasium.Env``), played in text.

    A response that is not an action is answered with the list of actions, and the environment does
    not step.

    Args:
        environment: a registered id, for example "FrozenLake-v1", or an environment.
        actions: the names of the actions 0, 1, ... of a ``Discrete`` space.  None: their numbers.
        parse_action: response text -> action, for other spaces than ``Text`` and ``Discrete``;
            raises ValueError, with words for the policy, if it is not one.
        show: observation -> text, messages or token ids.  None: text as it is, or what
            ``render_mode="ansi"`` prints, or ``str``.
        intro: comes before the first observation, for example the rules.
        **options: of ``gymnasium.make``.

    Raises:
        ConfigError: Gymnasium is not installed, or the action space needs ``parse_action``.
    """

    def __init__(
        self,
        environment: Any,
        *,
        actions: Sequence[str] | None = None,
        parse_action: Callable[[str], Any] | None = None,
        show: Callable[[Any], Observation] | None = None,
        intro: str = "",
        **options: Any,
    ) -> None:
        if isinstance(environment, str):
            environment = import_package("gymnasium", "gymnasium").make(environment, **options)
        self.environment, self.intro = environment, intro
        self._parse = parse_action or _parser(environment.action_space, actions)
        self._show_with = show

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Begin an episode; a dataset column ``options`` is passed on."""
        observation, info = self.environment.reset(seed=seed, options=options.get("options"))
        shown = self._show(observation)
        return (f"{self.intro}\n{shown}" if self.intro else shown), info

    def step(self, response: Response) -> Step:
        """Take the action that the response names."""
        try:
            action = self._parse(response.text.strip())
        except ValueError as error:
            return str(error), 0.0, False, False, {"metrics": {"illegal": 1.0}}
        observation, reward, terminated, truncated, info = self.environment.step(action)
        return self._show(observation), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()

    def _show(self, observation: Any) -> Observation:
        if self._show_with is not None:
            return self._show_with(observation)
        if isinstance(observation, str):
            return observation
        if self.environment.render_mode == "ansi":
            return str(self.environment.render())
        return str(observation)


def _parser(space: Any, actions: Sequence[str] | None) -> Callable[[str], Any]:
    """Text -> action for a ``Text`` or ``Discrete`` space."""
    kind = type(space).__name__
    if kind == "Text":
        return lambda text: text
    if kind != "Discrete":
        raise ConfigError(
            f"parse_action must say which action of {space} a response means; pass"
            " parse_action=FUNCTION"
        )
    if actions is not None and len(actions) != space.n:
        raise ConfigError(f"actions must name the {space.n} actions of {space}, got {actions}")
    first = int(space.start)
    names = actions or [str(first + i) for i in range(int(space.n))]
    numbers = {name.lower(): first + i for i, name in enumerate(names)}

    def parse(text: str) -> int:
        if text.lower() not in numbers:
            raise ValueError(f"Unknown action {text[:40]!r}. The actions are: {', '.join(names)}.")
        return numbers[text.lower()]

    return parse
