"""The environments of running episodes: made, reset, stepped side by side, and kept for reuse."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from kedge.environments.calls import Calls
from kedge.environments.episode import Episode, read_reset, read_reward, read_step
from kedge.environments.turn_tokens import TurnTokens, as_messages
from kedge.errors import ConfigError, RolloutError
from kedge.protocols import Environment
from kedge.types import PromptBatch, Response

logger = logging.getLogger(__name__)

MakeEnvironment = Callable[[], Environment]
OnError = Literal["raise", "drop", "score"]


class EnvironmentPool:
    """Environments, one per episode.

    Args:
        make: makes an environment, or a mapping of names chosen by the column ``environment``.
        calls: runs methods at the same time.
        tokens: renders observations.
        on_error: see ``EnvironmentRollouts``.
        error_score: reward of the last turn of an episode whose environment failed.
    """

    def __init__(
        self,
        make: MakeEnvironment | Mapping[str, MakeEnvironment],
        calls: Calls,
        tokens: TurnTokens,
        *,
        on_error: OnError,
        error_score: float,
    ) -> None:
        if on_error not in ("raise", "drop", "score"):
            raise ConfigError(f"on_env_error must be 'raise', 'drop' or 'score', got {on_error!r}")
        self.calls, self._make, self._tokens = calls, make, tokens
        self._on_error, self._error_score = on_error, error_score
        self._idle: dict[object, list[Any]] = {}  # environments without an episode
        self._lock = threading.Lock()  # of these: several engines share them
        self._closed = False

    def episodes(self, prompts: PromptBatch) -> list[Episode]:
        """New episodes, with idle environments as far as there are."""
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
        if environment is None:
            return
        with self._lock:
            if not (episode.error or self._closed):
                self._idle.setdefault(self._name(episode.options), []).append(environment)
                return
        if hasattr(environment, "close"):  # it may hang, as the call before
            threading.Thread(target=_close_failed, args=(environment,), daemon=True).start()

    def reset(self, prompts: PromptBatch, episodes: list[Episode], seed: int) -> None:
        """Begin all episodes; their prompts get the first observations."""
        calls = [
            self.begin(episode, environment_seed(seed, group))
            for episode, group in zip(episodes, prompts.group.tolist(), strict=True)
        ]
        for episode, result in zip(episodes, self.calls(calls), strict=True):
            self.began(episode, result)

    def begin(self, episode: Episode, seed: int) -> Callable[[], Any]:
        """The call that resets the environment, which is made if there is none."""

        def call() -> Any:
            if episode.environment is None:
                name = self._name(episode.options)
                make = self._make[name] if isinstance(self._make, Mapping) else self._make
                episode.environment = make()
            return episode.environment.reset(seed=seed, options=episode.options)

        return call

    def began(self, episode: Episode, result: Any) -> None:
        """Add the first observation to the prompt."""
        with _Failing(self, episode, "reset"):
            observation, info = read_reset(_checked(result))
            environment = episode.environment
            episode.prompt_ids = self._tokens.prompt(
                episode.prompt,
                episode.prompt_ids,
                observation,
                tools=getattr(environment, "tools", None),
                separator=getattr(environment, "separator", "\n\n"),
            )
            episode.measure(info)

    def step(
        self, live: list[Episode], responses: Sequence[Response], *, room: int, last: bool
    ) -> None:
        """Give each episode's turn to its environment, and append the answers.

        Args:
            live: the running episodes.
            responses: their turns.
            room: tokens that an episode may have.
            last: whether no further turn may follow.
        """
        calls = [partial(e.environment.step, r) for e, r in zip(live, responses, strict=True)]
        for episode, response, result in zip(live, responses, self.calls(calls), strict=True):
            self.stepped(episode, response, result, room=room, last=last)
        cut_off = [e for e in live if self.final_reward(e) is not None]
        calls = [e.environment.final_reward for e in cut_off]
        for episode, result in zip(cut_off, self.calls(calls), strict=True):
            self.add_final_reward(episode, result)

    def stepped(
        self, episode: Episode, response: Response, result: Any, *, room: int, last: bool
    ) -> None:
        """Append the answer to a turn, or end the episode; see ``step``."""
        with _Failing(self, episode, "step"):
            observation, reward, terminated, truncated, info = read_step(_checked(result))
            episode.reward(reward)
            episode.measure(info)
            if terminated or truncated:
                episode.end(terminated=terminated)
                return
            if last:
                episode.end(cut_off=True)
                return
            ids = self._tokens.between(
                episode.prompt, observation, last=response.ids[-1], stopped=response.terminated
            )
            if len(episode.ids) + len(ids) < room:
                episode.add_observation(ids)
                episode.observations.append(as_messages(observation))
            else:
                episode.end(cut_off=True)

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
            RolloutError: ``on_env_error`` is "raise".
        """
        made = episode.environment
        kind = "the environment" if made is None else type(made).__name__
        what = f"{kind}.{method} failed in turn {episode.turns} of row {episode.row}"
        episode.error = f"{type(error).__name__}: {error}"
        if self._on_error == "raise":
            raise RolloutError(
                f"{what}: {episode.error}; fix the environment, or set on_env_error='drop' or"
                " 'score' to train without such episodes"
            ) from error
        logger.warning("%s: %s", what, episode.error)
        episode.end()
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


def environment_seed(seed: int, group: int) -> int:
    """The seed of the environments of a group, whose episodes are compared with each other."""
    return derive_seed(f"{seed}/environment/{group}") >> 31  # 32 bits, which every generator takes


def derive_seed(text: str) -> int:
    """A seed in [0, 2^63) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
