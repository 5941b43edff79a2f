"""Two games whose shortest solution has a given number of moves.

In both the reward is 1 at the end of an episode that succeeds, and 0 otherwise; an episode may
take half as many turns again as its shortest solution.  ``Gates`` asks for the same choice of one
key out of eight in every turn.  ``Lake`` is the walk of FrozenLake that does not slip: a step into
a hole ends it, and the policy sees only the four squares around it and the way to the goal.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

COLORS = ("red", "blue", "green", "white", "black", "pink", "gray", "gold")
KEYS = ("circle", "square", "star", "moon", "sun", "tree", "house", "boat")
WAYS = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
HOLES = 0.1  # share of the squares

Step = tuple[str | None, float, bool, bool, dict[str, Any]]


def turns(length: int) -> int:
    """The most turns that an episode may take."""
    return length + (length + 1) // 2


class Game:
    """What both games share: the end of an episode and its reward."""

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(
        self, *, seed: int, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The game of this seed."""
        self.turn = 0
        self.begin(random.Random(f"{type(self).__name__} {self.length} {seed}"))
        return self.observe(), {}

    def step(self, response: Any) -> Step:
        """Play one action."""
        self.turn += 1
        won, lost = self.play(str(getattr(response, "text", response)).strip())
        over = won or lost or self.turn == turns(self.length)
        info = {"metrics": {"success": float(won)}} if over else {}
        return None if over else self.observe(), float(won), over, False, info

    def begin(self, rng: random.Random) -> None:
        """Draw a game."""
        raise NotImplementedError

    def observe(self) -> str:
        """What the policy reads before its next action."""
        raise NotImplementedError

    def play(self, action: str) -> tuple[bool, bool]:
        """Whether this action wins, and whether it loses."""
        raise NotImplementedError


class Gates(Game):
    """Gates in a row; each shows a color, and one of eight keys opens it."""

    def begin(self, rng: random.Random) -> None:
        self.gates = [rng.choice(COLORS) for _ in range(self.length)]
        self.opened = 0

    def observe(self) -> str:
        return f"gate {self.gates[self.opened]}"

    def play(self, action: str) -> tuple[bool, bool]:
        self.opened += action == f"press {KEYS[COLORS.index(self.gates[self.opened])]}"
        return self.opened == self.length, False

    def random_action(self, rng: random.Random) -> str:
        """An arbitrary key."""
        return f"press {rng.choice(KEYS)}"

    @staticmethod
    def expert(messages: Sequence[Mapping[str, str]]) -> str:
        """The right key, from the last observation."""
        return f"press {KEYS[COLORS.index(messages[-1]['content'].removeprefix('gate '))]}"


class Lake(Game):
    """A walk over ice with holes, to a goal whose direction is known."""

    def begin(self, rng: random.Random) -> None:
        while True:
            east = rng.randint(0, self.length)
            x, y = rng.choice((-1, 1)) * east, rng.choice((-1, 1)) * (self.length - east)
            self.place, self.goal = (0, 0), (x, y)
            size = self.length + 2
            squares = [(a, b) for a in range(-size, size + 1) for b in range(-size, size + 1)]
            self.holes = {s for s in squares if rng.random() < HOLES} - {self.place, self.goal}
            if self.distance() == self.length:
                return

    def distance(self) -> int | None:
        """Moves of the shortest way to the goal that goes around the holes, up to ``length``."""
        edge, seen = {self.place}, {self.place}
        for moves in range(self.length + 1):
            if self.goal in edge:
                return moves
            near = {(x + a, y + b) for x, y in edge for a, b in WAYS.values()}
            edge = near - seen - self.holes
            seen |= edge
        return None

    def observe(self) -> str:
        holes = "".join(f"hole {way} " for way in WAYS if self.next_to(way) in self.holes)
        x, y = (g - p for g, p in zip(self.goal, self.place, strict=True))
        aims = [f"{abs(x)} {'east' if x > 0 else 'west'}"] * bool(x)
        aims += [f"{abs(y)} {'north' if y > 0 else 'south'}"] * bool(y)
        return f"{holes}goal {' '.join(aims)}"

    def next_to(self, way: str) -> tuple[int, int]:
        """The square one step away."""
        return self.place[0] + WAYS[way][0], self.place[1] + WAYS[way][1]

    def play(self, action: str) -> tuple[bool, bool]:
        way = action.removeprefix("go ")
        if way in WAYS and action.startswith("go "):
            self.place = self.next_to(way)
        return self.place == self.goal, self.place in self.holes

    def random_action(self, rng: random.Random) -> str:
        """A step in an arbitrary direction."""
        return f"go {rng.choice(list(WAYS))}"

    @staticmethod
    def expert(messages: Sequence[Mapping[str, str]]) -> str:
        """Toward the goal where there is ice, else aside; it does not remember where it was."""
        holes, _, aims = messages[-1]["content"].partition("goal ")
        free = [way for way in WAYS if way not in holes]
        wanted = re.findall(r"[a-z]+", aims)
        return f"go {next((way for way in [*wanted, *free] if way in free), 'north')}"


GAMES: dict[str, type[Game]] = {"gates": Gates, "lake": Lake}
