"""Episodes whose turns vLLM samples: its log-probabilities agree with the learner's."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kedge import PPOConfig, PPOTrainer
from kedge.environments import NewContext
from kedge.ext.vllm import inprocess
from tests.contract.engines import needs_vllm
from tests.e2e.small import rows
from tests.environments.test_new_contexts import largest_gaps, record

pytestmark = needs_vllm
PROMPTS = ("Once upon a time", "Lily had a dog", "Tom and Sam went")
TEMPLATE = (  # turns begin with reasoning that is empty, and that earlier turns do not show
    "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<think></think>{% endif %}"
)


class MoreStory:
    """Rewards the letter e; says a word after each turn, or begins a new context after the second.

    Answers of longer stories take time, so that turns begin at different ones.
    """

    ended = 0  # episodes of all instances

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def reset(self, *, seed: int, options: Any) -> Any:
        self.turn, self.random = 0, random.Random(seed)
        return None, {}

    def step(self, response: Any) -> Any:
        self.turn += 1
        said: Any = " Then"
        if self.turns > 3:
            time.sleep(0.2 * self.random.random())
        if self.turns > 3 and self.turn == 2:
            said = NewContext([{"role": "user", "content": "Once there was" + response.text[-20:]}])
        MoreStory.ended += self.turn == self.turns
        return said, response.text.count("e") / 10, self.turn == self.turns, False, {}


def trainer(shared: Path, folder: Path, turns: int, engine: Any = None, **options: Any) -> Any:
    place = shared / "data" / "stories-head32"
    tokenizer = AutoTokenizer.from_pretrained(place, padding_side="left")
    tokenizer.chat_template = TEMPLATE
    return PPOTrainer(
        args=PPOConfig(
            output_dir=str(folder), num_ppo_epochs=1, stop_token="eos", credit="turn",
            num_sample_generations=0, logging_steps=1, save_strategy="no", temperature=1.0,
            total_episodes=32, rollout_engine="vllm" if engine is None else "embedded", **options,
        ),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(place),
        environment=lambda: MoreStory(turns),
        rollout_engine=engine,
        train_dataset=[{"prompt": [{"role": "user", "content": x}]} for x in PROMPTS],
    )  # fmt: skip


@pytest.fixture(scope="module")
def begun(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that has not trained, with an engine of its own."""
    options = {"async_scheduling": False}  # as with in_flight_weight_updates
    made = trainer(
        shared, tmp_path_factory.mktemp("run"), 3, vllm_engine_args=options, response_length=100,
        max_turn_tokens=8, per_device_train_batch_size=16,
    )  # fmt: skip
    yield made
    made.engine.rollout_engine.close()


def test_vllm_samples_turns(begun: Any) -> None:
    begun.train()
    for row in rows(begun):
        assert row["environment/turns"] == 3
        assert row["rollout/logprob_gap"] < 1e-4


def wait_within_turns(monkeypatch: pytest.MonkeyPatch, engine: Any, batch_size: int) -> None:
    """Once a batch is complete, sample three more tokens and wait for the next weights."""
    advance, load, state = engine.advance, engine.load_weights, {"batches": 0, "steps": 0}

    def load_weights(*args: Any) -> Any:
        state.update(batches=state["batches"] + 1, steps=0)
        return load(*args)

    def step() -> Any:
        if MoreStory.ended >= batch_size * state["batches"] and engine.unfinished:
            state["steps"] += 1
            if state["steps"] > 3:
                return time.sleep(0.01)
        return advance()

    monkeypatch.setattr(MoreStory, "ended", 0)
    monkeypatch.setattr(engine, "load_weights", load_weights)
    monkeypatch.setattr(engine, "advance", step)


@pytest.mark.parametrize(("drops", "contexts"), [(False, 1.0), (True, 3.0)])
def test_contexts_are_read_with_the_weights_of_their_time(
    drops: bool,
    contexts: float,
    begun: Any,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Updated in flight, within turns: by vLLM, and by the learner that trains on them."""
    monkeypatch.setattr(inprocess, "_STEPS", 1)
    made = trainer(
        shared, tmp_path, 4, begun.engine.rollout_engine.engine, in_flight_weight_updates=True,
        rollout_schedule="as_completed", max_lag=1, response_length=400, max_turn_tokens=14,
        learning_rate=3e-3, per_device_train_batch_size=8, drop_reasoning=drops,
    )  # fmt: skip
    models, trained = record(monkeypatch, made)
    wait_within_turns(monkeypatch, begun.engine.rollout_engine.engine, batch_size=8)
    made.train()
    assert [row["environment/new_contexts"] for row in rows(made)] == [contexts] * 4
    changes = []
    for rollout, learner in trained:  # the row with most changes within turns
        turn = rollout.episodes.turn
        within = (turn.diff() == 0) & (turn[:, 1:] >= 0)
        most = ((rollout.token_versions.diff() > 0) & within).sum(1).argmax()[None]
        changes.append((rollout.rows(most), learner[most]))
    own, swapped = largest_gaps(models, changes)
    assert own < 5e-5
    assert swapped > 0.1
