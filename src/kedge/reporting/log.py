"""Reads the logs of runs, ``metrics.jsonl`` with one row per iteration; compares and draws them."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kedge.records.errors import DataError

FILE = "metrics.jsonl"
AXES = {"episode": "responses trained on", "step": "iterations"}
_STOPS = ("stop_token", "stop_token_ids", "stop_strings")
_LARGEST = sys.float_info.max
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunLog:
    """Rows of training metrics in order, without evaluations."""

    name: str  # of the run's folder or file
    rows: Sequence[dict[str, float]]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the trainer, from run.json

    @property
    def fixed_length(self) -> bool:
        """Whether the options name no stop token or stop string."""
        return all(name in self.options and not self.options[name] for name in _STOPS)

    def series(self, metric: str) -> list[float]:
        """The finite values of a metric, in order; empty if it was never logged."""
        values = [row[metric] for row in self.rows if metric in row]
        return [x for x in values if math.isfinite(x)]

    def first(self, metric: str, fraction: float = 0.2) -> float:
        """Mean over the first ``fraction`` of the run, at least one row; NaN without the metric."""
        values = self.series(metric)
        return fmean(values[: max(1, round(len(values) * fraction))]) if values else math.nan

    def last(self, metric: str, fraction: float = 0.2) -> float:
        """Mean over the last ``fraction`` of the run, at least one row; NaN without the metric."""
        values = self.series(metric)
        return fmean(values[-max(1, round(len(values) * fraction)) :]) if values else math.nan


def read_log(run: str | Path) -> RunLog:
    """Read the log in a run's ``output_dir``, or a ``metrics.jsonl`` file.

    Damaged lines are skipped, with a warning that counts them.
    """
    rows = [row for row in read_rows(run) if "objective/scores" in row]
    if not rows:
        raise DataError(f"{log_file(run)} has no training rows (none with objective/scores)")
    return RunLog(Path(run).name, rows, read_options(log_file(run).parent))


def read_options(folder: Path) -> dict[str, Any]:
    """The trainer's options; {} without a readable ``run.json``."""
    try:
        options = json.loads((folder / "run.json").read_text(encoding="utf-8"))["options"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return options if isinstance(options, dict) else {}


def log_file(run: str | Path) -> Path:
    """The ``metrics.jsonl`` of a run."""
    path = Path(run).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{path} has no {FILE}: pass the output_dir of a run, or the file itself")
    return file


def read_rows(run: str | Path) -> list[dict[str, float]]:
    """All rows of the log, including evaluations, with their finite numbers."""
    rows = read_table(log_file(run))
    return [
        {k: float(x) for k, x in row.items() if isinstance(x, int | float) and abs(x) <= _LARGEST}
        for row in rows
    ]


def read_table(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a run's file, one per line; a warning counts lines that are damaged.

    Non-finite numbers become None, as Kedge writes them.
    """
    try:
        lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    rows = [row for line in lines if (row := _parse_row(line)) is not None]
    if len(rows) < len(lines):
        count, name = len(lines) - len(rows), f"{file.parent.name}/{file.name}"
        logger.warning("skipped %d damaged lines of %s", count, name)
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    def finite(text: str) -> float | None:
        return x if math.isfinite(x := float(text)) else None

    try:
        row = json.loads(line.decode(), parse_constant=lambda _: None, parse_float=finite)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_objects(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a data file, one per line; every line must be valid."""
    objects: list[dict[str, Any]] = []
    # Not splitlines, which also splits at other separators that responses may contain.
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}, line {number} is not JSON in UTF-8: {error}") from error
        if not isinstance(row, dict):
            shown = line[:80].decode(errors="replace")
            raise DataError(f"{file}, line {number} is not a JSON object: {shown}")
        objects.append(row)
    return objects


def score_change(log: RunLog) -> tuple[float, float, float]:
    """Mean score over the first and last fifth of a run, and the standard error of such a mean.

    The error is NaN without the scores' deviation and the number of responses.
    """
    responses = responses_per_batch(log) * max(1, round(len(log.rows) * 0.2))
    noise = (log.first("objective/scores_std") or math.nan) / responses**0.5
    return log.first("objective/scores"), log.last("objective/scores"), noise


def responses_per_batch(log: RunLog) -> float:
    """Responses per iteration; NaN if they were not logged."""
    episodes = log.series("episode")
    if len(episodes) == 1:
        return episodes[0] or math.nan
    return min((b - a for a, b in pairwise(episodes) if b > a), default=math.nan)


@dataclass(frozen=True, slots=True)
class Band:
    """A metric over several runs, at their common points."""

    x: list[float]  # episodes or iterations
    mean: list[float]
    low: list[float]
    high: list[float]


def band(runs: Sequence[RunLog], metric: str, axis: str = "episode") -> Band | None:
    """The metric over the runs, at the x values of the first; None if a run lacks it."""
    curves = [
        [(row[axis], row[metric]) for row in run.rows if metric in row and axis in row]
        for run in runs
    ]
    if not all(curves):
        return None
    points = [*zip(*curves, strict=False)]  # cut to the shortest curve
    columns = [[y for _, y in point] for point in points]
    return Band(
        x=[point[0][0] for point in points],
        mean=[fmean(c) for c in columns],
        low=[min(c) for c in columns],
        high=[max(c) for c in columns],
    )


def end_stats(
    runs: Sequence[RunLog], metric: str, *, at: Literal["start", "end"] = "end"
) -> tuple[float, float, float] | None:
    """Mean, minimum and maximum over runs; each run counts with the mean of a fifth."""
    means = [run.last(metric) if at == "end" else run.first(metric) for run in runs]
    values = [x for x in means if not math.isnan(x)]
    return (fmean(values), min(values), max(values)) if values else None


# -- pictures, drawn without a display -------------------------------------------------------------

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("score", ("objective/scores", "eval_objective/scores", "objective/rlhf_reward")),
    ("KL to the reference (nats per response)", ("objective/kl", "eval_objective/kl")),
    ("policy loss", ("loss/policy_avg",)),
    ("value loss", ("loss/value_avg",)),
    ("explained variance of the value", ("val/explained_variance",)),
    ("entropy (nats per token)", ("policy/entropy_avg",)),
    ("response length (tokens)", ("completions/mean_length", "completions/max_length")),
    ("ratio", ("val/ratio",)),
    ("clipped share of tokens", ("policy/clipfrac_avg", "val/clipfrac_avg")),
    ("gradient norm", ("grad_norm", "grad_norm/policy", "grad_norm/value")),
    ("learning rate", ("lr",)),
    ("episodes per second", ("eps",)),
)


def draw_curves(rows: Sequence[Mapping[str, Any]], file: str | Path) -> Path | None:
    """Draw the logged rows of a run, which have a "step" each, as a PNG.

    Returns None if no row holds a metric that is drawn, or matplotlib is not installed.
    """
    panels = {title: lines for title, names in PANELS if (lines := _lines(rows, names))}
    if not panels or importlib.util.find_spec("matplotlib") is None:
        return None
    return draw_panels(panels, file, columns=3, xlabel="iteration")


def draw_panels(
    panels: Mapping[str, Mapping[str, Band]], file: str | Path, *, columns: int, xlabel: str
) -> Path:
    """Draw one panel for each title, with a line and its band for each name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = math.ceil(len(panels) / columns)
    # Not pyplot: no window or global state, and freed with its last reference.
    figure = Figure(figsize=(2 + 3.7 * columns, 3 * height), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (title, curves) in enumerate(panels.items()):
        axes: Any = figure.add_subplot(height, columns, i + 1)
        for name, curve in curves.items():
            marker = "." if len(curve.x) < 40 else None
            (line,) = axes.plot(curve.x, curve.mean, label=name, marker=marker, linewidth=1.2)
            axes.fill_between(curve.x, curve.low, curve.high, color=line.get_color(), alpha=0.15)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(xlabel, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper left")
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    return file


def _lines(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Band]:
    """Values of each metric over the rows that have it; NaN if not finite."""
    lines = {}
    for name in names:
        logged = [row for row in rows if row.get(name) is not None]
        y = [float(row[name]) if math.isfinite(row[name]) else math.nan for row in logged]
        if not all(map(math.isnan, y)):
            lines[name] = Band([float(row["step"]) for row in logged], y, y, y)
    return lines
