"""Metrics and table columns that reward functions log in addition to their rewards."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from kedge.errors import RewardError
from kedge.protocols import RewardSource
from kedge.types import Metrics, RewardOutput, Rollout


class RewardLog:
    """Collects what functions pass to ``log_metric`` and ``log_extra`` until it is drained."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._extras: dict[str, list[object]] = {}

    def metric(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add one observation of ``name``, or the mean of ``weight`` of them; logs the mean."""
        sums = {name: (float(value) * weight, float(weight))}
        self._metrics = self._metrics.merge(Metrics(sums))

    def merge(self, metrics: Metrics) -> None:
        """Add observations from another process."""
        self._metrics = self._metrics.merge(metrics)

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Set a column of the completions table, one value per row."""
        self._extras[column] = list(values)

    def drain(self) -> tuple[Metrics, dict[str, list[object]]]:
        """Metrics and columns logged since the last call."""
        logged = self._metrics, self._extras
        self._metrics, self._extras = Metrics(), {}
        return logged


class MetricCapturingSource:
    """Adds the metrics and columns that reward functions logged to the output for the same rows.

    One thread scores at a time, so that records of different batches do not mix.
    """

    def __init__(self, source: RewardSource, log: RewardLog) -> None:
        self._source, self._log, self._lock = source, log, threading.Lock()
        self.columns = getattr(source, "columns", None)

    def score(self, rollout: Rollout) -> RewardOutput:
        """The source's reward output, with ``metrics`` and ``columns``.

        Raises:
            RewardError: a logged column does not have one value per row.
        """
        with self._lock:
            self._log.drain()  # left over from a call that failed
            reward_output = self._source.score(rollout)
            metrics, extras = self._log.drain()
        for name, values in extras.items():
            if len(values) != len(rollout):
                raise RewardError(
                    f"log_extra({name!r}, ...) must get one value per completion: got {len(values)}"
                    f" for {len(rollout)} completions"
                )
        return replace(reward_output, metrics=metrics.totals, columns=extras)

    def close(self) -> None:
        """Release the source's resources outside this process."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()
