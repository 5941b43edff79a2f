"""``kedge compare``: plots runs in one figure with bands over seeds, and prints a table."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from kedge.cli.flags import Flags, print_table
from kedge.errors import ConfigError, install_command
from kedge.reporting.curves import draw_panels
from kedge.reporting.log import AXES, Band, RunLog, band, end_stats, read_log

METRICS = ("objective/scores", "objective/kl", "policy/entropy_avg", "completions/mean_length")
EPILOG = """\
RUN is the output_dir of a run, or its metrics.jsonl.  NAME=RUN,RUN,... groups runs, for example
several seeds: the line is their mean, the band their range.
example: kedge compare ppo=runs/ppo-0,runs/ppo-1 rloo=runs/rloo-0,runs/rloo-1 --output both.png"""


def main(argv: Sequence[str]) -> None:
    """Plot one panel for each metric that some run has, and print a table."""
    flags = Flags("kedge compare", "Plot several runs in one figure.", EPILOG)
    flags.add_argument("runs", nargs="+", metavar="RUN")
    flags.add_argument("--metrics", nargs="+", default=list(METRICS), help="metrics to plot")
    flags.add_argument("--axis", choices=[*AXES], default="episode", help="x axis")
    flags.add_argument("--output", default="compare.png", help="file of the figure")
    chosen = flags.parse_args(list(argv))
    kinds = dict(kind(word) for word in chosen.runs)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"kedge compare needs matplotlib: {install_command('plots')}")
    panels: dict[str, dict[str, Band]] = {}
    for metric in chosen.metrics:
        for name, runs in kinds.items():
            if curve := band(runs, metric, chosen.axis):
                panels.setdefault(metric, {})[name] = curve
    if not panels:
        raise ConfigError(f"no run has any of {', '.join(chosen.metrics)}")
    picture = draw_panels(panels, chosen.output, columns=1, xlabel=AXES[chosen.axis])
    show(kinds, chosen.metrics)
    print(f"kedge: the curves are in {picture}")


def kind(word: str) -> tuple[str, list[RunLog]]:
    """Parse ``NAME=RUN,RUN``, or a single run named after its folder."""
    name, equals, places = word.partition("=")
    if not equals:
        return Path(word).name or word, [read_log(word)]
    listed = [place for place in places.split(",") if place]
    if not name or not listed:
        raise ConfigError(f"{word!r} must be NAME=RUN,RUN,... or a run")
    return name, [read_log(place) for place in listed]


def show(kinds: dict[str, list[RunLog]], metrics: Sequence[str]) -> None:
    """Mean and range of the first and the last fifth of every run."""
    from rich.table import Column

    names = [
        name + (f" ({len(runs)} runs)" if len(runs) > 1 else "") for name, runs in kinds.items()
    ]
    head = [Column(no_wrap=True), *(Column(name, overflow="fold") for name in names)]
    rows = []
    for metric in metrics:
        cells = [metric]
        for runs in kinds.values():
            start, end = end_stats(runs, metric, at="start"), end_stats(runs, metric)
            spread = f" ({end[1]:.3g} .. {end[2]:.3g})" if end and len(runs) > 1 else ""
            cells.append(f"{start[0]:.3g} -> {end[0]:.3g}{spread}" if start and end else "-")
        rows.append(cells)
    print_table("first fifth -> last fifth of each run", rows, head)
