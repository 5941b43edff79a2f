"""``kedge compare``: plots runs in one figure with bands over seeds, and prints a table."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.cli.flags import Flags
from kedge.errors import ConfigError, install_command
from kedge.reporting.log import AXES, Band, RunLog, band, ends, read_log

METRICS = ("objective/scores", "objective/kl", "policy/entropy_avg", "completions/mean_length")
EPILOG = """\
RUN is the output_dir of a run, or its metrics.jsonl.  NAME=RUN,RUN,... groups runs, for example
several seeds: the line is their mean, the band their range.
example: kedge compare ppo=runs/ppo-0,runs/ppo-1 rloo=runs/rloo-0,runs/rloo-1 --output both.png"""


def main(argv: Sequence[str]) -> None:
    """Plot and print."""
    flags = Flags("kedge compare", "Plot several runs in one figure.", EPILOG)
    flags.add_argument("runs", nargs="+", metavar="RUN")
    flags.add_argument("--metrics", nargs="+", default=list(METRICS), help="metrics to plot")
    flags.add_argument("--axis", choices=AXES, default="episode", help="x axis")
    flags.add_argument("--output", default="compare.png", help="file of the figure")
    chosen = flags.parse_args(list(argv))
    kinds = dict(kind(word) for word in chosen.runs)
    drawn = draw(kinds, chosen.metrics, chosen.axis, Path(chosen.output))
    show(kinds, chosen.metrics)
    print(f"kedge: the curves are in {drawn}")


def kind(word: str) -> tuple[str, list[RunLog]]:
    """Parse ``NAME=RUN,RUN``, or a single run named after its folder."""
    name, equals, places = word.partition("=")
    if not equals:
        return Path(word).name or word, [read_log(word)]
    listed = [place for place in places.split(",") if place]
    if not name or not listed:
        raise ConfigError(f"{word!r} must be NAME=RUN,RUN,... or a run")
    return name, [read_log(place) for place in listed]


def draw(kinds: dict[str, list[RunLog]], metrics: Sequence[str], axis: str, file: Path) -> Path:
    """Plot one panel for each metric that some run has.

    Raises:
        ConfigError: no run has any of the metrics, or matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"kedge compare needs matplotlib: {install_command('plots')}")
    panels: dict[str, dict[str, Band]] = {}
    for metric in metrics:
        for name, runs in kinds.items():
            if curve := band(runs, metric, axis):
                panels.setdefault(metric, {})[name] = curve
    if not panels:
        raise ConfigError(f"no run has any of {', '.join(metrics)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (metric, bands) in enumerate(panels.items()):
        axes: Any = figure.add_subplot(len(panels), 1, i + 1)
        for name, curve in bands.items():
            (line,) = axes.plot(curve.x, curve.mean, label=name)
            axes.fill_between(curve.x, curve.low, curve.high, color=line.get_color(), alpha=0.15)
        axes.set_title(metric, fontsize=10)
        axes.set_xlabel({"episode": "responses trained on", "step": "iterations"}[axis], fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    return file


def show(kinds: dict[str, list[RunLog]], metrics: Sequence[str]) -> None:
    """Mean and range of the first and the last fifth of every run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="first fifth -> last fifth of each run", title_justify="left")
    table.add_column("", no_wrap=True)
    for name, runs in kinds.items():
        table.add_column(name + (f" ({len(runs)} runs)" if len(runs) > 1 else ""), overflow="fold")
    for metric in metrics:
        table.add_row(metric, *(_change(runs, metric) for runs in kinds.values()))
    Console().print(table)


def _change(runs: list[RunLog], metric: str) -> str:
    start, end = ends(runs, metric, at="start"), ends(runs, metric)
    if start is None or end is None:
        return "-"
    mean, low, high = end
    spread = f" ({low:.3g} .. {high:.3g})" if len(runs) > 1 else ""
    return f"{start[0]:.3g} -> {mean:.3g}{spread}"
