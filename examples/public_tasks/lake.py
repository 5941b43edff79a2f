"""FrozenLake as RAGEN plays it: a slippery 4 x 4 map, many moves a turn, ten an episode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

SIZE, MOST_MOVES, MOVES_A_TURN, FORMAT_PENALTY = 4, 10, 5, -0.1
MOVES = ("Left", "Down", "Right", "Up")  # gymnasium's actions 0 to 3
RULES = (
    "You are on a frozen lake. P is you, _ is ice, O is a hole, G is the goal. Reach the goal and"
    " stay out of the holes. The ice is slippery: you may slide to the side of where you want to"
    f" go. Answer with at most {MOVES_A_TURN} moves (Left, Down, Right, Up), for example:"
    " <think>The goal is below me.</think><answer>Down || Down</answer>\n"
)


class FrozenLake:
    """The map of a seed; reward 1 at the goal, and -0.1 for each turn without a readable answer."""

    def reset(
        self, *, seed: int, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw the map."""
        self.map = generate_random_map(size=SIZE, p=0.8, seed=seed)
        self.lake = gymnasium.make("FrozenLake-v1", desc=self.map, is_slippery=True)
        self.place, _ = self.lake.reset(seed=seed)
        self.moves = 0
        return RULES + self.draw(), {}

    def draw(self) -> str:
        """The map with the player on it."""
        cells = list("".join(self.map).replace("S", "_").replace("F", "_").replace("H", "O"))
        cells[self.place] = "P"
        return "\n".join("".join(cells[i : i + SIZE]) for i in range(0, SIZE * SIZE, SIZE))

    def step(self, response: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make the moves of an answer, until one ends the episode."""
        found = re.findall(r"<answer>(.*?)</answer>", response.text, re.DOTALL)
        names = [name.strip().capitalize() for name in found[-1].split("||")] if found else []
        if not names or len(names) > MOVES_A_TURN or not set(names) <= set(MOVES):
            words = f"No readable answer. Answer as in the example.\n{self.draw()}"
            return words, FORMAT_PENALTY, False, False, {"metrics": {"illegal": 1.0}}
        for name in names:
            place, reward, over, _, _ = self.lake.step(MOVES.index(name))
            self.place, self.moves = int(place), self.moves + 1
            if over:
                return "", float(reward), True, False, {"metrics": {"success": float(reward)}}
            if self.moves == MOST_MOVES:
                return "", 0.0, False, True, {"metrics": {"success": 0.0}}
        return self.draw(), 0.0, False, False, {}

    def close(self) -> None:
        """Close gymnasium's environment."""
        self.lake.close()
