"""Guess a number: after each guess the policy learns whether the number is higher or lower.

task    I think of a number from 1 to 64. You have 7 guesses.
policy  32
task    Higher.
policy  48
task    Correct.            reward 1, the end
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any


class GuessNumber:
    """A number to find by bisection.

    The reward is 1 when it is guessed and 0 when the guesses are used up.

    Args:
        highest: the number is drawn from 1 to this.
        guesses: None: as many as bisection needs at most.
    """

    def __init__(self, *, highest: int = 64, guesses: int | None = None) -> None:
        if highest < 1:
            raise ValueError(f"highest must be at least 1, got {highest}")
        self.highest = highest
        self.guesses = highest.bit_length() if guesses is None else guesses
        self.number, self.left = 0, 0

    def reset(
        self, *, seed: int, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The number of this seed."""
        self.number = random.Random(f"guess number {seed}").randint(1, self.highest)
        self.left = self.guesses
        return (
            f"I think of a number from 1 to {self.highest}. You have {self.guesses} guesses.",
            {},
        )

    def step(self, response: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a guess.  Anything but a number in the range uses up a guess, too."""
        text = str(getattr(response, "text", response)).strip()
        guess = int(text) if re.fullmatch(r"\d{1,18}", text) else 0
        self.left -= 1
        if guess == self.number:
            return "Correct.", 1.0, True, False, {"metrics": {"success": 1.0}}
        legal = 1 <= guess <= self.highest
        info = {"metrics": {"illegal": float(not legal)}}
        if self.left <= 0:
            return f"It was {self.number}.", 0.0, True, False, info
        words = "Higher." if self.number > guess else "Lower."
        if not legal:
            words = f"Guess one number from 1 to {self.highest}, and write nothing else."
        return words, 0.0, False, False, info

    def random_action(self, rng: random.Random) -> str:
        """An arbitrary guess."""
        return str(rng.randint(1, self.highest))

    @staticmethod
    def expert(messages: Sequence[Mapping[str, str]]) -> str:
        """The middle of the remaining range, from the conversation alone.

        Args:
            messages: with role and content; observations are the user's.
        """
        limits = re.search(r"from (\d+) to (\d+)", messages[0]["content"])
        if limits is None:
            raise ValueError(f"not a game of GuessNumber: {messages[0]['content']!r}")
        low, high = int(limits[1]), int(limits[2])
        for guess, answer in zip(messages[1::2], messages[2::2], strict=True):
            if answer["content"] == "Higher.":
                low = max(low, int(guess["content"]) + 1)
            elif answer["content"] == "Lower.":
                high = min(high, int(guess["content"]) - 1)
        return str((low + high) // 2)
