"""Questions that need a calculator: an environment with a tool, and solved episodes for a start.

python examples/chat_model/sums.py --output runs/chat/data/sums.jsonl

``Sums`` is for ``kedge ppo --environment examples/chat_model/sums.py:Sums``.  The file has episodes
of an expert for ``kedge sft``, with the columns ``messages`` and ``tools``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.environments import Response, ToolEnvironment

WORDS = {"add": "plus", "subtract": "minus", "multiply": "times"}


def calculate(a: int, b: int, operation: str) -> int:
    """Compute with two numbers.

    Args:
        a: The first number.
        b: The second number.
        operation: add, subtract or multiply.
    """
    return {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]


def draw_question(seed: int) -> tuple[str, dict[str, Any]]:
    """A question, and the call that answers it."""
    rng = random.Random(f"sums {seed}")
    operation = rng.choice(list(WORDS))
    a, b = rng.randint(100, 999), rng.randint(11, 99)
    return f"What is {a} {WORDS[operation]} {b}?", {"a": a, "b": b, "operation": operation}


class Sums(ToolEnvironment):
    """One question per episode; reward 1 if the final answer has the result as its only number."""

    def __init__(self) -> None:
        super().__init__([calculate])

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        """Ask a question."""
        super().reset(seed=seed, options=options)
        question, call = draw_question(seed)
        self._result = str(calculate(**call))
        return question, {}

    def step(self, response: Response) -> Any:
        """Make calls, or read the answer."""
        if response.tool_calls:
            return super().step(response)
        right = float(re.findall(r"-?\d+", response.text) == [self._result])
        return None, right, True, False, {"metrics": {"success": right}}


def solve(seed: int) -> dict[str, Any]:
    """A solved episode."""
    question, call = draw_question(seed)
    result = str(calculate(**call))
    function = {"type": "function", "function": {"name": "calculate", "arguments": call}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "name": "calculate", "content": result},
        {"role": "assistant", "content": result},
    ]
    return {"messages": messages, "tools": Sums().tools}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/chat/data/sums.jsonl"))
    parser.add_argument("--episodes", type=int, default=8)
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps(solve(seed)) + "\n" for seed in range(args.episodes))
    args.output.write_text("".join(rows))


if __name__ == "__main__":
    main()
