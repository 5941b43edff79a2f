"""The classic loop on a real pre-trained model, beside the trainer with the same settings.

    python -m benchmarks.classic_stories --seeds 0 1 2

stories260k against a sentiment reward model: 64 prompts a step, 40 steps, 53 tokens at temperature
1, learning rate 3e-4, 4 epochs, KL coefficient 0.05.  Writes the scores of every update and the
mean of the last five.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import kedge
from benchmarks.stories import RESULTS, SHARED
from kedge.ext.trl.classic import PPOConfig

ROOT = Path(__file__).parents[1]
DATA = SHARED / "data"
STEPS = 40


def classic(seed: int) -> list[float]:
    """``examples/classic/sentiment.py`` as it stands."""
    spec = importlib.util.spec_from_file_location(
        "sentiment", ROOT / "examples/classic/sentiment.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    config = PPOConfig(
        model_name=str(DATA / "stories260k"),
        reward_model=str(DATA / "stories260k-sentiment"),
        batch_size=64,
        mini_batch_size=64,
        learning_rate=3e-4,
        init_kl_coef=0.05,
        adap_kl_ctrl=False,
        seed=seed,
    )
    args = module.ScriptArguments(
        dataset=str(DATA / "story-prompts" / "train.jsonl"),
        column="prompt",
        shortest_query=64,  # whole openings
        longest_query=64,
        max_steps=STEPS,
        max_new_tokens=53,
        output_dir=tempfile.mkdtemp(),
    )
    return list(module.main(args, config))


def trainer(seed: int) -> list[float]:
    """``kedge.PPOTrainer`` with a value head on the policy, as the classic models have."""
    prompts = (DATA / "story-prompts" / "train.jsonl").read_text().splitlines()
    made = kedge.PPOTrainer(
        kedge.PPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=64,
            max_steps=STEPS,
            response_length=53,
            temperature=1.0,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            kl_coef=0.05,
            max_grad_norm=0.0,
            value_source="policy",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            num_sample_generations=0,
            seed=seed,
            disable_tqdm=True,
        ),
        AutoTokenizer.from_pretrained(DATA / "stories260k"),
        AutoModelForCausalLM.from_pretrained(DATA / "stories260k"),
        reward_model=AutoModelForSequenceClassification.from_pretrained(
            DATA / "stories260k-sentiment", num_labels=1
        ),
        train_dataset=[json.loads(line) for line in prompts],
    )
    made.train()
    rows = made.state.log_history
    return [row["objective/scores"] for row in rows if "objective/scores" in row]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags = flags.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in flags.seeds:
        for name, train in (("classic", classic), ("trainer", trainer)):
            scores = train(seed)
            runs.append({"api": name, "seed": seed, "scores": scores})
            runs[-1] |= {"first": scores[0], "last_five": sum(scores[-5:]) / 5}
            print(name, seed, round(runs[-1]["first"], 3), round(runs[-1]["last_five"], 3))
            (RESULTS / "classic_stories.json").write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
