"""The algorithm, the callback and the rollout engine of the docs page work in a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy
from tests.e2e.small import VOCAB, length_reward, rows, small
from tests.unit.text_toys import EOS

PAGE = Path(__file__).parents[2] / "docs" / "own-algorithm.md"


def examples() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(code, names)
    return names


def test_the_callback_and_the_engine() -> None:
    names = examples()
    policy = tiny_policy("gpt_neox", vocab_size=VOCAB, eos_token_id=EOS)
    engine = names["Counted"](EmbeddedEngine(policy, pad_id=EOS))
    stop = names["StopAtKL"](limit=-1.0)
    trainer = small(model=policy, rollout_engine=engine, callbacks=[stop], total_episodes=16)
    trainer.train()
    (row,) = rows(trainer)  # of four
    assert engine.tokens == row["completions/mean_length"] * 4


def test_it_trains() -> None:
    names = examples()
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
