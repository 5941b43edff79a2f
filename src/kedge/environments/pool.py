"""Environments that are kept for later episodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from kedge.environments.calls import Calls
from kedge.environments.episode import Episode
from kedge.errors import ConfigError, RolloutError
from kedge.protocols import Environment

MakeEnvironment = Callable[[], Environment]
OnError = Literal["raise", "drop", "score"]
_MOST_FAILED = 0.9  # of the latest episodes, with "drop"
_LATEST = 16  # episodes, or two batches


class EnvironmentPool:
    """Environments, one for each running episode; several engines may share them.

    Args:
        make: makes an environment, or a mapping of names chosen by the column ``environment``.
        calls: runs methods at the same time.
        on_error: see ``EnvironmentRollouts``.
    """

    def __init__(
        self,
        make: MakeEnvironment | Mapping[str, MakeEnvironment],
        calls: Calls,
        *,
        on_error: OnError,
    ) -> None:
        if on_error not in ("raise", "drop", "score"):
            raise ConfigError(f"on_env_error must be 'raise', 'drop' or 'score', got {on_error!r}")
        self.calls, self._make, self.on_error = calls, make, on_error
        self._idle: dict[object, list[Any]] = {}  # environments without an episode, by name
        self._lock = threading.Lock()
        self._closed = False
        self._errors: list[str] = []  # of the latest episodes; empty: it did not fail

    def check_errors(self, rows: int) -> None:
        """Check that environments work, before a batch of ``rows`` begins.

        Raises:
            RolloutError: with ``on_error="drop"``, 90% or more of the latest episodes failed.
        """
        count = max(_LATEST, 2 * rows)
        with self._lock:
            latest = self._errors = self._errors[-count:]
        failed = [error for error in latest if error]
        if self.on_error == "drop" and len(failed) >= _MOST_FAILED * count:
            raise RolloutError(
                f"{len(failed)} of the latest {count} episodes failed, the last with {failed[-1]};"
                f" on_env_error='drop' is for failures of less than {_MOST_FAILED:.0%}: fix the"
                " environment, and resume"
            )

    def _name(self, episode: Episode) -> Any:
        """Which of several environments the row asks for."""
        if not isinstance(self._make, Mapping):
            return None
        name = episode.options.get("environment")
        if name not in self._make:
            raise RolloutError(
                f"the column 'environment' must name one of {', '.join(self._make)}, got {name!r}"
            )
        return name

    def reset(self, episode: Episode, seed: int) -> Callable[[], Any]:
        """The call that resets the episode's environment: an idle one, or one that it makes."""
        name = self._name(episode)
        with self._lock:
            if idle := self._idle.get(name):
                episode.environment = idle.pop()

        def call() -> Any:
            if episode.environment is None:
                make = self._make[name] if isinstance(self._make, Mapping) else self._make
                episode.environment = make()
            return episode.environment.reset(seed=seed, options=episode.options)

        return call

    def release(self, episode: Episode) -> None:
        """Keep the environment for later episodes, or close it if it failed."""
        environment, episode.environment = episode.environment, None
        with self._lock:
            if episode.done:
                self._errors.append(episode.error)
            if environment is None:
                return
            if not (episode.error or self._closed):
                self._idle.setdefault(self._name(episode), []).append(environment)
                return
        if hasattr(environment, "close") and self.calls.room.acquire(blocking=False):
            self.calls.start(environment.close)  # may hang, as the call before; errors are dropped

    def close(self) -> None:
        """Close the idle environments."""
        with self._lock:
            self._closed = True
            idle = [x for environments in self._idle.values() for x in environments]
            self._idle.clear()
        for environment in idle:
            if hasattr(environment, "close"):
                environment.close()
