"""An evaluation while the sampler works ahead: it waits, and is of the newest weights."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy
from tests.e2e.small import PROMPTS, VOCAB, small


class Watched(EmbeddedEngine):
    """A slow engine that one thread at a time may use."""

    def __init__(self) -> None:
        super().__init__(tiny_policy("gpt_neox", vocab_size=VOCAB), pad_id=0, shares_weights=False)
        self._busy = threading.Lock()
        self.evaluated: list[int] = []

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        assert self._busy.acquire(blocking=False), "two threads sample at the same time"
        try:
            time.sleep(0.03)
            found = super().generate(*args, **kwargs)
        finally:
            self._busy.release()
        if kwargs["sampling"].temperature < 0.1:
            self.evaluated.append(int(found.version[0]))
        return found

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        assert self._busy.acquire(blocking=False), "weights are loaded while another thread samples"
        try:
            return super().load_weights(*args, **kwargs)
        finally:
            self._busy.release()


@pytest.mark.parametrize("schedule", ["in_order", "as_completed"])
def test_an_evaluation_is_of_the_newest_weights(schedule: str) -> None:
    engine = Watched()
    made = small(
        rollout_engine=engine,
        max_lag=1,
        rollout_schedule=schedule,
        total_episodes=20,
        eval_dataset=PROMPTS[:4],
        eval_strategy="steps",
        eval_steps=1,
    )
    made.train()
    assert engine.evaluated == [1, 2, 3, 4, 5]
