"""Builds the trackers of a run, and links its pages to each other."""

from __future__ import annotations

from typing import Any

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
)

from kedge.backends.data import DatasetPrompts
from kedge.backends.hub import Hub
from kedge.backends.trackers import HubTables, Jsonl, Many, Screen, Tables
from kedge.backends.trackers.links import run_links
from kedge.config.base import OnPolicyConfig
from kedge.protocols import Tracker
from kedge.trainers.reporting.best_effort import BestEffortTracker, BestEffortWriter, required_write
from kedge.trainers.reporting.hub import PushOnSave
from kedge.trainers.reporting.run_info import add_links
from kedge.trainers.run.hf_callbacks import Callbacks


def build_tables(callbacks: Callbacks) -> Tables:
    """The tracker that sends tables to the services in ``report_to``."""
    return Tables(build_services(callbacks), tensorboard=lambda: build_writer(callbacks))


def build_trackers(
    callbacks: Callbacks, args: OnPolicyConfig, screen: Screen, best_effort: BestEffortWriter
) -> Many:
    """Build the trackers: files, screen, services and the hub repository for completions."""
    trackers: list[Tracker] = []
    if args.output_dir:
        with required_write("output_dir", args.output_dir):
            files = Jsonl(args.output_dir, history=callbacks.state.log_history)
        trackers.append(BestEffortTracker(files, best_effort, args.output_dir))
    trackers += [BestEffortTracker(screen, best_effort, "the screen"), build_tables(callbacks)]
    if args.log_completions_hub_repo:
        hub = Hub(
            args.log_completions_hub_repo,
            token=args.hub_token,
            private=args.hub_private_repo is not False,
            kind="dataset",
        )
        trackers.append(HubTables(hub, model=args.hub_model_id))
    return Many(trackers)


def log_prompt_lengths(callbacks: Callbacks, prompts: object) -> None:
    """Send a histogram of the prompts' lengths in tokens (rank 0)."""
    if isinstance(prompts, DatasetPrompts) and callbacks.state.is_world_process_zero:
        with BestEffortWriter().writing("prompt lengths", "the trackers"):
            build_tables(callbacks).histogram("prompts/length", prompts.lengths, step=0)


def completions_url(callbacks: Callbacks) -> str | None:
    """URL of the hub repository for completions, or None."""
    trackers = getattr(callbacks.tracker, "trackers", ())
    return next((tracker.hub.url for tracker in trackers if isinstance(tracker, HubTables)), None)


def build_services(callbacks: Callbacks) -> list[str]:
    """The names of active services, as in ``report_to``."""
    kinds = {type(c) for c in callbacks.handler.callbacks}
    return [name for name, kind in INTEGRATION_TO_CALLBACK.items() if kind in kinds]


def build_writer(callbacks: Callbacks) -> Any:
    """TensorBoard's open ``SummaryWriter``, or None."""
    tensorboard = [c for c in callbacks.handler.callbacks if isinstance(c, TensorBoardCallback)]
    return tensorboard[0].tb_writer if tensorboard else None


def link(callbacks: Callbacks, args: Any) -> dict[str, str]:
    """Write the URLs of the run to ``run.json`` (rank 0).

    Returns:
        URLs by name.
    """
    if not callbacks.state.is_world_process_zero:
        return {}
    links = run_links(build_services(callbacks))
    pushes = [c for c in callbacks.handler.callbacks if isinstance(c, PushOnSave)]
    if pushes:
        links["hub"] = pushes[0].hub.url
    completions = completions_url(callbacks)
    if completions is not None:
        links["completions"] = completions
    if links and args.output_dir:
        with BestEffortWriter().writing("links of the run", args.output_dir):
            add_links(args.output_dir, links)
    return links
