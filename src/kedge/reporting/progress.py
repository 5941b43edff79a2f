"""Terminal output of training: a progress bar, rows of metrics, tables of completions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

SHOWN = {
    "objective/scores": "score",
    "objective/kl": "kl",
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
        self.console = console or Console()
        self.total, self.start, self.step = total, start, start
        self.tables, self.max_rows, self.max_chars = tables, max_rows, max_chars
        self._every, self._shown = table_seconds, dict[str, float]()  # table -> time last shown
        self._clock, self._begin, self._closed = clock, clock(), False
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if bar and self.console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[now]}", markup=False),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}", markup=False),
                console=self.console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(
                "training", total=total, completed=start, now="", left=""
            )
            self._bar.start()

    def advance(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar to iteration ``step``; called every iteration, logged or not."""
        self.step = step
        if self._bar is not None and self._task is not None:
            now = "  ".join(f"{SHOWN[k]} {metrics[k]:.4g}" for k in BAR if k in metrics)
            self._bar.update(self._task, completed=step, now=now, left=self._time_left())

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Print one line of the main metrics, above the bar if there is one."""
        self.step = max(self.step, step)
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
        line = "  ".join([f"step {step}/{self.total}", *shown, *left])
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

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
        when = "after training, " if self._closed else ""
        table = Table(title=f"{name}, {when}step {step}", show_lines=True, title_justify="left")
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

    def _time_left(self) -> str:
        done = self.step - self.start
        if done <= 0:
            return ""
        seconds = (self._clock() - self._begin) / done * (self.total - self.step)
        return f"{timedelta(seconds=round(seconds))} left"

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
