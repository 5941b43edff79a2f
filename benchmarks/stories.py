"""PPO on a real pre-trained model: stories260k against a sentiment reward model.

    python -m benchmarks.stories --seeds 0 1 2 --positions last after_last

64 prompts a step, 40 steps, 53 tokens, learning rate 3e-4, 4 epochs, KL coefficient 0.05.  Writes
the scores of every update, the mean of the last five, completions, and a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from kedge import PPOConfig, PPOTrainer

SHARED = Path(os.environ.get("KEDGE_SHARED", Path(__file__).parents[2] / "shared"))
RESULTS = Path(__file__).parent / "records"


def run(
    position: str,
    seed: int,
    train_layers: int | None = None,
    updates: int = 40,
    *,
    bf16: bool = False,
) -> dict[str, Any]:
    """One run."""
    data = SHARED / "data"
    prompts = (data / "story-prompts" / "train.jsonl").read_text().splitlines()
    trainer = PPOTrainer(
        PPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=64,
            max_steps=updates,
            response_length=53,
            stop_token=None,
            learning_rate=3e-4,
            kl_coef=0.05,
            score_position=position,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            num_sample_generations=0,
            seed=seed,
            train_layers=train_layers,
            bf16=bf16,
            disable_tqdm=True,
        ),
        AutoTokenizer.from_pretrained(data / "stories260k", padding_side="left"),
        AutoModelForCausalLM.from_pretrained(data / "stories260k"),
        reward_model=AutoModelForSequenceClassification.from_pretrained(
            data / "stories260k-sentiment"
        ),
        train_dataset=[json.loads(line) for line in prompts],
    )
    begin = time.perf_counter()
    trainer.train()
    rows = [row for row in trainer.state.log_history if "objective/scores" in row]
    scores = [row["objective/scores"] for row in rows]
    return {
        "position": position,
        "seed": seed,
        "train_layers": train_layers,
        "scores": scores,
        "kl": [row["objective/kl"] for row in rows],
        "first": scores[0],
        "last_five": sum(scores[-5:]) / 5,
        "seconds": time.perf_counter() - begin,
        "completions": trainer.generate_completions(sampling=True)[:5],
    }


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Scores by update, one line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = {"last": "tab:blue", "after_last": "tab:orange"}
    for each in runs:
        axes.plot(each["scores"], color=colors[each["position"]], alpha=0.7)
    for position, color in colors.items():
        axes.plot([], [], color=color, label=f'score_position="{position}"')
    axes.set_xlabel("update")
    axes.set_ylabel("score of the reward model")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags.add_argument("--positions", nargs="+", default=["last", "after_last"])
    flags.add_argument("--train_layers", type=int, help="of the 5; writes stories_top_N.json")
    flags.add_argument("--bf16", action="store_true", help="writes stories_bf16.json")
    flags = flags.parse_args()
    name = "stories" if flags.train_layers is None else f"stories_top_{flags.train_layers}"
    name += "_bf16" if flags.bf16 else ""
    runs = []
    RESULTS.mkdir(exist_ok=True)
    for seed in flags.seeds:
        for position in flags.positions:
            runs.append(run(position, seed, flags.train_layers, bf16=flags.bf16))
            told = {k: v for k, v in runs[-1].items() if k not in ("scores", "kl", "completions")}
            print(json.dumps(told), flush=True)
            (RESULTS / f"{name}.json").write_text(json.dumps(runs, indent=1))
    draw(runs, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
