"""``kedge compare``, ``doctor`` and ``report``: read the logs of runs, finished or not."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev, variance

from kedge.cli.flags import Flags, print_table
from kedge.ext.report.doctor import MIN_ROWS, examine, open_question
from kedge.ext.report.report import gather, gather_pair, page
from kedge.math.intervals import t_quantile
from kedge.output import check_file, check_picture
from kedge.records.errors import ConfigError, install_command
from kedge.reporting.base import write_whole
from kedge.reporting.log import AXES, Band, RunLog, band, draw_panels, end_stats, log_file, read_log
from kedge.reporting.log import read_rows as read_all

RELOAD = 15  # seconds between two versions of a live page
METRICS = ("objective/scores", "objective/kl", "policy/entropy_avg", "completions/mean_length")
COMPARE = """\
RUN is the output_dir of a run, or its metrics.jsonl.  NAME=RUN,RUN,... groups runs, for example
over seeds: the line shows their mean, and the band their range.  The difference between each group
and the first is printed with an interval, paired by seed if both groups have the same seeds.
example: kedge compare ppo=runs/ppo-0,runs/ppo-1 rloo=runs/rloo-0,runs/rloo-1 --output both.png"""
DOCTOR = """\
Prints the problems found in runs, the numbers that show them, and what to try.  The exit code is 1
if there are any."""
REPORT = """\
RUN is the output_dir of a run, finished or not.  The page is self-contained: open it from disk or
send it.
For two runs, the page shows their curves together, the settings that differ, and answers to the
same prompts side by side.  With --live, it is rewritten every few seconds, and an open page reloads
itself, until the run ends or you press Ctrl-C.
examples: kedge report runs/one --output one.html
          kedge report runs/one runs/two"""


def compare(argv: list[str]) -> int:
    """Plot several runs in one figure, with bands over seeds."""
    flags = Flags("kedge compare", "Plot several runs in one figure.", COMPARE)
    flags.add_argument("runs", nargs="+", metavar="RUN", help="run, or NAME=RUN,RUN,...")
    flags.add_argument("--metrics", nargs="+", default=list(METRICS), help="metrics to plot")
    flags.add_argument("--axis", choices=[*AXES], default="episode", help="what the x axis shows")
    flags.add_argument("--output", default="compare.png", help="file for the figure")
    chosen = flags.parse_args(argv)
    check_picture("--output", chosen.output)
    kinds = dict(read_runs(word) for word in chosen.runs)
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
    return 0


def read_runs(word: str) -> tuple[str, list[RunLog]]:
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
    (first, base), *others = kinds.items()
    pairs = [(m, name, difference(runs, base, m)) for name, runs in others for m in metrics]
    found = [(f"{name} - {first}", metric, text) for metric, name, text in pairs if text]
    if found:
        print_table("difference of the last fifths, with the 95% interval over runs", found)
    elif others:
        print("kedge: name several seeds (NAME=RUN,RUN,...) to compare a difference with chance")


def difference(runs: Sequence[RunLog], base: Sequence[RunLog], metric: str) -> str | None:
    """Mean difference with its t interval: paired if both have the same seeds, else Welch's.

    None if either group has fewer than two runs with the metric.
    """
    a, b = (
        [(run.options.get("seed"), x) for run in group if math.isfinite(x := run.last(metric))]
        for group in (runs, base)
    )
    if min(len(a), len(b)) < 2:
        return None
    by_seed, base_by_seed = dict(a), dict(b)
    if len(a) == len(b) == len(by_seed) and by_seed.keys() == base_by_seed.keys():
        pairs = [x - base_by_seed[seed] for seed, x in a]
        error, freedom = stdev(pairs) / len(pairs) ** 0.5, len(pairs) - 1.0
        counted = f"{len(pairs)} pairs with equal seeds"
    else:
        parts = [(variance(x for _, x in group) / len(group), len(group) - 1) for group in (a, b)]
        error = sum(part for part, _ in parts) ** 0.5
        freedom = error**4 / sum(part**2 / free for part, free in parts) if error else 1.0
        counted = f"{len(a)} and {len(b)} runs"
    half = t_quantile(0.975, int(freedom)) * error
    return f"{fmean(x for _, x in a) - fmean(x for _, x in b):+.3g} ± {half:.2g} ({counted})"


def doctor(argv: list[str]) -> int:
    """Diagnose a run from its log and suggest fixes.

    Returns 1 if there are findings.
    """
    flags = Flags("kedge doctor", DOCTOR)
    text = "output_dir or metrics.jsonl of a run, finished or not"
    flags.add_argument("runs", nargs="+", metavar="RUN", help=text)
    count = 0
    for place in flags.parse_args(argv).runs:
        log = read_log(place)
        findings = examine(log)
        count += len(findings)
        rows, iteration = len(log.rows), log.rows[-1].get("step", len(log.rows))
        read = f"{rows} rows of metrics up to iteration {iteration:.0f}"
        print(f"{place}: {read}{'' if findings else ', nothing found'}")
        if not findings:
            print(f"  {open_question(log)}")
        for finding in findings:
            print(f"  {finding.rule}: {finding.seen}\n      try: {finding.advice}")
        if rows < MIN_ROWS:
            few = f"{rows} row{'s' * (rows != 1)}: too few to judge a trend, which takes"
            print(f"  {few} {MIN_ROWS}; train longer, or log every iteration (logging_steps: 1)")
    return int(count > 0)


def report(argv: list[str]) -> int:
    """Write an HTML report of a run, or of two: curves, completions, tokens."""
    description = "Write an HTML page about a run, or two: overview, curves, completions, tokens."
    flags = Flags("kedge report", description, REPORT)
    flags.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of one run, or of two")
    text = "file to write (default: report.html in the run's folder; for two runs, compare.html)"
    flags.add_argument("--output", help=text)
    flags.add_argument(
        "--responses", type=int, default=5000, help="maximum number of responses of each kind"
    )
    flags.add_argument("--live", action="store_true", help="rewrite the page while the run trains")
    chosen = flags.parse_args(argv)
    runs, most = chosen.runs, chosen.responses
    if most < 1:
        raise ConfigError(f"--responses {most} must be 1 or more")
    if len(runs) > 2:
        raise ConfigError(f"kedge report reads one run or two, got {len(runs)}; see kedge compare")
    place = log_file(runs[0]).parent / "report.html" if len(runs) == 1 else Path("compare.html")
    file = Path(chosen.output) if chosen.output else place
    check_file("--output", file)
    live = chosen.live
    while True:
        live = live and not all(any("train_runtime" in row for row in read_all(r)) for r in runs)
        data = gather_pair(*runs, most=most) if runs[1:] else gather(*runs, most=most)
        write_whole(file, page(data | {"live": RELOAD if live else 0}))
        if not live:
            break
        try:
            time.sleep(RELOAD)
        except KeyboardInterrupt:
            live = False  # the last version does not reload
    print(f"kedge: the report is in {file} ({file.stat().st_size / 2**20:.1f} MiB)")
    return 0
