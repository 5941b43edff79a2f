"""Episodes whose turns vLLM samples: its log-probabilities agree with the learner's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from kedge import PPOConfig, PPOTrainer
from tests.contract.engines import needs_vllm
from tests.e2e.small import rows

pytestmark = needs_vllm


class MoreStory:
    """Rewards the letter e; says a word after each of the first two turns."""

    def reset(self, *, seed: int, options: Any) -> Any:
        self.turns = 0
        return None, {}

    def step(self, response: Any) -> Any:
        self.turns += 1
        return " Then", response.text.count("e") / 10, self.turns == 3, False, {}


def test_vllm_samples_turns(shared: Path, tmp_path: Path) -> None:
    place = shared / "data" / "stories-head32"
    made = PPOTrainer(
        args=PPOConfig(
            output_dir=str(tmp_path), total_episodes=32, per_device_train_batch_size=16,
            response_length=40, max_turn_tokens=8, num_ppo_epochs=1, stop_token="eos",
            num_sample_generations=0, logging_steps=1, rollout_engine="vllm", credit="turn",
            save_strategy="no",
        ),
        processing_class=AutoTokenizer.from_pretrained(place, padding_side="left"),
        model=AutoModelForCausalLM.from_pretrained(place),
        environment=MoreStory,
        train_dataset=[{"prompt": "Once upon a time"}, {"prompt": "Lily had a dog"}],
    )  # fmt: skip
    made.train()
    made.engine.rollout_engine.close()
    for row in rows(made):
        assert row["environment/turns"] == 3
        assert row["rollout/logprob_gap"] < 1e-4
