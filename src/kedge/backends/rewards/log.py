"""What reward functions report beside their rewards."""

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
        """Add an observation of ``name``, or the mean of ``weight`` of them; the mean is logged."""
        sums = {name: (float(value) * weight, float(weight))}
        self._metrics = self._metrics.merge(Metrics(sums))

    def merge(self, metrics: Metrics) -> None:
        """Add observations that were made elsewhere."""
        self._metrics = self._metrics.merge(metrics)

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Set a column of the completions table, one value per row."""
        self._extras[column] = list(values)

    def drain(self) -> tuple[Metrics, dict[str, list[object]]]:
        """What came in since the last call."""
        found = self._metrics, self._extras
        self._metrics, self._extras = Metrics(), {}
        return found


class MetricCapturingSource:
    """A reward source whose reward outputs carry what its functions recorded about those very rows.

    It is asked by one thread at a time, so that no other batch's records get among them.
    """

    def __init__(self, source: RewardSource, log: RewardLog) -> None:
        self._source, self._log, self._turn = source, log, threading.Lock()
        self.columns = getattr(source, "columns", None)

    def score(self, rollout: Rollout) -> RewardOutput:
        """The source's reward output, with ``said`` and ``extras``.

        Raises:
            RewardError: a column of extras has not one value per row.
        """
        with self._turn:
            self._log.drain()  # of a call that failed
            reward_output = self._source.score(rollout)
            metrics, extras = self._log.drain()
        for name, values in extras.items():
            if len(values) != len(rollout):
                raise RewardError(
                    f"log_extra({name!r}, ...) was given {len(values)} values for {len(rollout)}"
                    " completions; give one for each"
                )
        return replace(reward_output, metrics=metrics.totals, columns=extras)

    def close(self) -> None:
        """Release what the source holds outside this process."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()
