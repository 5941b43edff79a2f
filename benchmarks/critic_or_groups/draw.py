"""The tables and pictures of the study, from the runs in the record.

python -m benchmarks.critic_or_groups.draw && python -m docs.redraw
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.critic_or_groups.__main__ import (
    ABOUT,
    TEXT_WORLD,
    TUNING_SEED,
    chosen_rate,
    known,
    tuned_as,
)
from kedge.math.intervals import t_quantile

RECORDS = Path(__file__).parents[1] / "records"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
GAMES = {"gates": "Gates", "lake": "Lake", "text-world": "Text world"}
METHODS = ("PPO", "PPO, credit by turn", "SAO", "RLOO", "GRPO", "REINFORCE++")
WITHOUT_CRITIC = METHODS[3:]
NO_WARM_UP = "PPO, no value warm-up"
BY_TURN = "PPO, lambda by turn"
VARIANTS = (NO_WARM_UP, "PPO, value not trained")
PRICES = (0.25, 1, 4, 16)  # of sampling, for the pictures; the tables have the second and the last

LAGGED = (NO_WARM_UP, "SAO", "GRPO", "REINFORCE++")

Run = dict[str, Any]
Runs = dict[tuple[str, int, str], dict[int, Run]]  # game, length, method -> seed -> run


def load() -> tuple[dict[int, Runs], list[Run]]:
    """Runs that count, by lag; and those that chose the learning rates."""
    counted: dict[int, Runs] = {}
    chosen: list[Run] = []
    rate = cache(chosen_rate)
    for game in GAMES:
        for run in known(game):
            if run["seed"] == TUNING_SEED:
                chosen.append(run)
            elif run["rate"] == rate(game, tuned_as(run["method"])):
                key = game, run["length"], run["method"]
                counted.setdefault(run["lag"], {}).setdefault(key, {})[run["seed"]] = run
    return counted, chosen


def steps(values: Sequence[float]) -> list[float]:
    """What each iteration adds to a running total."""
    return [b - a for a, b in zip((0, *values), values, strict=False)]


def cost(price: float) -> Callable[[Run], list[float]]:
    """CPU seconds of every iteration, those of sampling at this many times their price."""

    def of(run: Run) -> list[float]:
        rows = run["rows"]
        parts = zip(rows["rollout"], rows["annotate"], rows["update"], strict=True)
        shares = [rollout / (rollout + annotate + update) for rollout, annotate, update in parts]
        whole = steps(rows["cpu"])
        return [c * (1 + (price - 1) * s) for c, s in zip(whole, shares, strict=True)]

    return of


def episodes(run: Run) -> list[float]:
    """Episodes of every iteration."""
    return steps(run["rows"]["episodes"])


def tokens(run: Run) -> list[float]:
    """Tokens of every iteration, those of prompts and observations as well."""
    return steps(run["rows"]["tokens"])


def area(run: Run, spent: list[float], budget: float) -> float:
    """Mean success in training up to a budget."""
    total = left = 0.0
    for score, amount in zip(run["rows"]["score"], spent, strict=True):
        part = min(amount, budget - left)
        total, left = total + score * part, left + part
    return total / budget


def areas(
    runs: Runs, game: str, length: int, measure: Callable[[Run], list[float]]
) -> dict[str, dict[int, float]]:
    """The area of every method and seed, up to what the cheapest run of the seed spent."""
    every = (*METHODS, NO_WARM_UP)
    mine = {m: runs[game, length, m] for m in every if (game, length, m) in runs}
    seeds = set.intersection(*(set(by_seed) for by_seed in mine.values())) if mine else set()
    found: dict[str, dict[int, float]] = {m: {} for m in mine}
    for seed in sorted(seeds):
        spent = {m: measure(by_seed[seed]) for m, by_seed in mine.items()}
        budget = min(map(sum, spent.values()))
        for m, amounts in spent.items():
            found[m][seed] = area(mine[m][seed], amounts, budget)
    return found


def difference(a: dict[int, float], b: dict[int, float]) -> tuple[float, float]:
    """Mean difference of two methods on the same seeds, and half of its 95% interval."""
    pairs = [a[seed] - b[seed] for seed in sorted(a)]
    half = t_quantile(0.975, len(pairs) - 1) * stdev(pairs) / len(pairs) ** 0.5
    return fmean(pairs), half


def points(a: dict[int, float], b: dict[int, float]) -> str:
    """The difference of two methods in points, with its interval."""
    mean, half = difference(a, b)
    return f"{100 * mean:+.1f} ± {100 * half:.1f}"


def lengths_of(runs: Runs, game: str) -> list[int]:
    """Lengths of a game with PPO, PPO without warm-up and all methods without a critic."""
    needed = {"PPO", NO_WARM_UP, *WITHOUT_CRITIC}
    every = sorted({length for g, length, _ in runs if g == game})
    return [n for n in every if needed <= {m for g, length, m in runs if (g, length) == (game, n)}]


def titles(game: str, lengths: list[int]) -> list[str]:
    """Heads of the columns."""
    return ["about 11 turns"] if game == TEXT_WORLD else [f"{n} moves" for n in lengths]


def success(runs: Runs, game: str, lengths: list[int]) -> dict[str, Any]:
    """Table: mean success in training, and on new seeds after it."""
    rows = []
    for method in (*METHODS, NO_WARM_UP, *([BY_TURN] if game == TEXT_WORLD else [])):
        row = [method]
        for length in lengths:
            if (game, length, method) not in runs:
                row.append("not run")
                continue
            over = [fmean(r["rows"]["score"]) for r in runs[game, length, method].values()]
            end = fmean(r["end"]["success"] for r in runs[game, length, method].values())
            row.append(f"{fmean(over):.1%}, then {end:.1%}")
        rows.append(row)
    starts = ["before training"]
    for length in lengths:
        every = runs[game, length, "PPO"].values()
        starts += [f"{fmean(run['start']['success'] for run in every):.1%}"]
    return {"columns": ["", *titles(game, lengths)], "rows": [starts, *rows]}


def against(
    runs: Runs,
    game: str,
    lengths: list[int],
    measures: dict[str, Callable[[Run], list[float]]],
    critic: str,
) -> dict[str, Any]:
    """Table: success of a method with a critic minus that of each without, by measure."""
    rows = []
    for name, measure in measures.items():
        for other in WITHOUT_CRITIC:
            row = [name, other]
            for length in lengths:
                found = areas(runs, game, length, measure)
                row.append(points(found[critic], found[other]) if critic in found else "not run")
            rows.append(row)
    return {"columns": ["equal", "compared with", *titles(game, lengths)], "rows": rows}


def worst(runs: Runs, game: str, lengths: list[int]) -> dict[str, Any]:
    """Table: what a trained value changes; success in training, after it, and of the worst seed."""
    rows, trained = [], ["trained minus not trained, after training"]
    for method in (NO_WARM_UP, VARIANTS[1], *WITHOUT_CRITIC):
        row = [method]
        for length in lengths:
            every = runs[game, length, method].values()
            ends = [run["end"]["success"] for run in every]
            over = fmean(fmean(run["rows"]["score"]) for run in every)
            row.append(f"{over:.1%}, {fmean(ends):.1%}, {min(ends):.1%}")
        rows.append(row)
    for length in lengths:
        with_critic, without = (
            {seed: run["end"]["success"] for seed, run in runs[game, length, method].items()}
            for method in VARIANTS
        )
        trained.append(points(with_critic, without))
    return {"columns": ["", *titles(game, lengths)], "rows": [*rows, trained]}


def lambdas(runs: Runs) -> dict[str, Any]:
    """Table: what credit by turn and its longer horizon change in the text world."""
    rows = []
    pairs = (BY_TURN, "PPO"), ("PPO, credit by turn", BY_TURN), ("PPO, credit by turn", "PPO")
    for pair in pairs:
        a, b = (runs[TEXT_WORLD, ABOUT, method].items() for method in pair)
        over = [{s: fmean(run["rows"]["score"]) for s, run in by_seed} for by_seed in (a, b)]
        ends = [{s: run["end"]["success"] for s, run in by_seed} for by_seed in (a, b)]
        rows.append([" minus ".join(pair), points(*over), points(*ends)])
    return {"columns": ["", "in training", "after training"], "rows": rows}


def complete(by_lag: dict[int, Runs]) -> dict[int, Runs]:
    """The lags with which every method of ``LAGGED`` ran on two seeds or more."""
    keys = [(TEXT_WORLD, ABOUT, method) for method in LAGGED]
    return {
        lag: runs for lag, runs in by_lag.items() if all(len(runs.get(key, ())) > 1 for key in keys)
    }


def lags(by_lag: dict[int, Runs]) -> dict[str, Any]:
    """Table: success in the text world by lag, and PPO's lead over each other method."""
    scores: dict[str, dict[int, dict[int, float]]] = {m: {} for m in LAGGED}
    rows = []
    for method in LAGGED:
        row = [method]
        for lag, runs in sorted(by_lag.items()):
            by_seed = runs[TEXT_WORLD, ABOUT, method]
            scores[method][lag] = {s: fmean(run["rows"]["score"]) for s, run in by_seed.items()}
            end = fmean(run["end"]["success"] for run in by_seed.values())
            row.append(f"{fmean(scores[method][lag].values()):.1%}, then {end:.1%}")
        rows.append([*row, ""])
    for other in LAGGED[1:]:
        leads = []
        for lag in sorted(by_lag):
            ours, theirs = scores[NO_WARM_UP][lag], scores[other][lag]
            leads.append({seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()})
        zero: dict[int, float] = dict.fromkeys(leads[0], 0.0)
        changes = points(leads[-1], {seed: leads[0][seed] for seed in leads[-1]})
        row = [f"PPO minus {other}", *(points(lead, zero) for lead in leads), changes]
        rows.append(row)
    columns = ["", *(f"lag {lag}" for lag in sorted(by_lag))]
    return {"columns": [*columns, f"change from lag 0 to {max(by_lag)}"], "rows": rows}


def rates(chosen: list[Run]) -> dict[str, Any]:
    """Table: mean success in training of every rate that was tried."""
    names = sorted({run["rate"] for run in chosen})
    rows = []
    for game, title in GAMES.items():
        for method in METHODS:
            row = [title, method]
            for rate in names:
                mine = [
                    fmean(run["rows"]["score"])
                    for run in chosen
                    if (run["game"], run["method"], run["rate"]) == (game, method, rate)
                ]
                row.append(f"{fmean(mine):.1%}" if mine else "not run")
            rows.append(row)
    return {"columns": ["", "", *(f"{rate:g}" for rate in names)], "rows": rows}


def chat() -> dict[str, Any]:
    """Table: methods on the chat task, against PPO with a value head on the policy."""
    runs: dict[str, dict[int, Run]] = {}
    for run in known("chat"):
        runs.setdefault(run["method"], {})[run["seed"]] = run
    rows, last = [], len(runs["PPO"][0]["rows"]["score"]) // 2
    for method, by_seed in runs.items():
        every = [run["rows"] for _, run in sorted(by_seed.items())]
        means = [fmean(r["score"]) for r in every]
        base = {seed: fmean(run["rows"]["score"]) for seed, run in runs["PPO"].items()}
        mean, half = difference(dict(zip(sorted(by_seed), means, strict=True)), base)
        row = [method, f"{fmean(means):.3f} ({', '.join(f'{x:.3f}' for x in means)})"]
        row += ["" if method == "PPO" else f"{mean:+.3f} ± {half:.3f}"]
        row += [f"{fmean(fmean(r['score'][-last:]) for r in every):.3f}"]
        explained = [x for r in every for x in r["explained"][-last:]]
        row += [f"{median(explained):.2f}" if explained else ""]
        row += [f"{fmean(r['cpu'][0] for r in every):.0f}"]
        rows.append(row)
    columns = ["", "score, mean and each seed", "minus PPO", "second half"]
    return {"columns": [*columns, "explained variance", "CPU s"], "rows": rows}


def draw_curves(runs: Runs, game: str, lengths: list[int]) -> None:
    """Success in training against episodes: mean of seeds, a picture for each length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(lengths), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for axes, length, title in zip(all_axes, lengths, titles(game, lengths), strict=True):
        for number, method in enumerate((*METHODS, NO_WARM_UP)):
            if (game, length, method) not in runs:
                continue
            found = list(runs[game, length, method].values())
            size = 64 // int(found[0]["rows"]["episodes"][0])  # SAO's iterations have 16 episodes
            curves = [
                [fmean(r["rows"]["score"][i : i + size]) for i in range(0, 20 * size, size)]
                for r in found
            ]
            means = [fmean(values) for values in zip(*curves, strict=True)]
            line = "-" if method not in WITHOUT_CRITIC else "--"
            x = [64 * (i + 1) for i in range(len(means))]
            axes.plot(x, means, line, color=f"C{number}", label=method)
        axes.set(title=f"{GAMES[game]}, {title}", xlabel="episodes")
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("success in training")
    all_axes[0].legend(fontsize=8)
    figure.savefig(IMAGES / f"critic_{game}.png", dpi=110)


def draw_prices(runs: Runs, game: str, lengths: list[int]) -> None:
    """How far PPO without value warm-up is ahead of each group method, by the price of sampling."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(lengths), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for axes, length, title in zip(all_axes, lengths, titles(game, lengths), strict=True):
        for other in WITHOUT_CRITIC:
            points = []
            for price in PRICES:
                found = areas(runs, game, length, cost(price))
                points.append(difference(found[NO_WARM_UP], found[other]))
            means, halves = zip(*((100 * m, 100 * h) for m, h in points), strict=True)
            axes.errorbar(PRICES, means, halves, capsize=3, label=f"minus {other}")
        axes.axhline(0, color="0.5", linewidth=1)
        axes.set_xscale("log", base=4)
        axes.set(title=f"{GAMES[game]}, {title}", xlabel="price of sampling / training")
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("points, at equal cost")
    all_axes[-1].legend(fontsize=8)
    figure.savefig(IMAGES / f"critic_price_{game}.png", dpi=110)


def main() -> None:
    """Write the tables and the pictures."""
    by_lag, chosen = load()
    runs = by_lag[0]
    measures: dict[str, Callable[[Run], list[float]]] = {"episodes": episodes, "tokens": tokens}
    measures |= {f"cost, sampling x {price:g}": cost(price) for price in PRICES[1::2]}
    tables: dict[str, Any] = {
        "rates": rates(chosen),
        "lags": lags(complete(by_lag)),
        "chat": chat(),
    }
    tables["lambdas"] = lambdas(runs)
    for game in GAMES:
        if lengths := lengths_of(runs, game):
            tables[f"success_{game}"] = success(runs, game, lengths)
            equal = {"episodes": episodes}
            for critic, name in (("PPO", "ppo"), ("PPO, credit by turn", "turn"), ("SAO", "sao")):
                shown = measures if (name, game) == ("ppo", TEXT_WORLD) else equal
                tables[f"{name}_{game}"] = against(runs, game, lengths, shown, critic)
            tables[f"warm_{game}"] = against(runs, game, lengths, measures, NO_WARM_UP)
            both = [n for n in lengths if all((game, n, m) in runs for m in VARIANTS)]
            tables[f"worst_{game}"] = worst(runs, game, both)
            draw_curves(runs, game, lengths)
            draw_prices(runs, game, lengths)
    every = [run for game in GAMES for run in known(game)]
    about = {
        "question": "For which length of episode, and at which price, does a critic pay?",
        "command": "python -m benchmarks.critic_or_groups, first with --choose",
        "commits": sorted({run["commit"] for run in every}),
        "machines": sorted({run["machine"] for run in every}),
        "versions": sorted({run["versions"] for run in every}),
        "runs": len(every),
        "cpu_hours": round(sum(run["rows"]["cpu"][-1] for run in every) / 3600, 2),
    }
    text = json.dumps({"about": about, "tables": tables}, indent=1, ensure_ascii=False)
    (RECORDS / "critic_or_groups.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
