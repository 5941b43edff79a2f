"""What the policy's turns are: their limits, their seeds, and how environments get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.environments.episode import Episode
from kedge.environments.pool import derive_seed
from kedge.errors import ConfigError
from kedge.types import Response, Sampling, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Limits of turns, and their text; see ``EnvironmentRollouts``."""

    tokenizer: Any
    parse: Callable[[str], Sequence[ToolCall]] | None
    max_turns: int | None
    max_turn_tokens: int | None
    max_seconds: float | None

    def __post_init__(self) -> None:
        limits = {"max_turns": self.max_turns, "max_turn_tokens": self.max_turn_tokens}
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    def limit(self, episode: Episode, sampling: Sampling) -> int:
        """Tokens that the next turn may have."""
        left = sampling.max_new_tokens - len(episode.ids)
        return min(left, self.max_turn_tokens or left)

    def late(self, seconds: float) -> bool:
        """Whether an episode whose environment has worked for so long must end."""
        return self.max_seconds is not None and seconds > self.max_seconds

    def response(self, ids: list[int], terminated: bool, sampling: Sampling) -> Response:
        """A turn as an environment gets it."""
        if self.tokenizer is None:
            return Response("", ids=tuple(ids), terminated=terminated)
        body = ids[:-1] if ids and ids[-1] in sampling.stop_ids else ids
        decode = self.tokenizer.decode
        return Response(
            decode(body, skip_special_tokens=True),
            ids=tuple(ids),
            terminated=terminated,
            raw=decode(body),
            parse=self.parse,
        )


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn; the first has that of the episode."""
    return seed if turn == 0 else derive_seed(f"{seed}/turn/{turn}")
