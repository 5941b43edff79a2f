"""Curves of the main metrics as one PNG, drawn without a display."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
_COLUMNS = 3


def draw_curves(rows: Sequence[Mapping[str, Any]], file: str | Path) -> Path | None:
    """Draw the logged rows of a run.

    Args:
        rows: logged rows with a "step" each, as in ``trainer.state.log_history``.
        file: the PNG to write.

    Returns:
        The file, or None if no row holds a metric that is drawn, or matplotlib is not installed.
    """
    panels = [(title, lines) for title, names in PANELS if (lines := _lines(rows, names))]
    if not panels or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = math.ceil(len(panels) / _COLUMNS)
    # Not a pyplot figure: no window, no global state, freed with the last reference.
    figure = Figure(figsize=(4.2 * _COLUMNS, 2.9 * height), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (title, lines) in enumerate(panels):
        axes = figure.add_subplot(height, _COLUMNS, i + 1)
        axes.set_title(title, fontsize=10)
        for name, (x, y) in lines.items():
            axes.plot(x, y, label=name, marker="." if len(x) < 40 else None, linewidth=1.2)
        axes.grid(alpha=0.3)
        axes.set_xlabel("iteration", fontsize=8)
        axes.tick_params(labelsize=8)
        if len(lines) > 1:
            axes.legend(fontsize=7, loc="upper left")
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    return file


def _lines(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, tuple[list[float], list[float]]]:
    """Steps and values of each metric over the rows that have it; NaN where not finite."""
    lines = {}
    for name in names:
        kept = [row for row in rows if row.get(name) is not None]
        y = [float(row[name]) if math.isfinite(row[name]) else math.nan for row in kept]
        if not all(map(math.isnan, y)):
            lines[name] = ([float(row["step"]) for row in kept], y)
    return lines
