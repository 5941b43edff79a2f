"""Which trackers a run reports to, and what it sends them besides metrics."""

from __future__ import annotations

from typing import Any

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
)

from kedge.backends.hub import Hub
from kedge.backends.trackers import HubTables, Jsonl, Many, Screen, Tables
from kedge.config.on_policy import OnPolicyConfig
from kedge.protocols import Tracker
from kedge.trainers.beside import Beside, Spared, opening
from kedge.trainers.hf_callbacks import Callbacks


def tables_of(callbacks: Callbacks) -> Tables:
    """The tracker that sends tables where ``report_to`` sends metrics."""
    return Tables(services_of(callbacks), tensorboard=lambda: writer_of(callbacks))


def trackers_of(callbacks: Callbacks, args: OnPolicyConfig, screen: Screen, beside: Beside) -> Many:
    """Files, screen and services; only the hub, asked by option, is asked for room beforehand.

    Raises:
        ConfigError: the output folder cannot be written to.
        HubError: the repository for completions cannot be made.
    """
    found: list[Tracker] = []
    if args.output_dir:
        with opening("output_dir", args.output_dir):
            files = Jsonl(args.output_dir, history=callbacks.state.log_history)
        found.append(Spared(files, beside, args.output_dir))
    found += [Spared(screen, beside, "the screen"), tables_of(callbacks)]
    if args.log_completions_hub_repo:
        hub = Hub(
            args.log_completions_hub_repo,
            token=args.hub_token,
            private=args.hub_private_repo is not False,
            kind="dataset",
        )
        found.append(HubTables(hub, model=args.hub_model_id))
    return Many(found)


def completions_url(callbacks: Callbacks) -> str | None:
    """Where tables of completions are sent, if that is to the hub."""
    trackers = getattr(callbacks.tracker, "trackers", ())
    return next((each.hub.url for each in trackers if isinstance(each, HubTables)), None)


def services_of(callbacks: Callbacks) -> list[str]:
    """The names of what reports, as in ``report_to``."""
    kinds = {type(c) for c in callbacks.handler.callbacks}
    return [name for name, made in INTEGRATION_TO_CALLBACK.items() if made in kinds]


def writer_of(callbacks: Callbacks) -> Any:
    """TensorBoard's open ``SummaryWriter``, or None."""
    own = [c for c in callbacks.handler.callbacks if isinstance(c, TensorBoardCallback)]
    return own[0].tb_writer if own else None
