"""Train every method on the games, and keep each run as a line of a record.

python -m benchmarks.critic_or_groups --choose    learning rates, on a seed that does not count
python -m benchmarks.critic_or_groups             seeds 0 to 4 of what is missing
python -m benchmarks.critic_or_groups --lags 1 2 4 --lengths 10 --methods PPO SAO GRPO

docs/records/critic-or-groups.md has the rule, which was written before the runs, and the result.
One thread; a run that the record has is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

from kedge import PPOConfig, PPOTrainer
from kedge.algorithms import reinforce_pp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "agent"))
from agent import BY_TOKENS, MASKED, METHODS, SAO, TASKS, VALUE, Sizes, Task  # isort: skip
from agent import evaluate, supervise, train  # isort: skip

from benchmarks.critic_or_groups.games import GAMES, turns

RECORDS = Path(__file__).parents[1] / "records" / "critic_or_groups"
LENGTHS = (2, 5, 10, 20)
TEXT_WORLD, ABOUT = "text-world", 11  # turns of an episode, about
# Share of arbitrary actions of the expert: a third of its episodes succeed, to the nearest 0.05.
NOISE = {
    "gates": dict(zip(LENGTHS, (0.7, 0.6, 0.5, 0.45), strict=True)),
    "lake": dict(zip(LENGTHS, (0.6, 0.4, 0.3, 0.15), strict=True)),
}
TUNING_SEED, CHOSEN_AT, RATES = 100, (5, 10, ABOUT), (2.5e-4, 5e-4, 1e-3)
LOWER = 1.25e-4  # in the text world too, where the lowest of the three was the best
SIZES = Sizes(iterations=20, evaluated=500)
COPY = VALUE | {"value_source": "copy"}
RUN_BY: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "PPO": (PPOTrainer, PPOConfig, COPY | BY_TOKENS),
    "PPO, credit by turn": (PPOTrainer, PPOConfig, COPY | {"credit": "turn", "gamma": 0.98}),
    "SAO": (PPOTrainer, PPOConfig, SAO | MASKED | {"warmup_steps": 20}),
    "RLOO": METHODS["RLOO"],
    "GRPO": METHODS["GRPO"],
    "REINFORCE++": (partial(PPOTrainer, algorithm=reinforce_pp()), PPOConfig, {}),
}
METHODS_OF_STUDY = list(RUN_BY)
# What the critic does, at the rate that was chosen for PPO.
VARIANTS = {
    "PPO, no value warm-up": {"value_warmup_steps": 0},
    "PPO, value not trained": {"value_warmup_steps": 0, "value_learning_rate": 0.0},
    "PPO, lambda by turn": {"lam": 0.95 ** (1 / 3)},  # as credit by turn: 0.95 for three tokens
}
for _name, _changed in VARIANTS.items():
    RUN_BY[_name] = (PPOTrainer, PPOConfig, COPY | BY_TOKENS | _changed)
COLUMNS = {
    "episodes": "episode",
    "tokens": "num_tokens",
    "score": "objective/scores",
    "turns": "environment/turns",
    "length": "completions/mean_length",
    "uniform": "objective/uniform_groups",
    "explained": "val/explained_variance",
    "kl": "policy/approxkl_avg",
    "entropy": "policy/entropy_avg",
    "rollout": "time/rollout",
    "annotate": "time/annotate",
    "update": "time/update",
}


class Curve(TrainerCallback):
    """The columns of every iteration, and the CPU seconds since training began."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float | None]] = {name: [] for name in (*COLUMNS, "cpu")}
        self.begin = time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep a row."""
        if "objective/scores" not in (logs or {}):
            return
        values = {name: logs.get(key) for name, key in COLUMNS.items()}
        values["cpu"] = time.process_time() - self.begin
        for name, value in values.items():
            self.rows[name].append(None if value is None else float(f"{value:.4g}"))


def make_task(game: str, length: int) -> Task:
    """A game of one length, with its careless expert."""
    if game == TEXT_WORLD:
        return TASKS["text world"]
    tokens = {"gates": 9, "lake": 18}[game] * turns(length)
    options = {"length": length}
    return Task(GAMES[game], options, turns(length), 4, tokens, NOISE[game][length], epochs=6)


def learn(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and evaluate one run; what the record keeps of it."""
    task = make_task(run["game"], run["length"])
    base = folder / run["game"] / str(run["length"]) / str(run["seed"])
    start = base / "start.json"
    if not start.is_file():
        # With 400 episodes, the policy for 20 moves never won.
        episodes = {20: 1000, ABOUT: 2000}.get(run["length"], 6000 // run["length"])
        sizes = Sizes(expert_episodes=episodes)
        supervise(task, base, sizes, run["seed"])
        start.write_text(json.dumps(evaluate(task, base / "sft", SIZES.evaluated, run["seed"])))
    curve = Curve()
    trainer, config, options = RUN_BY[run["method"]]
    options = options | {"learning_rate": run["rate"], "logging_steps": 1}
    options |= {"lr_scheduler_type": "constant_with_warmup", "max_lag": run["lag"]}
    METHODS["run"] = (partial(trainer, callbacks=[curve]), config, options)
    with tempfile.TemporaryDirectory(dir=folder) as output:
        train(task, base / "sft", Path(output), SIZES, run["seed"], "run")
        found = evaluate(task, Path(output), SIZES.evaluated, run["seed"])
    begun = json.loads(start.read_text())
    kept = ("success", "low", "high", "turns")
    return {
        "start": {name: round(begun[name], 4) for name in kept},
        "end": {name: round(found[name], 4) for name in kept},
        "rows": curve.rows,
    }


def known(game: str) -> list[dict[str, Any]]:
    """The runs of a game that are in the record."""
    file = RECORDS / f"{game}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def lengths_of(game: str) -> tuple[int, ...]:
    """The lengths that a game comes in."""
    return (ABOUT,) if game == TEXT_WORLD else LENGTHS


def tuned_as(method: str) -> str:
    """The method whose learning rate a method has: variants of PPO have PPO's."""
    return "PPO" if method in VARIANTS else method


def rates_of(game: str) -> tuple[float, ...]:
    """The learning rates that are tried."""
    return (LOWER, *RATES) if game == TEXT_WORLD else RATES


def chosen_rate(game: str, method: str) -> float:
    """The rate with the highest mean score in training, over ``CHOSEN_AT``, on the tuning seed."""
    by_rate: dict[float, list[float]] = {}
    for run in known(game):
        if run["seed"] == TUNING_SEED and run["method"] == method and not run["lag"]:
            by_rate.setdefault(run["rate"], []).append(fmean(run["rows"]["score"]))
    tried = set(CHOSEN_AT) & set(lengths_of(game))
    whole = {rate: sum(x) for rate, x in by_rate.items() if len(x) == len(tried)}
    if set(rates_of(game)) - set(whole):
        raise SystemExit(f"{game}, {method}: run --choose first")
    return max(whole, key=whole.__getitem__)


def plan(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs that were asked for."""
    for game in args.games:
        lengths = [x for x in args.lengths if x in lengths_of(game)]
        if args.choose:
            tried = [x for x in lengths if x in CHOSEN_AT]
            rates = args.rates or rates_of(game)
            for length, method, rate in itertools.product(tried, args.methods, rates):
                what = {"method": method, "rate": rate, "lag": 0, "seed": TUNING_SEED}
                yield {"game": game, "length": length, **what}
            continue
        rates = {m: chosen_rate(game, tuned_as(m)) for m in args.methods}
        every = itertools.product(args.seeds, args.lags, lengths, args.methods)
        for seed, lag, length, method in every:
            what = {"method": method, "rate": rates[method], "lag": lag, "seed": seed}
            yield {"game": game, "length": length, **what}


def about() -> dict[str, str]:
    """Commit, processor and versions of a run."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "")
    return {
        "commit": commit,
        "machine": f"{name or platform.processor()}, one thread, other jobs beside",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def main() -> None:
    """Run what is missing."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--output_dir", default="runs/critic-or-groups", type=Path)
    games = [*GAMES, TEXT_WORLD]
    flags.add_argument("--games", nargs="+", default=games, choices=games)
    flags.add_argument("--lengths", nargs="+", type=int, default=[*LENGTHS, ABOUT])
    flags.add_argument("--methods", nargs="+", default=METHODS_OF_STUDY, choices=list(RUN_BY))
    flags.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    flags.add_argument("--lags", nargs="+", type=int, default=[0])
    flags.add_argument("--choose", action="store_true", help="try the learning rates")
    flags.add_argument("--rates", nargs="+", type=float, help="to try; default: of the game")
    args = flags.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    RECORDS.mkdir(parents=True, exist_ok=True)
    names = ("game", "length", "method", "rate", "lag", "seed")
    for run in plan(args):
        if any(all(old[n] == run[n] for n in names) for old in known(run["game"])):
            continue
        done = run | about() | learn(run, args.output_dir)
        with (RECORDS / f"{run['game']}.jsonl").open("a") as file:
            file.write(json.dumps(done, separators=(",", ":")) + "\n")
        score = f"{done['start']['success']:.1%} -> {done['end']['success']:.1%}"
        print(*run.values(), score, f"{done['rows']['cpu'][-1]:.0f} CPU s", sep=" | ", flush=True)


if __name__ == "__main__":
    main()
