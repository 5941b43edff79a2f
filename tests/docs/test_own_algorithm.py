"""The algorithm on the docs page trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.e2e.small import length_reward, rows, small

PAGE = Path(__file__).parents[2] / "docs" / "own-algorithm.md"


def test_it_trains() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    trainer = small(
        algorithm=names["reinforce"](),
        num_generations=4,
        per_device_train_batch_size=16,
        total_episodes=16 * 12,
        reward_model=None,
        reward_funcs=length_reward,
        learning_rate=1e-2,
        kl_coef=0.01,
    )
    trainer.train()
    assert trainer.value_model is None
    first, last = rows(trainer)[:2], rows(trainer)[-2:]
    gain = sum(r["objective/scores"] for r in last) - sum(r["objective/scores"] for r in first)
    assert gain > 0.5
