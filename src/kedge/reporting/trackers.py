"""Builds the trackers of a run, and links its pages to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
)

from kedge.config.base import OnPolicyConfig
from kedge.data import DatasetPrompts
from kedge.protocols import Tracker
from kedge.reporting.base import BestEffortWriter, CompositeTracker, JsonlTracker, required_write
from kedge.reporting.hub import Hub, PushOnSave
from kedge.reporting.progress import ConsoleTracker
from kedge.reporting.run_info import add_links
from kedge.reporting.tables import HubTables, TableLogger
from kedge.trainers.run.hf_callbacks import Callbacks


def build_tables(callbacks: Callbacks) -> TableLogger:
    """The tracker that sends tables to the services in ``report_to``."""

    def open_writer() -> Any:
        tensorboard = [c for c in callbacks.handler.callbacks if isinstance(c, TensorBoardCallback)]
        return tensorboard[0].tb_writer if tensorboard else None

    return TableLogger(build_services(callbacks), tensorboard=open_writer)


def build_trackers(
    callbacks: Callbacks,
    args: OnPolicyConfig,
    screen: ConsoleTracker,
    best_effort: BestEffortWriter,
) -> CompositeTracker:
    """Build the trackers: files, screen, services and the hub repository for completions."""
    trackers: list[Tracker] = []
    if args.output_dir:
        with required_write("output_dir", args.output_dir):
            trackers.append(JsonlTracker(args.output_dir, history=callbacks.state.log_history))
    trackers += [screen, build_tables(callbacks)]
    if args.log_completions_hub_repo:
        hub = Hub(
            args.log_completions_hub_repo,
            token=args.hub_token,
            private=args.hub_private_repo is not False,
            kind="dataset",
        )
        trackers.append(HubTables(hub, model=args.hub_model_id))
    return CompositeTracker(trackers, best_effort)


def log_prompt_lengths(callbacks: Callbacks, prompts: object) -> None:
    """Send a histogram of the prompts' lengths in tokens (rank 0)."""
    if isinstance(prompts, DatasetPrompts) and callbacks.state.is_world_process_zero:
        with BestEffortWriter().writing("prompt lengths", "the trackers"):
            build_tables(callbacks).histogram("prompts/length", prompts.lengths, step=0)


def build_services(callbacks: Callbacks) -> list[str]:
    """The names of active services, as in ``report_to``."""
    kinds = {type(c) for c in callbacks.handler.callbacks}
    return [name for name, kind in INTEGRATION_TO_CALLBACK.items() if kind in kinds]


def link(callbacks: Callbacks, args: Any) -> None:
    """Write the URLs of the run to ``run.json`` (rank 0)."""
    if not callbacks.state.is_world_process_zero:
        return
    links = run_links(build_services(callbacks))
    pushes = [c for c in callbacks.handler.callbacks if isinstance(c, PushOnSave)]
    if pushes:
        links["hub"] = pushes[0].hub.url
    for tracker in getattr(callbacks.tracker, "trackers", ()):
        if isinstance(tracker, HubTables):
            links["completions"] = tracker.hub.url
    if links and args.output_dir:
        with BestEffortWriter().writing("links of the run", args.output_dir):
            add_links(args.output_dir, links)


def run_links(services: Sequence[str]) -> dict[str, str]:
    """URLs of the run in the trackers that have one; local and offline runs have none.

    Args:
        services: names in ``report_to`` with open runs.
    """
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
