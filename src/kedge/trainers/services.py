"""Which trackers a run reports to, and what it sends them besides metrics."""

from __future__ import annotations

from typing import Any

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
)

from kedge.backends.trackers import Tables
from kedge.trainers.hf_callbacks import Callbacks


def tables_of(callbacks: Callbacks) -> Tables:
    """The tracker that sends tables where ``report_to`` sends metrics."""
    return Tables(services_of(callbacks), tensorboard=lambda: writer_of(callbacks))


def services_of(callbacks: Callbacks) -> list[str]:
    """The names of what reports, as in ``report_to``."""
    kinds = {type(c) for c in callbacks.handler.callbacks}
    return [name for name, made in INTEGRATION_TO_CALLBACK.items() if made in kinds]


def writer_of(callbacks: Callbacks) -> Any:
    """TensorBoard's open ``SummaryWriter``, or None."""
    own = [c for c in callbacks.handler.callbacks if isinstance(c, TensorBoardCallback)]
    return own[0].tb_writer if own else None
