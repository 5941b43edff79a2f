"""RLHF from nothing on a CPU: a task, a supervised model, a reward model, PPO, and an evaluation.

make demo                                 about four minutes on one core
python examples/demo/run.py --quick       the same with little training, as a smoke test
make headline                             ten seeds, and a table with intervals

Most stages are commands of Kedge; stages.py has the others, and task.py the posts, their writers
and the judge that training never sees.  Each stage leaves its results in a folder of its name.  Run
the program again after an interruption: a stage whose results are there is not repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# Models this small gain little from a second thread, and get much slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from results import collect, show, show_result, show_win_rates
from stages import check_exchanges, write_data, write_preferences

from kedge.cli.main import main as kedge
from kedge.cli.main import run_command
from kedge.records.errors import ConfigError, install_command
from kedge.reporting.log import read_objects

BEGIN = time.perf_counter()
GOLD = f"{Path(__file__).with_name('task.py')}:gold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a run trains."""

    supervised: int = 16_000  # summaries for supervised training
    compared: int = 3_000  # posts with two answers to compare
    epochs: int = 2  # of the reward model
    episodes: int = 1_920  # responses of PPO
    judged: int = 500  # held-out posts


QUICK = Sizes(supervised=640, compared=128, epochs=1, episodes=192, judged=32)
# What a stage does, and about how many seconds it takes on one core.
STAGES = {
    "data": ("write posts, careless summaries and an untrained model", 5),
    "sft": ("a supervised model learns to summarize like a careless writer", 45),
    "summaries-sft": ("it summarizes 500 new posts", 1),
    "judged-sft": ("the judge compares them with careful references", 1),
    "answers": ("it answers every post twice, to be compared", 10),
    "preferences": ("annotators choose the better of two answers", 1),
    "reward": ("a reward model learns from their choices", 50),
    "exchanges": ("does it notice each wrong value of a fact?", 1),
    "ppo": ("PPO trains the supervised model against the reward model", 30),
    "summaries-ppo": ("the trained model summarizes the same 500 posts", 1),
    "judged-ppo": ("the judge compares them with careful references", 1),
    "ppo-against-sft": ("and with those of the supervised model", 1),
}
TRAINING = {"save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True}
SUPERVISED = {  # a supervised model and a reward model
    "per_device_train_batch_size": 32,
    "lr_scheduler_type": "cosine",
    "logging_steps": 50,
    **TRAINING,
}
SUMMARIES = {"split": "train", "max_new_tokens": 24, "batch_size": 500}
PPO = {
    "per_device_train_batch_size": 64,
    "num_ppo_epochs": 4,
    "response_length": 24,
    "temperature": 0.7,
    "stop_token": "eos",
    "non_eos_penalty": True,
    "penalty_reward_value": -5.0,
    "learning_rate": 0.0004,
    "kl_coef": 0.3,
    "logging_steps": 2,
    "num_sample_generations": 2,
    **TRAINING,
}


def main(argv: list[str]) -> None:
    """Run the stages for each seed and print the results; all outputs go to one folder."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--output_dir", type=Path, help="default: runs/demo")
    flags.add_argument("--seeds", nargs="+", type=int, default=[0])
    flags.add_argument("--quick", action="store_true", help="little training, as a smoke test")
    args = flags.parse_args(argv)
    if importlib.util.find_spec("trl") is None:
        raise ConfigError(
            "the demo needs TRL for its supervised and reward models; install it with"
            f" {install_command('sft')}"
        )
    warnings.filterwarnings("ignore", category=FutureWarning)
    folder = args.output_dir or Path("runs", "demo-quick" if args.quick else "demo")
    several = len(args.seeds) > 1
    folders = [folder / f"seed-{seed}" if several else folder for seed in args.seeds]
    for seed, place in zip(args.seeds, folders, strict=True):
        run(place, seed, QUICK if args.quick else Sizes())
    show_win_rates(folder, folders)
    if not several:
        show(folder)
        show_result(json.loads((folder / "summary.json").read_text()), folder)


def run(folder: Path, seed: int, sizes: Sizes) -> None:
    """Run the stages of one seed that are not done."""
    begin = time.perf_counter()
    train_supervised(folder, seed, sizes)
    held_out = folder / "data" / "held_out.jsonl"
    summarize(folder, "sft", held_out, seed)
    judge(folder, "judged-sft", "sft", "@reference")
    train_reward_model(folder, seed, sizes)
    command(
        folder / "ppo" / "model.safetensors",
        "ppo",
        model_name_or_path=folder / "sft",
        reward_model_path=folder / "reward",
        dataset_name=folder / "data" / "prompts.jsonl",
        total_episodes=sizes.episodes,
        **PPO,
        seed=seed,
        output_dir=folder / "ppo",
    )
    summarize(folder, "ppo", held_out, seed)
    judge(folder, "judged-ppo", "ppo", "@reference")
    judge(folder, "ppo-against-sft", "ppo", folder / "summaries-sft" / "completions.jsonl")
    if not (folder / "summary.json").exists():
        summary = {**collect(folder), "seconds": round(time.perf_counter() - begin, 1)}
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    else:
        print(f"All stages were already complete; remove {folder} to run them again.")


def train_reward_model(folder: Path, seed: int, sizes: Sizes) -> None:
    """Compare two answers of the supervised model to each post, and train on the choices."""
    answers, pairs = folder / "answers" / "completions.jsonl", folder / "preferences/pairs.jsonl"
    asked = {**SUMMARIES, "num_generations": 2, "temperature": 1.0, "seed": seed}
    places = (folder / "sft", folder / "data" / "preferences.jsonl")
    command(answers, "generate", *places, **asked, output=answers)
    if is_missing(pairs):
        write_preferences(pairs.parent, seed, answers)
    command(
        folder / "reward" / "held_out.json",
        "reward",
        model_name_or_path=folder / "sft",
        dataset_name=pairs,
        num_train_epochs=sizes.epochs,
        learning_rate=0.0007,
        warmup_steps=60,
        adam_beta2=0.98,
        disable_dropout=True,
        **SUPERVISED,
        seed=seed,
        output_dir=folder / "reward",
    )
    if is_missing(folder / "exchanges" / "exchanges.json"):
        check_exchanges(folder / "exchanges", seed, folder / "reward")


def train_supervised(folder: Path, seed: int, sizes: Sizes) -> None:
    """Write the data and an untrained model, and train it on careless summaries."""
    settings, data = {"seed": seed, **asdict(sizes)}, folder / "data"
    if is_missing(data / "settings.json"):
        counts = {name: settings[name] for name in ("supervised", "compared", "judged")}
        write_data(data, seed, **counts)
        example = read_objects(data / "supervised.jsonl")[0]
        print(f"a post     {example['prompt']}\na summary  {example['completion']}", flush=True)
        (data / "settings.json").write_text(json.dumps(settings))
    elif (before := json.loads((data / "settings.json").read_text())) != settings:
        raise ConfigError(
            f"{folder} has a run with {before}, and this one has {settings}; remove the folder, or"
            " set another --output_dir"
        )
    command(
        folder / "sft" / "model.safetensors",
        "sft",
        model_name_or_path=data / "model",
        dataset_name=data / "supervised.jsonl",
        num_train_epochs=1,
        learning_rate=0.002,
        warmup_steps=40,
        **SUPERVISED,
        seed=seed,
        output_dir=folder / "sft",
    )


def summarize(folder: Path, model: str, posts: Path, seed: int) -> None:
    """Write a model's summaries of posts."""
    result = folder / f"summaries-{model}" / "completions.jsonl"
    options = {**SUMMARIES, "temperature": 0.7, "seed": seed}
    command(result, "generate", folder / model, posts, **options, output=result)


def judge(folder: Path, name: str, model: str, theirs: Path | str) -> None:
    """Compare a model's summaries with others, by the gold judge."""
    ours, place = folder / f"summaries-{model}" / "completions.jsonl", folder / name
    command(place / "summary.json", "judge", ours, theirs, score=GOLD, output_dir=place)


def command(result: Path, name: str, *words: Path | str, **options: Any) -> None:
    """Run a command of Kedge, unless its result is there; one that was interrupted is resumed."""
    if not is_missing(result):
        return
    if any(result.parent.glob("checkpoint-*[0-9]")):
        options["resume_from_checkpoint"] = True
    flags = [f"--{option}={value}" for option, value in options.items()]
    sys.argv = ["kedge", name, *map(str, words), *flags]  # the command that its files name
    print(f"$ {' '.join(sys.argv)}", flush=True)
    if code := kedge(sys.argv[1:]):
        sys.exit(code)


def is_missing(result: Path) -> bool:
    """Whether a stage has to run; its folder is there afterwards."""
    missing, name = not result.exists(), result.parent.name
    text, seconds = STAGES[name]
    state = f"about {seconds} s; {time.perf_counter() - BEGIN:.0f} s so far"
    state = state if missing else "done before"
    number = f"{[*STAGES].index(name) + 1}/{len(STAGES)}"
    print(f"\n[{number}] {name} ({state})\n{text}", flush=True)
    result.parent.mkdir(parents=True, exist_ok=True)
    return missing


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], name="demo"))
