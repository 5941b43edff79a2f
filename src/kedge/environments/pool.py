"""The environments of running episodes: made, reset, stepped side by side, and kept for reuse."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from kedge.environments.calls import Calls
from kedge.environments.episode import Episode, read_reset, read_reward, read_step
from kedge.environments.turn_tokens import TurnTokens, as_messages
from kedge.environments.turns import Turns, environment_seed
from kedge.errors import ConfigError, RolloutError
from kedge.protocols import Environment, Observation
from kedge.types import PromptBatch, Response, Sampling

logger = logging.getLogger(__name__)

MakeEnvironment = Callable[[], Environment]
OnError = Literal["raise", "drop", "score"]
_MOST_FAILED = 0.9  # of the latest episodes, with "drop"
_LATEST = 16  # episodes, or two batches


class EnvironmentPool:
    """Environments, one per episode.

    Args:
        make: makes an environment, or a mapping of names chosen by the column ``environment``.
        calls: runs methods at the same time.
        tokens: renders observations.
        turns: limits of the turns.
        on_error: see ``EnvironmentRollouts``.
        error_score: reward of the last turn of an episode whose environment failed.
    """

    def __init__(
        self,
        make: MakeEnvironment | Mapping[str, MakeEnvironment],
        calls: Calls,
        tokens: TurnTokens,
        turns: Turns,
        *,
        on_error: OnError,
        error_score: float,
    ) -> None:
        if on_error not in ("raise", "drop", "score"):
            raise ConfigError(f"on_env_error must be 'raise', 'drop' or 'score', got {on_error!r}")
        self.calls, self._make, self._tokens, self.turns = calls, make, tokens, turns
        self._on_error, self._error_score = on_error, error_score
        self._idle: dict[object, list[Any]] = {}  # environments without an episode
        self._lock = threading.Lock()  # of these: several engines share them
        self._closed = False
        self._errors: list[str] = []  # of the latest episodes; empty: it did not fail

    def episodes(self, prompts: PromptBatch) -> list[Episode]:
        """New episodes, with idle environments as far as there are.

        Raises:
            RolloutError: with ``on_error="drop"``, 90% or more of the latest episodes failed.
        """
        self._check_errors(max(_LATEST, 2 * len(prompts)))
        raw = prompts.columns.get("prompt", [None] * len(prompts))
        episodes = []
        for i in range(len(prompts)):
            options = {name: values[i] for name, values in prompts.columns.items()}
            name = self._name(options)
            with self._lock:
                idle = self._idle.get(name)
                environment = idle.pop() if idle else None
            episode = Episode(
                row=int(prompts.row[i]),
                prompt=raw[i],
                options=options,
                environment=environment,
                prompt_ids=prompts.ids[i][prompts.mask[i]].tolist(),
            )
            episodes.append(episode)
        return episodes

    def _check_errors(self, count: int) -> None:
        with self._lock:
            latest = self._errors = self._errors[-count:]
        failed = [error for error in latest if error]
        if self._on_error == "drop" and len(failed) >= _MOST_FAILED * count:
            raise RolloutError(
                f"{len(failed)} of the latest {count} episodes failed, the last with {failed[-1]};"
                f" on_env_error='drop' is for failures of less than {_MOST_FAILED:.0%}: fix the"
                " environment, and resume"
            )

    def _name(self, options: Mapping[str, Any]) -> Any:
        """Which of several environments the row asks for."""
        if not isinstance(self._make, Mapping):
            return None
        name = options.get("environment")
        if name not in self._make:
            raise RolloutError(
                f"the column 'environment' must name one of {', '.join(self._make)}, got {name!r}"
            )
        return name

    def release(self, episode: Episode) -> None:
        """Keep the environment for later episodes, or close it if it failed."""
        environment, episode.environment = episode.environment, None
        if episode.done:
            with self._lock:
                self._errors.append(episode.error)
        if environment is None:
            return
        with self._lock:
            if not (episode.error or self._closed):
                self._idle.setdefault(self._name(episode.options), []).append(environment)
                return
        if hasattr(environment, "close") and self.calls.room.acquire(blocking=False):
            self.calls.start(partial(_close_failed, environment))  # may hang, as the call before

    def reset(
        self, prompts: PromptBatch, episodes: list[Episode], sampling: Sampling, seed: int
    ) -> None:
        """Begin all episodes; their prompts get the first observations."""
        calls = [
            self.begin(episode, environment_seed(seed, group))
            for episode, group in zip(episodes, prompts.group.tolist(), strict=True)
        ]
        for episode, result in zip(episodes, self.calls(calls), strict=True):
            self.began(episode, result, sampling)

    def begin(self, episode: Episode, seed: int) -> Callable[[], Any]:
        """The call that resets the environment, which is made if there is none."""

        def call() -> Any:
            if episode.environment is None:
                name = self._name(episode.options)
                make = self._make[name] if isinstance(self._make, Mapping) else self._make
                episode.environment = make()
            return episode.environment.reset(seed=seed, options=episode.options)

        return call

    def began(self, episode: Episode, result: Any, sampling: Sampling) -> None:
        """Add the first observation to the prompt."""
        with _Failing(self, episode, "reset"):
            observation, info = read_reset(_checked(result))
            environment = episode.environment

            def render(observation: Observation) -> list[int]:
                return self._tokens.prompt(
                    episode.prompt,
                    episode.prompt_ids,
                    observation,
                    tools=getattr(environment, "tools", None),
                    separator=getattr(environment, "separator", "\n\n"),
                )

            ids, most = render(observation), self.turns.most_of_prompt(sampling)
            if most is not None and len(ids) > most:
                cut = self._tokens.shorten(observation, render, most)
                episode.shortened = int(cut is not None)
                ids = ids if cut is None else cut[0]
            context = self.turns.context
            if context is not None and len(ids) + self.turns.reserve >= context:
                raise RolloutError(
                    f"the prompt with its first observation has {len(ids)} tokens, which leaves no"
                    f" room for a turn in the context of {context} tokens"
                )
            episode.prompt_ids = ids
            episode.measure(info)

    def step(
        self, live: list[Episode], responses: Sequence[Response], *, sampling: Sampling, last: bool
    ) -> None:
        """Give each episode's turn to its environment, and append the answers.

        Args:
            live: the running episodes.
            responses: their turns.
            sampling: with the tokens that an episode may have.
            last: whether no further turn may follow.
        """
        calls = [partial(e.environment.step, r) for e, r in zip(live, responses, strict=True)]
        for episode, response, result in zip(live, responses, self.calls(calls), strict=True):
            self.stepped(episode, response, result, sampling=sampling, last=last)
        cut_off = [e for e in live if self.final_reward(e) is not None]
        calls = [e.environment.final_reward for e in cut_off]
        for episode, result in zip(cut_off, self.calls(calls), strict=True):
            self.add_final_reward(episode, result)

    def stepped(
        self, episode: Episode, response: Response, result: Any, *, sampling: Sampling, last: bool
    ) -> None:
        """Append the answer to a turn, or end the episode; see ``step``."""

        def render(observation: Observation) -> list[int]:
            return self._tokens.between(
                episode.prompt, observation, last=response.ids[-1], stopped=response.terminated
            )

        with _Failing(self, episode, "step"):
            observation, reward, terminated, truncated, info = read_step(_checked(result))
            episode.reward(reward)
            episode.measure(info)
            ids = None
            if not (terminated or truncated or last):
                ids = render(observation)
                most = self.turns.most(episode, sampling, len(ids))
                if len(ids) > most:
                    fits = len(ids) < self.turns.room(episode, sampling)
                    cut = self._tokens.shorten(observation, render, most)
                    episode.shortened += cut is not None
                    ids, observation = cut or (ids if fits else None, observation)
            if ids is not None:
                episode.add_observation(ids)
                episode.observations.append(as_messages(observation))
                return
            episode.end(terminated=terminated, cut_off=not (terminated or truncated))
            if (
                self.turns.keeps_last
                and not terminated
                and (episode.cut_off or observation is not None)
            ):
                ids, most = render(observation), self.turns.most_after(episode, sampling)
                if len(ids) > most:
                    ids, _ = self._tokens.shorten(observation, render, most) or ([], None)
                episode.add_observation(ids)

    def final_reward(self, episode: Episode) -> Callable[[], Any] | None:
        """The call for the final reward of an episode that a limit of this engine ended."""
        return getattr(episode.environment, "final_reward", None) if episode.cut_off else None

    def add_final_reward(self, episode: Episode, result: Any) -> None:
        """Add the result of ``final_reward``."""
        with _Failing(self, episode, "final_reward"):
            episode.reward(read_reward(_checked(result)))

    def close(self) -> None:
        """Close the idle environments."""
        with self._lock:
            self._closed = True
            idle = [x for environments in self._idle.values() for x in environments]
            self._idle.clear()
        for environment in idle:
            if hasattr(environment, "close"):
                environment.close()

    def failed(self, episode: Episode, method: str, error: Exception) -> None:
        """End an episode whose environment failed.

        Raises:
            ConfigError: the environment does, since it cannot work with its options.
            RolloutError: ``on_env_error`` is "raise".
        """
        made = episode.environment
        episode.error = f"{type(error).__name__}: {error}"
        if isinstance(error, ConfigError):
            raise error
        if made is None:
            what = f"making the environment of row {episode.row} failed"
        else:
            what = f"{type(made).__name__}.{method} failed in turn {episode.turns} of row"
            what += f" {episode.row}"
        if self._on_error == "raise":
            fix = (
                ""
                if made is None
                else (", or set on_env_error='drop' or 'score' to train without such episodes")
            )
            raise RolloutError(f"{what}: {episode.error}; fix the environment{fix}") from error
        logger.warning("%s: %s", what, episode.error)
        # What is scored counts as an end, not as cut off: the policy learns from the penalty.
        episode.end(terminated=self._on_error == "score")
        if self._on_error == "drop":
            episode.dropped = True
        else:
            episode.reward(self._error_score)


class _Failing:
    """Context in which an exception ends the episode."""

    def __init__(self, pool: EnvironmentPool, episode: Episode, method: str) -> None:
        self._pool, self._episode, self._method = pool, episode, method

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self._pool.failed(self._episode, self._method, error)
        return True


def _checked(result: Any) -> Any:
    """The result of a call; raises the exception of a failed one."""
    if isinstance(result, Exception):
        raise result
    if isinstance(result, BaseException):  # SystemExit in a thread of an environment
        raise RolloutError(f"{type(result).__name__}: {result}") from result
    return result


def _close_failed(environment: Any) -> None:
    with contextlib.suppress(Exception):
        environment.close()
