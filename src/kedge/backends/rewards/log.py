"""What reward functions report beside their rewards."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.types import Metrics


class RewardLog:
    """Collects what functions pass to ``log_metric`` and ``log_extra`` until it is drained."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._extras: dict[str, list[object]] = {}

    def metric(self, name: str, value: float) -> None:
        """Add one observation of ``name``; its mean is logged."""
        self._metrics = self._metrics.merge(Metrics({name: (float(value), 1.0)}))

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Set a column of the completions table, one value per row."""
        self._extras[column] = list(values)

    def drain(self) -> tuple[Metrics, dict[str, list[object]]]:
        """What came in since the last call."""
        found = self._metrics, self._extras
        self._metrics, self._extras = Metrics(), {}
        return found
