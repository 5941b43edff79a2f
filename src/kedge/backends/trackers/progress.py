"""What a person sees while training: a progress bar, rows of metrics, tables of completions."""

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


class Screen:
    """A tracker for people.

    On a terminal: a progress bar with score, KL, episodes per second and the time left.  Into a
    file or pipe, or with ``bar=False``: one plain line per logged row.

    Args:
        total: updates of the whole run.
        start: updates finished before.
        bar: False for plain lines (``disable_tqdm``).
        console: where to; standard output if None.
        max_rows: rows of a table that are shown.
        max_chars: characters of a cell that are shown.
        clock: seconds.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        bar: bool = True,
        console: Console | None = None,
        max_rows: int = 5,
        max_chars: int = 800,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self.total, self.start, self.step = total, start, start
        self.max_rows, self.max_chars = max_rows, max_chars
        self._clock, self._begin = clock, clock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if bar and self.console.is_terminal:
            self._bar = _bar(self.console)
            self._task = self._bar.add_task(
                "training", total=total, completed=start, now="", left=""
            )
            self._bar.start()

    def advance(self, step: int, metrics: Mapping[str, float]) -> None:
        """Update ``step`` is finished; moves the bar, which knows every update, logged or not."""
        self.step = step
        if self._bar is not None and self._task is not None:
            now = "  ".join(f"{SHOWN[k]} {metrics[k]:.4g}" for k in BAR if k in metrics)
            self._bar.update(self._task, completed=step, now=now, left=self._left())

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """One line of the main metrics (in plain mode, and for evaluations)."""
        self.step = max(self.step, step)
        if self._bar is not None and not any(k.startswith("eval_") for k in metrics):
            return
        shown = [f"{label} {metrics[k]:.4g}" for k, label in SHOWN.items() if k in metrics]
        for name, value in metrics.items():
            found = _EVALUATION.fullmatch(name)
            if found is not None:
                words = ("eval", found[1], EVALUATED.get(found[2], found[2]))
                shown.append(f"{' '.join(filter(None, words))} {value:.4g}")
        if not shown:
            return
        if "episode" in metrics:
            shown.insert(0, f"episode {metrics['episode']:.0f}")
        left = [self._left()] if self.step < self.total and self._left() else []
        line = "  ".join([f"step {step}/{self.total}", *shown, *left])
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """The first rows of a table, long cells cut."""
        if not rows:
            return
        table = Table(title=f"{name}, step {step}", show_lines=True, title_justify="left")
        for key in rows[0]:
            table.add_column(key)
        for row in rows[: self.max_rows]:
            table.add_row(*(self._cell(row[key]) for key in rows[0]))
        self.console.print(table)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()

    def _left(self) -> str:
        done = self.step - self.start
        if done <= 0:
            return ""
        seconds = (self._clock() - self._begin) / done * (self.total - self.step)
        return f"{timedelta(seconds=round(seconds))} left"

    def _cell(self, value: object) -> Text:
        """Plain text: what a model wrote is neither markup nor a control sequence."""
        text = (
            f"{value:.6g}" if isinstance(value, float) else "n/a" if value is None else str(value)
        )
        text = "".join(c if c.isprintable() or c in "\n\t" else _UNPRINTABLE for c in text)
        if len(text) > self.max_chars:
            text = text[: self.max_chars - 1] + "…"
        return Text(text)


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        console=console,
        refresh_per_second=4,
    )
