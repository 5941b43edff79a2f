"""Environments behind an OpenEnv server, through their clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kedge.environments.adapters.packages import import_package
from kedge.protocols import Observation, Step
from kedge.types import Response

_NOT_SHOWN = ("done", "reward", "metadata")


class OpenEnv:
    """An OpenEnv environment: one session on its server per instance.

    Args:
        client: the address of a server, or a client of the environment's package.
        make_action: response text -> the environment's action; a dictionary for an address.
        show: observation -> text, messages or token ids.  None: text as it is, else JSON.

    Raises:
        ConfigError: OpenEnv is not installed.
    """

    def __init__(
        self,
        client: Any,
        *,
        make_action: Callable[[str], Any],
        show: Callable[[Any], Observation] | None = None,
    ) -> None:
        if isinstance(client, str):
            client = import_package("openenv.core", "openenv").GenericEnvClient(base_url=client)
        # The client's connection is bound to one event loop; a synchronous client has its own.
        self.client = client.sync() if hasattr(client, "sync") else client
        self._make_action, self._show = make_action, show or format_observation

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Begin an episode with this seed."""
        return self._show(self.client.reset(seed=seed).observation), {}

    def step(self, response: Response) -> Step:
        """Send the response as an action."""
        result = self.client.step(self._make_action(response.text))
        observation = self._show(result.observation)
        return observation, float(result.reward or 0.0), bool(result.done), False, {}

    def close(self) -> None:
        """End the session."""
        self.client.close()


def format_observation(observation: Any) -> str:
    """The observation as text: a string as it is, else its fields as JSON."""
    if isinstance(observation, str):
        return observation
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump()
    elif hasattr(observation, "__dict__"):
        observation = vars(observation)
    if isinstance(observation, Mapping):
        observation = {k: v for k, v in observation.items() if k not in _NOT_SHOWN}
    return json.dumps(observation, default=str)
