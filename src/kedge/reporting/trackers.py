"""Trackers of a run: files, screen, services and the hub, with links between their pages."""

from __future__ import annotations

import importlib
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback

from kedge import plugins
from kedge.config.base import OnPolicyConfig
from kedge.data import DatasetPrompts
from kedge.records.protocols import Tracker
from kedge.reporting.base import (
    BestEffortWriter,
    CompositeTracker,
    JsonlTracker,
    format_duration,
    required_write,
)
from kedge.reporting.hub import PushOnSave
from kedge.reporting.run_info import add_links, markdown

Rows = Sequence[Mapping[str, object]]
logger = logging.getLogger(__name__)
SHOWN = {
    "objective/scores": "score",
    "objective/kl": "kl",
    "policy/entropy_avg": "entropy",
    "loss/policy_avg": "policy loss",
    "loss/value_avg": "value loss",
    "val/ratio": "ratio",
    "policy/clipfrac_avg": "clipped",
    "completions/mean_length": "length",
    "lr": "lr",
    "eps": "eps",
}
EVALUATED = {
    "objective/scores": "score",
    "objective/kl": "kl",
    "accuracy": "accuracy",
    "win_rate": "win rate",
}
_EVALUATION = re.compile(rf"eval_(?:(.+)_)?({'|'.join(EVALUATED)}|pass@\d+)")
_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"
BAR = ("objective/scores", "objective/kl", "eps")


class _Screen:
    """Standard output whose reader may leave (a closed terminal, ``| head``), or its disk be full.

    The run goes on unseen: everything is in its files.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stdout.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


class _Elapsed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(format_duration(task.elapsed or 0.0))


class ConsoleTracker:
    """Prints metrics and tables to the terminal.

    One plain line per logged row; on a terminal, unless ``bar=False``, the lines scroll above a
    progress bar with score, KL, episodes per second and the time left.  During training, tables are
    shown at most every ``table_seconds``; the files have all of them.  A cell shows ``max_chars``
    characters, a prompt half as many, from its end.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        bar: bool = True,
        tables: bool = True,
        console: Console | None = None,
        max_rows: int = 3,
        max_chars: int = 320,
        table_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(file=cast("IO[str]", _Screen()))
        self.total, self.start, self.step = total, start, start
        self.tables, self.max_rows, self.max_chars = tables, max_rows, max_chars
        self._every, self._shown = table_seconds, dict[str, float]()  # table -> time last shown
        self._clock, self._moved, self._closed = clock, clock(), False  # time of the last step
        self._seconds: list[float] = []  # of each iteration
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if bar and self.console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[now]}", markup=False),
                _Elapsed(),
                TextColumn("{task.fields[left]}", markup=False),
                console=self.console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(
                "training", total=total, completed=start, now="", left="", start=False
            )
            self._bar.start()

    def advance(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar to iteration ``step``; called every iteration, logged or not."""
        self._move(step, metrics)
        if self._bar is not None and self._task is not None:
            now = "  ".join(f"{SHOWN[k]} {metrics[k]:.4g}" for k in BAR if k in metrics)
            self._bar.update(self._task, completed=step, now=now, left=self._time_left())

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Print one line of the main metrics, above the bar if there is one."""
        self._move(step, metrics)
        shown = [f"{label} {metrics[k]:.4g}" for k, label in SHOWN.items() if k in metrics]
        for name, value in metrics.items():
            match = _EVALUATION.fullmatch(name)
            if match is not None:
                words = ("eval", match[1], EVALUATED.get(match[2], match[2]))
                shown.append(f"{' '.join(filter(None, words))} {value:.4g}")
        if not shown:
            return
        if "episode" in metrics:
            shown.insert(0, f"episode {metrics['episode']:.0f}")
        left = [self._time_left()] if self.step < self.total and self._time_left() else []
        parts = [f"step {step}/{self.total}", *shown, *left]
        if not self.console.is_terminal:
            parts = ["  ".join(parts)]
        lines = [parts[0]]
        for part in parts[1:]:  # a line of a terminal ends between metrics
            if len(lines[-1]) + 2 + len(part) <= self.console.width:
                lines[-1] += f"  {part}"
            else:
                lines.append(f"  {part}")
        self.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print one line of text, above the bar if there is one."""
        self.console.print(f"kedge: {text}", markup=False, highlight=False, soft_wrap=True)

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Print the first rows of a table, long cells truncated."""
        if not rows or not self.tables:
            return
        now = self._clock()
        if not self._closed and now - self._shown.get(name, -self._every) < self._every:
            return
        self._shown[name] = now
        when = f"{'after training, ' * self._closed}step {step}" if step else "before training"
        table = Table(title=f"{name}, {when}", show_lines=True, title_justify="left")
        for key in rows[0]:
            table.add_column(key)
        for row in rows[: self.max_rows]:
            table.add_row(*(self._cell(row[key], end=key == "query") for key in rows[0]))
        self.console.print(table)

    def close(self) -> None:
        """Stop the bar."""
        self._closed = True
        if self._bar is not None:
            self._bar.stop()

    def _move(self, step: int, metrics: Mapping[str, float]) -> None:
        """Time the iterations up to ``step``; the first one without the start of engines."""
        if step <= self.step:
            return
        now = self._clock()
        seconds = (now - self._moved) / (step - self.step)
        if not self._seconds:
            seconds = min(seconds, metrics.get("time/step", seconds))
            if self._bar is not None and self._task is not None:
                self._bar.start_task(self._task)
                task = self._bar.tasks[0]
                task.start_time = task.get_time() - seconds
        self._seconds.append(seconds)
        self._moved, self.step = now, step

    def _time_left(self) -> str:
        """The median iteration for each that is left: one that was stopped for hours is one."""
        if not self._seconds:
            return ""
        seconds = median(self._seconds) * (self.total - self.step)
        return f"{format_duration(seconds)} left"

    def _cell(self, value: object, *, end: bool) -> Text:
        """Plain text without markup or control sequences; long text truncated."""
        text = (
            f"{value:.4g}" if isinstance(value, float) else str("n/a" if value is None else value)
        )
        text = "".join(c if c.isprintable() or c in "\n\t" else _UNPRINTABLE for c in text)
        most = self.max_chars // 2 if end else self.max_chars
        if len(text) > most:
            text = "…" + text[1 - most :] if end else text[: most - 1] + "…"
        return Text(text)


class TableLogger:
    """Sends tables to wandb, trackio, mlflow and tensorboard, and histograms to two of them.

    ``tensorboard`` returns the open ``SummaryWriter``, or None.
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
        """The package ``wandb`` if it has an open run, else None."""
        wandb = importlib.import_module("wandb") if "wandb" in self._services else None
        return wandb if wandb is not None and wandb.run is not None else None

    def close(self) -> None:
        """Do nothing: the reporting callbacks own the connections."""


# -- the trackers of a run -------------------------------------------------------------------------


def build_tables(callbacks: Sequence[TrainerCallback]) -> TableLogger:
    """The tracker that sends tables to the services in ``report_to``."""
    boards = [c for c in callbacks if isinstance(c, TensorBoardCallback)]
    services = build_services(callbacks)
    return TableLogger(services, tensorboard=lambda: boards[0].tb_writer if boards else None)


def build_trackers(
    callbacks: Sequence[TrainerCallback],
    history: Sequence[Mapping[str, Any]],
    args: OnPolicyConfig,
    screen: ConsoleTracker,
    best_effort: BestEffortWriter,
) -> CompositeTracker:
    """Build the trackers: files, screen and services.

    ``history`` has the rows that were logged before a resume.
    """
    trackers: list[Tracker] = []
    if args.output_dir:
        with required_write("output_dir", args.output_dir):
            trackers.append(JsonlTracker(args.output_dir, history=history))
    trackers += [screen, build_tables(callbacks)]
    names = args.report_to or []
    for name in [names] if isinstance(names, str) else names:
        if (build := plugins.load("kedge.trackers", name)) is not None:
            trackers.append(build(args))
    return CompositeTracker(trackers, best_effort)


def log_prompt_lengths(callbacks: Sequence[TrainerCallback], prompts: object) -> None:
    """Send a histogram of the prompts' lengths in tokens."""
    if isinstance(prompts, DatasetPrompts):
        with BestEffortWriter().writing("prompt lengths", "the trackers"):
            build_tables(callbacks).histogram("prompts/length", prompts.lengths, step=0)


def build_services(callbacks: Sequence[TrainerCallback]) -> list[str]:
    """The names of active services, as in ``report_to``."""
    kinds = {type(c) for c in callbacks}
    return [name for name, kind in INTEGRATION_TO_CALLBACK.items() if kind in kinds]


def link(callbacks: Sequence[TrainerCallback], args: Any) -> None:
    """Write the URLs of the run to ``run.json``."""
    links = run_links(build_services(callbacks))
    for callback in callbacks:
        if isinstance(callback, PushOnSave):
            links["hub"] = callback.hub.url
    if links and args.output_dir:
        with BestEffortWriter().writing("links of the run", args.output_dir):
            add_links(args.output_dir, links)


def run_links(services: Sequence[str]) -> dict[str, str]:
    """URLs of the run in the trackers that have one; local and offline runs have none."""
    urls: dict[str, str | None] = {}
    if "wandb" in services:
        import wandb

        urls["wandb"] = getattr(wandb.run, "url", None)
    if "trackio" in services:
        import trackio

        space = trackio.context_vars.current_space_id.get()
        urls["trackio"] = space and f"https://huggingface.co/spaces/{space}"
    if "mlflow" in services:
        import mlflow

        run, server = mlflow.active_run(), mlflow.get_tracking_uri()
        if run is not None and server.startswith("http"):
            place = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
            urls["mlflow"] = f"{server.rstrip('/')}/{place}"
    return {name: url for name, url in urls.items() if url}
