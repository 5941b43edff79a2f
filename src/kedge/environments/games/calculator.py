"""Chained sums with a calculator that does one operation at a time.

task    Compute 17 + 25 - 8.
policy  calc 17 + 25
task    42
policy  calc 42 - 8
task    34
policy  answer 34           reward 1, the end
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

RULES = (
    "You have a calculator for one operation at a time: write calc 17 + 25 to use it."
    " When you know the result, write answer 42."
)
USAGE = "Write calc and one operation, like calc 17 + 25, or answer and a number, like answer 42."
OPERATION = re.compile(r"\s*(-?\d{1,18})\s*([+-])\s*(-?\d{1,18})\s*")
COMMAND = re.compile(r"\s*(calc|answer)\b(.*)", re.DOTALL | re.IGNORECASE)


def calculate(expression: str) -> str:
    """Add or subtract two whole numbers.

    Args:
        expression: One operation, for example "17 + 25" or "42 - 8".

    Returns:
        The result.
    """
    operation = OPERATION.fullmatch(expression)
    if operation is None:
        raise ValueError(f"{expression.strip()!r} is not one operation like 17 + 25")
    left, sign, right = operation.groups()
    return str(int(left) + int(sign + "1") * int(right))


class Calculator:
    """A sum of several terms; the policy answers it with the help of a calculator.

    The reward is 1 for a correct answer and 0 for a wrong one, which both end the episode.

    Args:
        terms: the fewest and the most terms of a sum.
        largest: terms are drawn from 1 to this.
        rules: whether the first observation explains the commands.
    """

    def __init__(
        self, *, terms: tuple[int, int] = (2, 5), largest: int = 99, rules: bool = True
    ) -> None:
        if not 2 <= terms[0] <= terms[1]:
            raise ValueError(f"terms must be (fewest, most) with 2 <= fewest <= most, got {terms}")
        self.terms, self.largest, self.rules = tuple(terms), largest, rules
        self.result = 0

    def reset(
        self, *, seed: int, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The sum of this seed."""
        rng = random.Random(f"calculator {seed}")
        terms = [rng.randint(1, self.largest) for _ in range(rng.randint(*self.terms))]
        signs = [1, *(rng.choice((1, -1)) for _ in terms[1:])]
        self.result = sum(sign * term for sign, term in zip(signs, terms, strict=True))
        text = str(terms[0])
        for sign, term in zip(signs[1:], terms[1:], strict=True):
            text += f" {'+' if sign > 0 else '-'} {term}"
        task = f"Compute {text}."
        return f"{RULES}\n{task}" if self.rules else task, {}

    def step(self, response: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Use the calculator, or answer."""
        command = COMMAND.fullmatch(str(getattr(response, "text", response)))
        verb, rest = (command[1].lower(), command[2].strip()) if command else ("", "")
        observation, legal = USAGE, False
        if verb == "calc":
            try:
                observation, legal = calculate(rest), True
            except ValueError as error:
                observation = f"{error}. {USAGE}"
        elif verb == "answer" and re.fullmatch(r"-?\d{1,18}", rest):
            correct = int(rest) == self.result
            words = "Correct." if correct else f"Wrong: it is {self.result}."
            return words, float(correct), True, False, {"metrics": {"success": float(correct)}}
        return observation, 0.0, False, False, {"metrics": {"illegal": float(not legal)}}

    def random_action(self, rng: random.Random) -> str:
        """An arbitrary command."""
        left, right = rng.randint(1, self.largest), rng.randint(1, self.largest)
        return rng.choice((f"calc {left} + {right}", f"calc {left} - {right}", f"answer {left}"))

    @staticmethod
    def expert(messages: Sequence[Mapping[str, str]]) -> str:
        """The best next command, from the conversation alone.

        Args:
            messages: with role and content; observations are the user's.
        """
        terms = re.findall(r"[+-]|\d+", messages[0]["content"].rpartition("Compute")[2])
        total = terms.pop(0)
        for command, result in zip(messages[1::2], messages[2::2], strict=True):
            expected = f"calc {total} {terms[0]} {terms[1]}" if terms else None
            if command["content"] == expected:
                total, terms = result["content"], terms[2:]
        return f"calc {total} {terms[0]} {terms[1]}" if terms else f"answer {total}"
