"""Trackers of a run: files, screen, services and the hub, with links between their pages."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback

from kedge.config.base import OnPolicyConfig
from kedge.data import DatasetPrompts
from kedge.errors import HubError
from kedge.protocols import Tracker
from kedge.reporting.base import (
    BestEffortWriter,
    CompositeTracker,
    JsonlTracker,
    json_line,
    required_write,
)
from kedge.reporting.hub import Hub, PushOnSave, explain
from kedge.reporting.progress import ConsoleTracker
from kedge.reporting.run_info import add_links, markdown

if TYPE_CHECKING:
    from kedge.trainers.run.hf_callbacks import Callbacks

Rows = Sequence[Mapping[str, object]]
logger = logging.getLogger(__name__)
_CARD = """\
---
tags:
- kedge
- completions
configs:
{configs}---
# Completions of a Kedge run
{model}
Prompts, completions and scores during training; `step-000012.jsonl` is after iteration 12.
"""


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


class HubTables:
    """Sends every table to a dataset repository, in the background and in order.

    The repository is created first, so that a wrong token fails before training; later failures
    are only logged, once.  The card names the repository of the model.
    """

    def __init__(self, hub: Hub, *, model: str | None = None) -> None:
        self.hub, self._model = hub, model
        self._names: list[str] = []  # table types listed on the card
        self._uploads: list[Future[Any]] = []
        self._warned = False
        hub.create()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Do nothing: other trackers log metrics."""

    def table(self, name: str, rows: Rows, *, step: int) -> None:
        """Send one table, as ``NAME/step-000012.jsonl``."""
        if not rows:
            return
        if name not in self._names:
            self._names.append(name)
            self._send("README.md", self._card(), "The card")
        text = "".join(json_line({"step": step, **row}) for row in rows)
        self._send(f"{name}/step-{step:06d}.jsonl", text, f"{name} after iteration {step}")

    def close(self) -> None:
        """Wait for all uploads."""
        wait(self._uploads)

    def _send(self, path: str, text: str, message: str) -> None:
        try:
            upload = self.hub.write(path, text, message=message, blocking=False)
        except HubError as error:
            self._warn(error)
            return
        self._uploads = [x for x in self._uploads if not x.done()] + [upload]
        upload.add_done_callback(lambda done: self._warn(done.exception()))

    def _warn(self, error: BaseException | None) -> None:
        if error is not None and not self._warned:
            self._warned = True
            reason = error if isinstance(error, HubError) else explain(error, self.hub.repo_id)
            logger.warning("some completions were not uploaded to %s: %s", self.hub.url, reason)

    def _card(self) -> str:
        configs = "".join(
            f"- config_name: {json.dumps(name)}\n  data_files: {json.dumps(name + '/*.jsonl')}\n"
            for name in self._names
        )
        model = f"\nThe model: [{self._model}](https://hf.co/{self._model}).\n"
        return _CARD.format(configs=configs, model=model if self._model else "")


# -- the trackers of a run -------------------------------------------------------------------------


def build_tables(callbacks: Callbacks) -> TableLogger:
    """The tracker that sends tables to the services in ``report_to``."""
    boards = [c for c in callbacks.handler.callbacks if isinstance(c, TensorBoardCallback)]
    services = build_services(callbacks)
    return TableLogger(services, tensorboard=lambda: boards[0].tb_writer if boards else None)


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
    for callback in callbacks.handler.callbacks:
        if isinstance(callback, PushOnSave):
            links["hub"] = callback.hub.url
    for tracker in getattr(callbacks.tracker, "trackers", ()):
        if isinstance(tracker, HubTables):
            links["completions"] = tracker.hub.url
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
