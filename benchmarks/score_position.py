"""Where the score goes: on the last token, or one slot after it, on the demo's task.

    make demo && python -m benchmarks.score_position runs/demo --seeds 0 1 2

The supervised model and the reward model are those that the demo left; only PPO runs again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "demo"))

import run as demo
from task import win_rate
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

RESULTS = Path(__file__).parent / "results"


def train(folder: Path, position: str, seed: int, judged: Any) -> dict[str, Any]:
    """One PPO run and its judgement."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "sft")
    real = demo.PPOConfig
    demo.PPOConfig = lambda **options: real(**options, score_position=position)
    try:
        trainer = demo.train(
            folder / "score_position",
            demo.Sizes(),
            AutoModelForCausalLM.from_pretrained(folder / "sft"),
            AutoModelForSequenceClassification.from_pretrained(folder / "reward"),
            tokenizer,
            seed,
        )
    finally:
        demo.PPOConfig = real
    rows = [row for row in trainer.state.log_history if "objective/scores" in row]
    marks = judged.marks(judged.answers(trainer.model, tokenizer))
    return {
        "position": position,
        "seed": seed,
        "scores": [row["objective/scores"] for row in rows],
        "score": demo.mean(row["objective/scores"] for row in rows[-5:]),
        "kl": demo.mean(row["objective/kl"] for row in rows[-5:]),
        "gold_mark": demo.mean(marks),
        "win_rate": win_rate(marks, judged.against),
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags = flags.parse_args()
    demo.quiet()
    judged, runs = demo.Judged(400, 0), []
    RESULTS.mkdir(exist_ok=True)
    for seed in flags.seeds:
        for position in ("last", "after_last"):
            runs.append(train(flags.folder, position, seed, judged))
            print(json.dumps({k: v for k, v in runs[-1].items() if k != "scores"}), flush=True)
            (RESULTS / "score_position.json").write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
