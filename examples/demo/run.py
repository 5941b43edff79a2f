"""The whole way on a CPU: a task, a supervised model, a reward model, PPO, and a judgement.

make demo                               about four minutes on two cores
python examples/demo/run.py --quick     the same with little training, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models this small gain little from a second thread, and lose much when something else runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from prepare import (
    make_model,
    make_tokenizer,
    prefer,
    supervise,
    train_reward,
    write,
)
from rich.console import Console
from rich.table import Table
from task import judge, win_rate, write_post, write_summary
from transformers.utils import logging as transformers_logging

from kedge import PPOConfig, PPOTrainer

TEMPERATURE = 0.7  # of training and of the judged summaries
LENGTH = 24  # most tokens of a summary
REFERENCE_CARE = 0.8  # the held-out references are written with more care than the corpus

console = Console()


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    supervised_rows: int = 20_000
    preference_rows: int = 10_000
    updates: int = 45
    judged: int = 500


QUICK = Sizes(supervised_rows=640, preference_rows=128, updates=3, judged=32)


class Judged:
    """Held-out posts, their references, and the gold judge."""

    def __init__(self, rows: int, seed: int) -> None:
        rng = random.Random(f"held out {seed}")
        self.posts = [write_post(rng) for _ in range(rows)]
        self.references = [write_summary(p, rng, care=REFERENCE_CARE) for p in self.posts]
        self.against = [
            judge(p, r, ended=True) for p, r in zip(self.posts, self.references, strict=True)
        ]
        self.seed = seed

    def answers(self, model: Any, tokenizer: Any) -> list[tuple[str, bool]]:
        """What a model says of each post."""
        return write(
            model, tokenizer, self.posts, seed=self.seed, temperature=TEMPERATURE, length=LENGTH
        )

    def marks(self, answers: list[tuple[str, bool]]) -> list[float]:
        """The gold mark of each answer."""
        return [judge(p, a, ended=e) for p, (a, e) in zip(self.posts, answers, strict=True)]


def main() -> None:
    """Run the demo and leave everything in its folder."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--output_dir", default="runs/demo")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--quick", action="store_true", help="little training, to see that it runs")
    flags = flags.parse_args()
    quiet()
    folder, sizes = Path(flags.output_dir), QUICK if flags.quick else Sizes()
    begin = time.perf_counter()
    summary = demo(folder, sizes, flags.seed)
    summary["seconds"] = round(time.perf_counter() - begin, 1)
    folder.joinpath("summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    closing(summary, folder)


def demo(folder: Path, sizes: Sizes, seed: int) -> dict[str, float]:
    """From nothing to a judged policy."""
    console.rule("1. supervised model")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    supervise(model, tokenizer, folder / "sft", rows=sizes.supervised_rows, seed=seed)
    judged = Judged(sizes.judged, seed)
    before = judged.answers(model, tokenizer)

    console.rule("2. reward model")
    pairs = prefer(model, tokenizer, rows=sizes.preference_rows, seed=seed)
    console.print(f"{len(pairs)} preference pairs, a tenth of them labelled the wrong way round")
    reward = train_reward(folder / "sft", tokenizer, pairs, folder / "reward", seed=seed)

    console.rule("3. PPO")
    trainer = train(folder, sizes, model, reward, tokenizer, seed)
    history = [row for row in trainer.state.log_history if "objective/scores" in row]

    console.rule("4. judgement")
    after = judged.answers(trainer.model, tokenizer)
    marks_before, marks_after = judged.marks(before), judged.marks(after)
    show(judged, before, after, marks_before, marks_after, folder)
    first, last = history[:2], history[-3:]
    return {
        "score_start": mean(row["objective/scores"] for row in first),
        "score_end": mean(row["objective/scores"] for row in last),
        "kl": mean(row["objective/kl"] for row in last),
        "win_rate_start": round(win_rate(marks_before, judged.against), 4),
        "win_rate": round(win_rate(marks_after, judged.against), 4),
        "win_rate_head_to_head": round(win_rate(marks_after, marks_before), 4),
        "gold_mark_start": mean(marks_before),
        "gold_mark": mean(marks_after),
        "episodes_per_second": round(history[-1]["eps"], 1),
    }


def train(
    folder: Path, sizes: Sizes, model: Any, reward: Any, tokenizer: Any, seed: int
) -> PPOTrainer:
    """PPO against the reward model, on posts of its own."""
    rng = random.Random(f"prompts {seed}")
    config = PPOConfig(
        output_dir=str(folder / "ppo"),
        per_device_train_batch_size=64,
        total_episodes=64 * sizes.updates,
        num_ppo_epochs=4,
        response_length=LENGTH,
        temperature=TEMPERATURE,
        stop_token="eos",
        missing_eos_penalty=1.0,
        learning_rate=5e-4,
        kl_coef=0.1,
        gradient_checkpointing=False,
        logging_steps=max(1, sizes.updates // 30),
        save_strategy="no",
        overwrite_output_dir=True,
        num_sample_generations=2,
        seed=seed,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=model,
        reward_model=reward,
        train_dataset=[{"prompt": write_post(rng).text} for _ in range(2_000)],
    )
    plan(config)
    trainer.train()
    trainer.save_model()
    return trainer


def plan(config: PPOConfig) -> None:
    """What is about to happen."""
    console.print(
        f"{config.num_total_batches} updates of {config.batch_size} responses, "
        f"{config.num_ppo_epochs} passes each, at most {config.response_length} tokens, "
        f"KL coefficient {config.kl_coef}"
    )


def show(
    judged: Judged,
    before: list[tuple[str, bool]],
    after: list[tuple[str, bool]],
    marks_before: list[float],
    marks_after: list[float],
    folder: Path,
) -> None:
    """Some summaries before and after, on screen and all of them in a file."""
    table = Table("post", "supervised", "PPO", show_lines=True)
    rows = []
    for i, post in enumerate(judged.posts):
        old, new = before[i][0].strip(), after[i][0].strip()
        rows.append(
            {
                "post": post.text,
                "reference": judged.references[i].strip(),
                "supervised": old,
                "supervised_mark": marks_before[i],
                "ppo": new,
                "ppo_mark": marks_after[i],
            }
        )
        if i < 5:
            table.add_row(
                post.text, f"{old}\n[{marks_before[i]:.1f}]", f"{new}\n[{marks_after[i]:.1f}]"
            )
    console.print(table)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    folder.joinpath("completions.jsonl").write_text(lines)


def closing(summary: dict[str, float], folder: Path) -> None:
    """The result in one table."""
    table = Table("", "supervised", "PPO", title="result", title_justify="left")
    table.add_row(
        "score of the reward model",
        f"{summary['score_start']:.2f}",
        f"{summary['score_end']:.2f}",
    )
    table.add_row("KL to the supervised model (nats a response)", "0", f"{summary['kl']:.1f}")
    table.add_row(
        "gold win rate against the references",
        f"{summary['win_rate_start']:.1%}",
        f"{summary['win_rate']:.1%}",
    )
    table.add_row(
        "gold win rate, PPO against supervised", "", f"{summary['win_rate_head_to_head']:.1%}"
    )
    table.add_row("episodes per second", "", f"{summary['episodes_per_second']:.1f}")
    console.print(table)
    console.print(
        f"{summary['seconds']:.0f} seconds. Models, curves and completions are in {folder}"
    )


def mean(values: Any) -> float:
    """The mean, to four places."""
    listed = list(values)
    return round(sum(listed) / len(listed), 4)


def quiet() -> None:
    """Leave the screen to what matters."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    from datasets import disable_progress_bars

    disable_progress_bars()


if __name__ == "__main__":
    main()
