"""Train a model that writes film reviews to write favorable ones, and compare by a separate judge.

python examples/sentiment/run.py --model MODEL --reviews FOLDER     about eight minutes

MODEL is a small language model, a folder or a name on the hub; FOLDER holds positive.txt and
negative.txt, one sentence per line.  The judge is a reward model trained on sentences that neither
the policy nor its reward model has seen.  Run the program again after an interruption: a stage
whose results are there is not repeated.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentences import write_data

from kedge.cli.main import main as kedge
from kedge.cli.main import run_command

COMMON = {"save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True}
SUPERVISED = {  # a supervised model and both reward models
    "per_device_train_batch_size": 32,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "logging_steps": 50,
    **COMMON,
}
REWARD = {
    "eval_strategy": "epoch",
    "num_train_epochs": 3,
    "learning_rate": 5e-4,
    "disable_dropout": True,
    **SUPERVISED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a run trains."""

    steps: int = -1  # of the supervised model and of each reward model; -1: all epochs
    length: int = 60  # maximum tokens of an answer
    batch: int = 64  # responses per iteration
    episodes: int = 2560  # responses of the run
    limit: int = 600  # prompts in the comparison


def main(argv: list[str]) -> None:
    """Run the stages for each seed; all outputs go to one folder."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--model", required=True, help="a folder, or a name on the hub")
    flags.add_argument("--reviews", required=True, type=Path, help="positive.txt and negative.txt")
    flags.add_argument("--output_dir", default="runs/sentiment", type=Path)
    flags.add_argument("--seeds", nargs="+", type=int, default=[0])
    flags.add_argument("--kl_coef", type=float, default=0.15)
    args = flags.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    for seed in args.seeds:
        folder = args.output_dir / f"seed-{seed}" if len(args.seeds) > 1 else args.output_dir
        run(folder, args.model, args.reviews, seed, args.kl_coef, Sizes())


def run(folder: Path, model: str, reviews: Path, seed: int, kl_coef: float, sizes: Sizes) -> None:
    """Run the stages of one seed that are not done."""
    data, sft, reward, judge = (folder / name for name in ("data", "sft", "reward", "judging"))
    steps = {"max_steps": sizes.steps, "seed": seed}
    if not (data / "compared" / "test.jsonl").exists():
        write_data(data, reviews, seed)
    command(
        sft / "model.safetensors",
        "sft",
        model_name_or_path=model,
        dataset_name=data / "texts",
        num_train_epochs=2,
        learning_rate=1e-3,
        **SUPERVISED,
        **steps,
        output_dir=sft,
    )
    for place, start, pairs in ((reward, sft, "reward"), (judge, model, "judge")):
        command(
            place / "held_out.json",
            "reward",
            model_name_or_path=start,
            dataset_name=data / pairs,
            **REWARD,
            **steps,
            output_dir=place,
        )
    command(
        folder / "ppo" / "model.safetensors",
        "ppo",
        model_name_or_path=sft,
        reward_model_path=reward,
        dataset_name=data / "prompts",
        per_device_train_batch_size=sizes.batch,
        total_episodes=sizes.episodes,
        num_ppo_epochs=4,
        response_length=sizes.length,
        stop_token="eos",
        missing_eos_penalty=4.0,  # the reward model never saw truncated answers: too high scores
        learning_rate=3e-4,
        kl_coef=kl_coef,
        logging_steps=2,
        num_sample_generations=2,
        **COMMON,
        seed=seed,
        output_dir=folder / "ppo",
    )
    start, tuned = (folder / name / "completions.jsonl" for name in ("start", "tuned"))
    asked = {"limit": sizes.limit, "temperature": 0.7, "max_new_tokens": sizes.length}
    asked |= {"batch_size": 200, "seed": seed}
    for trained, result in ((sft, start), (folder / "ppo", tuned)):
        command(result, "generate", trained, data / "compared", output=result, **asked)
    result = folder / "tuned-against-start" / "summary.json"
    command(result, "judge", tuned, start, reward_model=judge, output_dir=result.parent)


def command(result: Path, name: str, *words: Path | str, **options: Any) -> None:
    """Run a command of Kedge, unless its result is there; one that was interrupted is resumed."""
    if result.exists():
        print(f"sentiment: {result.parent} is done")
        return
    result.parent.mkdir(parents=True, exist_ok=True)
    if any(result.parent.glob("checkpoint-*[0-9]")):
        options["resume_from_checkpoint"] = True
    flags = [f"--{option}={value}" for option, value in options.items()]
    sys.argv = ["kedge", name, *map(str, words), *flags]  # the command that its files name
    print(f"sentiment: {' '.join(sys.argv)}", flush=True)
    if code := kedge(sys.argv[1:]):
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], name="sentiment"))
