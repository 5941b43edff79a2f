"""``kedge compare``, ``doctor`` and ``report``: read the logs of runs, finished or not."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from kedge.cli.flags import Flags, print_table
from kedge.ext.report.doctor import examine, open_question
from kedge.ext.report.report import gather, page
from kedge.output import check_file, check_picture
from kedge.records.errors import ConfigError, install_command
from kedge.reporting.log import AXES, Band, RunLog, band, draw_panels, end_stats, log_file, read_log

METRICS = ("objective/scores", "objective/kl", "policy/entropy_avg", "completions/mean_length")
COMPARE = """\
RUN is the output_dir of a run, or its metrics.jsonl.  NAME=RUN,RUN,... groups runs, for example
several seeds: the line is their mean, the band their range.
example: kedge compare ppo=runs/ppo-0,runs/ppo-1 rloo=runs/rloo-0,runs/rloo-1 --output both.png"""
DOCTOR = """\
Prints what is wrong with runs, the numbers that say so, and what to try.  The exit code is 1 if
anything was found."""
REPORT = """\
RUN is the output_dir of a run, finished or not.  The page is self-contained: open it from disk or
send it.
example: kedge report runs/one --output one.html"""


def compare(argv: list[str]) -> int:
    """Plot several runs in one figure, with bands over seeds."""
    flags = Flags("kedge compare", "Plot several runs in one figure.", COMPARE)
    flags.add_argument("runs", nargs="+", metavar="RUN")
    flags.add_argument("--metrics", nargs="+", default=list(METRICS), help="metrics to plot")
    flags.add_argument("--axis", choices=[*AXES], default="episode", help="x axis")
    flags.add_argument("--output", default="compare.png", help="file of the figure")
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


def doctor(argv: list[str]) -> int:
    """Diagnose a run from its log and suggest fixes.

    Returns 1 if there are findings.
    """
    flags = Flags("kedge doctor", DOCTOR)
    text = "output_dir of a run, finished or not, or its metrics.jsonl"
    flags.add_argument("runs", nargs="+", metavar="RUN", help=text)
    count = 0
    for place in flags.parse_args(argv).runs:
        log = read_log(place)
        findings = examine(log)
        count += len(findings)
        iteration = log.rows[-1].get("step", len(log.rows))
        read = f"{len(log.rows)} rows of metrics up to iteration {iteration:.0f}"
        print(f"{place}: {read}{'' if findings else ', nothing found'}")
        if not findings:
            print(f"  {open_question(log)}")
        for finding in findings:
            print(f"  {finding.rule}: {finding.seen}\n      try: {finding.advice}")
    return int(count > 0)


def report(argv: list[str]) -> int:
    """Write an HTML report of a run: curves, completions, tokens."""
    description = "One HTML page of a run: overview, curves, completions, tokens."
    flags = Flags("kedge report", description, REPORT)
    flags.add_argument("run", metavar="RUN")
    flags.add_argument("--output", help="default: report.html in the run's folder")
    flags.add_argument(
        "--responses", type=int, default=5000, help="maximum responses of each kind on the page"
    )
    chosen = flags.parse_args(argv)
    if chosen.responses < 1:
        raise ConfigError(f"--responses {chosen.responses} must be 1 or more")
    place = log_file(chosen.run).parent
    file = Path(chosen.output) if chosen.output else place / "report.html"
    check_file("--output", file)
    data = gather(chosen.run, most=chosen.responses)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(data), encoding="utf-8")
    print(f"kedge: the report is in {file} ({file.stat().st_size / 2**20:.1f} MiB)")
    return 0
