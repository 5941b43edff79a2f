"""PPO with turn and token credit, SAO, RLOO and GRPO, at equal numbers of episodes.

python examples/agent/compare.py --tasks "text world" calculator --seeds 0 1 2
python examples/agent/compare.py --tasks "text world" --methods SAO RLOO

Every method of a seed starts from the same supervised model and trains on the same number of
episodes.  Finished runs are not repeated.  Writes results.json and curves.png to the output folder
and prints a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

from agent import METHODS, TASKS, Sizes, evaluate, supervise, train

Results = dict[str, dict[str, list[float]]]  # task -> method -> success of each seed


def run(task: str, method: str, seed: int, folder: Path, sizes: Sizes) -> float:
    """Success of one run on new seeds; it is trained unless its result is there."""
    base = folder / task.replace(" ", "_") / str(seed)
    output = base / method.lower().replace(", ", "-")
    result = output / "result.json"
    if not result.is_file():
        if not (base / "sft" / "config.json").is_file():
            supervise(TASKS[task], base, sizes, seed)
        if method == "supervised":
            output = base / "sft"
        else:
            train(TASKS[task], base / "sft", output, sizes, seed, method)
        found = evaluate(TASKS[task], output, sizes.evaluated, seed)
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(found))
    return float(json.loads(result.read_text())["success"])


def plot(folder: Path, tasks: list[str], seeds: list[int], methods: list[str]) -> None:
    """The mean score of training batches against episodes, a line per method."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 4), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for method in methods:
            name = method.lower().replace(", ", "-")
            runs: list[list[dict[str, Any]]] = []
            for seed in seeds:
                file = folder / task.replace(" ", "_") / str(seed) / name / "metrics.jsonl"
                lines = [json.loads(line) for line in file.read_text().splitlines()]
                runs.append([row for row in lines if "objective/scores" in row])
            points = list(zip(*runs, strict=False))
            means = [statistics.mean(row["objective/scores"] for row in point) for point in points]
            axis.plot([point[0]["episode"] for point in points], means, label=method)
        axis.set(title=task, xlabel="episodes", ylabel="success in training")
        axis.legend()
    figure.savefig(folder / "curves.png", dpi=120, bbox_inches="tight")


def main() -> None:
    """Run what is missing, and print a row per method."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--output_dir", default="runs/agent-compared", type=Path)
    flags.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    flags.add_argument("--iterations", type=int, default=Sizes.iterations)
    args = flags.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    folder, sizes = args.output_dir, Sizes(iterations=args.iterations)
    methods = ["supervised", *args.methods]
    results: Results = {task: {method: [] for method in methods} for task in args.tasks}
    for seed in args.seeds:
        for task in args.tasks:
            for method in methods:
                results[task][method].append(run(task, method, seed, folder, sizes))
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(folder, args.tasks, args.seeds, args.methods)
    print("| success on 500 new seeds |", " | ".join(args.tasks), "|")
    print("|---|" + "---|" * len(args.tasks))
    for method in methods:
        cells = [
            f"{statistics.mean(results[task][method]):.1%} ("
            + ", ".join(f"{x:.1%}" for x in results[task][method])
            + ")"
            for task in args.tasks
        ]
        print(f"| {method} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
