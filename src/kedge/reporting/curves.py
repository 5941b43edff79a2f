"""Draws curves of one or several runs as a picture, without a display."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.reporting.log import Band

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
