"""The limits of turns, and their seeds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kedge.environments.episode import Episode
from kedge.errors import ConfigError
from kedge.types import Sampling

_RESERVE = 64  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Limits of the turns of an episode; see ``EnvironmentRollouts``."""

    max_turns: int | None
    max_turn_tokens: int | None
    max_seconds: float | None
    context: int | None = None  # tokens of prompt and episode that the models have room for
    keeps_last: bool = False  # the observation after the last turn of a truncated episode

    def __post_init__(self) -> None:
        limits = {"max_turns": self.max_turns, "max_turn_tokens": self.max_turn_tokens}
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @property
    def reserve(self) -> int:
        """Places of the context that are left for the observation after the last turn."""
        return min(_RESERVE, (self.context or 0) // 8) if self.keeps_last else 0

    def room(self, episode: Episode) -> int:
        """Tokens that the episode may still have."""
        left = episode.sampling.max_new_tokens - len(episode.ids)
        if self.context is None:
            return left
        return min(left, self.context - self.reserve - len(episode.history))

    def turn(self, episode: Episode) -> int:
        """Tokens that the next turn may have."""
        left = self.room(episode)
        return min(left, self.max_turn_tokens or left)

    def first_prompt(self, sampling: Sampling) -> int | None:
        """Tokens that a prompt may have with its first observation; None: any number."""
        if self.context is None:
            return None
        turn = self.max_turn_tokens or sampling.max_new_tokens
        return self.context - self.reserve - min(turn, self.context // 2)

    def observation(self, episode: Episode, length: int) -> int:
        """Tokens that an observation of ``length`` tokens may have; 0: none, the episode ends.

        It is cut if it leaves less than the longest turn so far, and half of the room, or
        ``max_turn_tokens``, is not less.
        """
        room = self.room(episode)
        spare = min(self.max_turn_tokens or room, room // 2)
        if room - length < episode.longest <= spare:
            return room - spare
        return length if length < room else 0

    def last_observation(self, episode: Episode) -> int:
        """Tokens that the observation after the last turn of a truncated episode may have."""
        room = max(self.room(episode), episode.sampling.max_new_tokens // 4)
        return room if self.context is None else min(room, self.context - len(episode.history))

    def reached(self, episode: Episode) -> str:
        """The limit that an episode has reached: of its turns, or of its environment's seconds."""
        if self.max_seconds is not None and episode.seconds > self.max_seconds:
            return "time_limit"
        return "turn_limit" if episode.turns == self.max_turns else ""


def check_turn_tokens(sampling: Sampling, most: int | None) -> None:
    """Check that the first turn may be as long as it must be.

    Raises:
        ConfigError: ``min_new_tokens`` is above ``max_turn_tokens``.
    """
    if most is not None and sampling.min_new_tokens > most:
        raise ConfigError(
            f"min_new_tokens={sampling.min_new_tokens} must be at most max_turn_tokens={most}: no"
            " turn may end before min_new_tokens"
        )


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn; the first has that of the episode."""
    return seed if turn == 0 else derive_seed(f"{seed}/turn/{turn}")


def environment_seed(seed: int, group: int) -> int:
    """The seed of the environments of a group, whose episodes are compared with each other."""
    return derive_seed(f"{seed}/environment/{group}") >> 31  # 32 bits, which every generator takes


def derive_seed(text: str) -> int:
    """A seed in [0, 2^63) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
