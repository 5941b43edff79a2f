"""All algorithms on the same model, reward and number of responses.

    python -m benchmarks.algorithms --seeds 0 1 2
    python -m benchmarks.algorithms --draw          the pictures in docs/images, from the results

stories260k against a sentiment reward model: 40 updates of 64 responses of 53 tokens, 4 epochs,
learning rate 3e-4, KL coefficient 0.05; RLOO, GRPO and REINFORCE++-baseline sample 4 responses to
each of 16 prompts, the others one to each of 64; ReMax samples 64 greedy ones more, which are not
trained on.  Each run is a process of its own.  Writes every curve, the mean of the last five
updates, seconds and peak memory; runs that are in the results already are replaced.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARED = Path(os.environ.get("KEDGE_SHARED", Path(__file__).parents[2] / "shared"))
RESULTS = Path(__file__).parent / "records" / "algorithms.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
NAMES = {
    "ppo": "PPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "grpo": "GRPO",
    "remax": "ReMax",
    "reinforce_pp_baseline": "REINFORCE++-baseline",
}
COLORS = dict(
    zip(
        NAMES,
        ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:olive"),
        strict=True,
    )
)
# Picture, and what is drawn in it in color; the rest is gray.
PICTURES = {
    "algorithms": ["ppo", "rloo", "reinforce_pp", "grpo", "remax"],
    "reinforce_pp": ["reinforce_pp", "reinforce_pp_baseline"],
    **{name: [name] for name in ("ppo", "rloo", "grpo", "remax")},
}
UPDATES = 40


def run(name: str, seed: int) -> dict[str, Any]:
    """One run, in this process."""
    import kedge
    from kedge.algorithms import reinforce_pp, remax

    rules = {
        "reinforce_pp": reinforce_pp(),
        "reinforce_pp_baseline": reinforce_pp(baseline=True, beta=0.05),
        "remax": remax(),
    }
    data = SHARED / "data"
    prompts = (data / "story-prompts" / "train.jsonl").read_text().splitlines()
    shared: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 64,
        "max_steps": UPDATES,
        "response_length": 53,
        "stop_token": None,
        "num_ppo_epochs": 4,
        "learning_rate": 3e-4,
        "temperature": 0.7,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "num_sample_generations": 0,
        "seed": seed,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    given: dict[str, Any] = {
        "model": str(data / "stories260k"),
        "train_dataset": [json.loads(line) for line in prompts],
    }
    reward = str(data / "stories260k-sentiment")
    if name == "grpo":
        args: Any = kedge.GRPOConfig(**shared, num_generations=4, beta=0.05)
        trainer: Any = kedge.GRPOTrainer(args=args, reward_funcs=reward, **given)
    elif name == "rloo":
        args = kedge.RLOOConfig(**shared, num_generations=4, kl_coef=0.05)
        trainer = kedge.RLOOTrainer(args=args, reward_funcs=reward, **given)
    else:
        rule = rules.get(name)
        in_loss = name == "reinforce_pp_baseline"
        args = kedge.PPOConfig(
            **shared,
            kl_coef=0.0 if in_loss else 0.05,
            num_generations=4 if in_loss else 1,
        )
        trainer = kedge.PPOTrainer(args=args, reward_model=reward, algorithm=rule, **given)
    done = trainer.train()
    rows = [row for row in trainer.state.log_history if "objective/scores" in row]
    scores = [row["objective/scores"] for row in rows]
    return {
        "algorithm": name,
        "seed": seed,
        "scores": scores,
        "kl": [row.get("objective/kl", 0.0) for row in rows],
        "last_five": statistics.fmean(scores[-5:]),
        "seconds": done.metrics["train_runtime"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "completions": trainer.generate_completions(sampling=True)[:3],
    }


def draw(runs: list[dict[str, Any]], colored: list[str], file: Path) -> None:
    """Mean score by responses trained on, with the range over seeds; the others in gray."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, title in NAMES.items():
        curves = [each["scores"] for each in runs if each["algorithm"] == name]
        if not curves:
            continue
        by_update = list(zip(*curves, strict=True))
        x = [64 * (i + 1) for i in range(len(by_update))]
        means = [statistics.fmean(v) for v in by_update]
        if name not in colored:
            if len(colored) <= 2:  # an overview has enough lines of its own
                axes.plot(x, means, color="0.8", linewidth=1, zorder=1)
            continue
        axes.plot(x, means, color=COLORS[name], label=title)
        low, high = [min(v) for v in by_update], [max(v) for v in by_update]
        axes.fill_between(x, low, high, color=COLORS[name], alpha=0.15)
    axes.set_xlabel("responses trained on")
    axes.set_ylabel("score of the reward model")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def table(runs: list[dict[str, Any]]) -> str:
    """Means over seeds, as Markdown."""
    lines = ["| | score, last five updates | by seed | KL, last | seconds | peak memory |"]
    lines.append("|---|---|---|---|---|---|")
    for name, title in NAMES.items():
        mine = [each for each in runs if each["algorithm"] == name]
        if not mine:
            continue
        scores = [each["last_five"] for each in mine]
        lines.append(
            f"| {title} | {statistics.fmean(scores):.2f} |"
            f" {', '.join(f'{s:.2f}' for s in scores)} |"
            f" {statistics.fmean(each['kl'][-1] for each in mine):.1f} |"
            f" {statistics.fmean(each['seconds'] for each in mine):.0f} |"
            f" {max(each['peak_mib'] for each in mine):.0f} MiB |"
        )
    return "\n".join(lines)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags.add_argument("--algorithms", nargs="+", default=list(NAMES))
    flags.add_argument("--draw", action="store_true", help="draw the results, run nothing")
    flags.add_argument("--one", help="run this one here and print it")
    options = flags.parse_args()
    if options.one:
        print("RUN " + json.dumps(run(options.one, options.seeds[0])))
        return
    runs: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for seed, name in itertools.product(options.seeds, [] if options.draw else options.algorithms):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.algorithms"]
        command += ["--one", name, "--seeds", str(seed)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        (line,) = [t for t in done.stdout.splitlines() if t.startswith("RUN ")]
        new = json.loads(line.removeprefix("RUN "))
        runs = [r for r in runs if (r["algorithm"], r["seed"]) != (name, seed)] + [new]
        RESULTS.write_text(json.dumps(runs, indent=1))
        print(name, seed, round(new["last_five"], 3), round(new["seconds"]), flush=True)
    for picture, colored in PICTURES.items():
        draw(runs, colored, IMAGES / f"{picture}.png")
    print(table(runs))


if __name__ == "__main__":
    main()
