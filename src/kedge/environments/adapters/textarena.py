"""Games of TextArena, alone or against scripted opponents."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kedge.environments.adapters.packages import import_package
from kedge.errors import ConfigError
from kedge.protocols import Step
from kedge.types import Response

Player = Callable[[str], str]  # text since the player's last move -> the player's move

# TextArena draws from Python's global generator. Each game keeps its own state of it, so that
# an episode depends on its seed alone, whatever runs at the same time.
_LOCK = threading.Lock()


class TextArena:
    """A game of TextArena; the reward is the player's at the end.

    Observations are what the game and other players said since the player's last move.

    Args:
        game: a registered id, for example "GuessTheNumber-v0".  Its "-raw" version is played, whose
            observations do not repeat the history.
        opponents: the other players, in order, each a function of the text that it reads.
        player: seat of the policy, from 0.  None: by seed.
        **options: of ``textarena.make``.

    Raises:
        ConfigError: TextArena is not installed, or there is no such seat.
    """

    def __init__(
        self, game: str, *, opponents: Sequence[Player] = (), player: int | None = 0, **options: Any
    ) -> None:
        textarena = import_package("textarena", "textarena")
        self._action_kind = textarena.ObservationType.PLAYER_ACTION
        raw = game if game.endswith("-raw") else f"{game}-raw"
        self._make = lambda: textarena.make(raw, **options)
        self._opponents, self._fixed_player = list(opponents), player
        self._seats = len(self._opponents) + 1
        if player is not None and not 0 <= player < self._seats:
            raise ConfigError(
                f"player must be from 0 to {self._seats - 1} in a game of {self._seats} players,"
                f" got {player}"
            )
        self._game: Any = None
        self._player = 0
        self._last = ""  # the policy's last move
        self._random: Any = None

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Begin a game; opponents may move first."""
        self._player = seed % self._seats if self._fixed_player is None else self._fixed_player
        self._last = ""
        self._random = random.Random(seed).getstate()
        self._with_random(self._begin, seed)
        observation, _ = self._with_random(self._until_policy, False)
        return observation, {}

    def step(self, response: Response) -> Step:
        """Make a move, and those of the opponents until it is the policy's turn again."""
        self._last = response.text
        done = self._with_random(self._move, response.text)
        observation, done = self._with_random(self._until_policy, done)
        if not done:
            return observation, 0.0, False, False, {}
        rewards, infos = self._game.close()
        invalid = infos[self._player]["invalid_move"]
        reward = float((rewards or {}).get(self._player, 0.0))
        return observation, reward, True, False, {"metrics": {"illegal": float(invalid)}}

    def _begin(self, seed: int) -> None:
        self._game = self._make()
        self._game.reset(num_players=self._seats, seed=seed)

    def _move(self, text: str) -> bool:
        done, _ = self._game.step(text)
        return bool(done)

    def _until_policy(self, done: bool) -> tuple[str, bool]:
        """Let opponents move until the policy is next; what it reads, and if the game ended."""
        while not done:
            seat, messages = self._game.get_observation()
            if seat == self._player:
                return self._text(messages, seat), False
            others = [i for i in range(self._seats) if i != self._player]
            opponent = self._opponents[others.index(seat)]
            done = self._move(opponent(self._text(messages, seat)))
        return self._text(self._game.state.observations[self._player], self._player), True

    def _text(self, messages: Sequence[tuple[int, str, Any]], seat: int) -> str:
        """Messages in words, without the repetition of what the player did."""
        lines = []
        for sender, message, kind in messages:
            if kind == self._action_kind and (sender == seat or message == self._last):
                continue
            lines.append(message if sender < 0 else f"[Player {sender}] {message}")
        return "\n".join(lines)

    def _with_random(self, call: Callable[..., Any], *arguments: Any) -> Any:
        with _LOCK:
            outside = random.getstate()
            random.setstate(self._random)
            try:
                return call(*arguments)
            finally:
                self._random = random.getstate()
                random.setstate(outside)
