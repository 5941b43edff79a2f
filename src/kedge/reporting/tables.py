"""Sends tables to reporting services and to the Hub (callbacks send the metrics)."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from torch import Tensor

from kedge.errors import HubError
from kedge.reporting.base import json_line
from kedge.reporting.hub import Hub, explain

Rows = Sequence[Mapping[str, object]]
logger = logging.getLogger(__name__)
_CARD = """\
---
tags:
- kedge
- completions
configs:
{configs}---
# Completions of a Kedge run
{model}
Prompts, completions and scores during training; `step-000012.jsonl` is after iteration 12.
"""


class TableLogger:
    """Sends tables to wandb, trackio, mlflow and tensorboard, and histograms to two of them.

    Args:
        services: names in ``report_to``; services without tables are ignored.
        tensorboard: returns the open ``SummaryWriter``, or None.
    """

    def __init__(
        self, services: Sequence[str], *, tensorboard: Callable[[], Any] = lambda: None
    ) -> None:
        self._services, self._tensorboard = tuple(services), tensorboard

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Do nothing: the reporting callbacks of transformers send metrics."""

    def table(self, name: str, rows: Rows, *, step: int) -> None:
        """Send a table."""
        if not rows:
            return
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        if (wandb := self._wandb()) is not None:
            data = [list(values) for values in zip(*columns.values(), strict=True)]
            table = wandb.Table(columns=list(columns), data=data)
            wandb.log({name: table, "train/global_step": step})
        if "trackio" in self._services:
            import trackio

            frame = importlib.import_module("pandas").DataFrame(columns)
            trackio.log({name: trackio.Table(dataframe=frame)})
        if "mlflow" in self._services:
            import mlflow

            if mlflow.active_run() is not None:
                mlflow.log_table(columns, f"{name}/step-{step:06d}.json")
        if (writer := self._tensorboard()) is not None:
            writer.add_text(name, markdown(rows), step)

    def histogram(self, name: str, values: Tensor, *, step: int) -> None:
        """Send a histogram of ``values`` [n] to wandb and tensorboard."""
        if (wandb := self._wandb()) is not None:
            wandb.log({name: wandb.Histogram(values.tolist()), "train/global_step": step})
        if (writer := self._tensorboard()) is not None:
            writer.add_histogram(name, values, step)

    def _wandb(self) -> Any:
        """The package if a run is open in it, else None."""
        wandb = importlib.import_module("wandb") if "wandb" in self._services else None
        return wandb if wandb is not None and wandb.run is not None else None

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


class HubTables:
    """Sends every table to a dataset repository, in the background and in order.

    The repository is created at once, so that a wrong token fails before training; later failures
    are only logged, once.

    Args:
        hub: the dataset repository.
        model: repository of the model, for the card.
    """

    def __init__(self, hub: Hub, *, model: str | None = None) -> None:
        self.hub, self._model = hub, model
        self._names: list[str] = []  # kinds of tables that the card lists
        self._uploads: list[Future[Any]] = []
        self._warned = False
        hub.create()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Do nothing: other trackers log metrics."""

    def table(self, name: str, rows: Rows, *, step: int) -> None:
        """Send one table, as ``NAME/step-000012.jsonl``."""
        if not rows:
            return
        if name not in self._names:
            self._names.append(name)
            self._send("README.md", self._card(), "The card")
        text = "".join(json_line({"step": step, **row}) for row in rows)
        self._send(f"{name}/step-{step:06d}.jsonl", text, f"{name} after iteration {step}")

    def close(self) -> None:
        """Wait for all uploads."""
        wait(self._uploads)

    def _send(self, path: str, text: str, message: str) -> None:
        try:
            upload = self.hub.write(path, text, message=message, blocking=False)
        except HubError as error:
            self._warn(error)
            return
        self._uploads = [x for x in self._uploads if not x.done()] + [upload]
        upload.add_done_callback(lambda done: self._warn(done.exception()))

    def _warn(self, error: BaseException | None) -> None:
        if error is not None and not self._warned:
            self._warned = True
            reason = error if isinstance(error, HubError) else explain(error, self.hub.repo_id)
            logger.warning("some completions were not uploaded to %s: %s", self.hub.url, reason)

    def _card(self) -> str:
        configs = "".join(
            f"- config_name: {json.dumps(name)}\n  data_files: {json.dumps(name + '/*.jsonl')}\n"
            for name in self._names
        )
        model = f"\nThe model: [{self._model}](https://hf.co/{self._model}).\n"
        return _CARD.format(configs=configs, model=model if self._model else "")
