"""Sends tables and histograms to reporting services (their metrics are sent by callbacks)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Rows = Sequence[Mapping[str, object]]


class Tables:
    """Sends tables to wandb, trackio, mlflow and tensorboard, and histograms to two of them.

    Args:
        services: names in ``report_to``; services without tables are ignored.
        tensorboard: returns the open ``SummaryWriter``, or None.
    """

    def __init__(
        self, services: Sequence[str], *, tensorboard: Callable[[], Any] = lambda: None
    ) -> None:
        self._services = tuple(services)
        senders = {"wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
        self._send = [senders[name] for name in services if name in senders]
        self._tensorboard = tensorboard

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Do nothing: the reporting callbacks of transformers send metrics."""

    def table(self, name: str, rows: Rows, *, step: int) -> None:
        """Send a table."""
        if not rows:
            return
        for send in self._send:
            send(name, rows, step)
        writer = self._tensorboard()
        if writer is not None:
            writer.add_text(name, markdown(rows), step)

    def histogram(self, name: str, values: Tensor, *, step: int) -> None:
        """Send a histogram to wandb and tensorboard.

        Args:
            name: of the chart.
            values: numbers [n].
            step: iteration.
        """
        if "wandb" in self._services:
            import wandb

            if wandb.run is not None:
                chart = wandb.Histogram(values.tolist())
                wandb.log({name: chart, "train/global_step": step})
        writer = self._tensorboard()
        if writer is not None:
            writer.add_histogram(name, values, step)

    def close(self) -> None:
        """Do nothing: the reporting callbacks own the connections."""


def markdown(rows: Rows) -> str:
    """A Markdown table; every cell is one line of plain text."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[_cell(row[key]) for key in rows[0]] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(x: object) -> str:
    text = f"{x:.6g}" if isinstance(x, float) else str(x)
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return escaped.replace("`", "&#96;").replace("\r", "").replace("\n", "<br>")


def _wandb(name: str, rows: Rows, step: int) -> None:
    import wandb

    if wandb.run is not None:
        columns = list(rows[0])
        table = wandb.Table(columns=columns, data=[[row[c] for c in columns] for row in rows])
        wandb.log({name: table, "train/global_step": step})


def _trackio(name: str, rows: Rows, step: int) -> None:
    import trackio

    frame = importlib.import_module("pandas").DataFrame([dict(row) for row in rows])
    trackio.log({name: trackio.Table(dataframe=frame)})


def _mlflow(name: str, rows: Rows, step: int) -> None:
    import mlflow

    if mlflow.active_run() is not None:
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        mlflow.log_table(columns, f"{name}/step-{step:06d}.json")
