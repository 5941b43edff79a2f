"""Adapts the loop to ``transformers.TrainerCallback``: state, control, events, intervals.

One iteration of the loop is one step of ``TrainerState``.  ``transformers.DefaultFlowCallback`` and
other callbacks decide through ``TrainerControl`` when to log, evaluate and save.  ``report_to``
uses the integration callbacks of transformers only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    TensorBoardCallback,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from kedge import plugins
from kedge.config.base import OnPolicyConfig
from kedge.records.errors import ConfigError, DamagedCheckpointError, install_command
from kedge.records.protocols import Tracker
from kedge.reporting.base import CompositeTracker
from kedge.rewards.build import as_list
from kedge.trainers.launch import LaunchContext, launch_context

logger = logging.getLogger(__name__)
STATE_FILE = "trainer_state.json"
LATEST = (
    *("episode", "epoch", "lr", "lr/value", "eps", "objective/kl_coef"),
    "skipped_steps",
    *("num_input_tokens_seen", "num_tokens", "learning_rate", "memory/peak_cpu", "memory/peak_gpu"),
)


@dataclass
class RunState(TrainerState):
    """``TrainerState`` with the counters of an on-policy run."""

    episode: int = 0  # responses trained on
    num_tokens: int = 0  # tokens in prompts and responses
    loss_sum: float = 0.0  # over finished iterations
    pending: list[dict[str, float]] = field(default_factory=list)  # iterations since the last log
    # With ``eval_against_start``: scores per evaluation set and row, NaN for invalid rows.
    initial_scores: dict[str, list[float]] = field(default_factory=dict)


class Callbacks:
    """The callbacks of a trainer, and the state and control passed to them.

    ``args`` set intervals and ``report_to``; ``tracker`` gets every logged row after the callbacks.
    """

    def __init__(
        self,
        args: TrainingArguments,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] | None = None,
        *,
        tracker: Tracker | None = None,
        rank: int = 0,
        local_rank: int = 0,
    ) -> None:
        self.args, self.tracker = args, tracker or CompositeTracker()
        all_callbacks = [DefaultFlowCallback(), *reporting_callbacks(args.report_to)]
        folder = getattr(args, "logging_dir", None)
        for callback in all_callbacks if folder is not None else []:
            if isinstance(callback, TensorBoardCallback):
                callback.logging_dir = folder
        all_callbacks += [_check_callback(callback) for callback in callbacks or ()]
        self.handler = CallbackHandler(all_callbacks, None, None, None, None)
        self.control = TrainerControl()
        self.state = RunState(
            is_local_process_zero=local_rank == 0, is_world_process_zero=rank == 0
        )
        self.log: Callable[[dict[str, float]], None] = self.write_row  # or a trainer's ``log``

    def start(self, *, model: Any, processing_class: Any = None) -> None:
        """Pass the policy and the tokenizer to callbacks from now on; fires on_init_end."""
        self.handler.model, self.handler.processing_class = model, processing_class
        self.fire("on_init_end")

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, an object or a class."""
        self.handler.add_callback(_check_callback(callback))

    def fire(self, event: str, **kwargs: Any) -> None:
        """Call ``event`` ("on_step_begin", ...) of every callback with the usual arguments."""
        call = getattr(self.handler, event)
        self.control = call(self.args, self.state, self.control, **kwargs)

    def watch(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        """Pass these to callbacks; on_pre_optimizer_step fires before each optimizer step."""
        self.handler.optimizer, self.handler.lr_scheduler = optimizer, lr_scheduler
        optimizer.register_step_pre_hook(lambda *_: self.fire("on_pre_optimizer_step"))

    def begin(self, *, max_steps: int, epochs: float, batch_size: int) -> None:
        """Start training, or resume after ``restore``; fires on_train_begin.

        The run has ``max_steps`` iterations and ``epochs`` passes over the prompts; an iteration
        has ``batch_size`` responses on this rank.
        """
        self.state.max_steps = max_steps
        self.state.num_train_epochs = math.ceil(epochs)
        self.state.train_batch_size = batch_size
        self.state.compute_steps(self.args, max_steps)
        self.fire("on_train_begin")

    def write_row(self, metrics: Mapping[str, float]) -> None:
        """Add a row to ``state.log_history``, then to callbacks and the tracker."""
        row = {**metrics, "epoch": self.state.epoch}
        self.state.log_history.append({**row, "step": self.state.global_step})
        self.fire("on_log", logs=dict(row))
        if self.state.is_world_process_zero:
            self.tracker.log(row, step=self.state.global_step)

    def note_best(self, metrics: Mapping[str, float], *, incomplete: bool = False) -> bool:
        """Whether this evaluation is the best so far by ``metric_for_best_model``.

        It is not where it lacks the metric because it is ``incomplete``.
        """
        name = self.args.metric_for_best_model
        if name is None:
            return False
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            if incomplete:
                return False
            raise ConfigError(
                f"metric_for_best_model={self.args.metric_for_best_model!r} must be a metric of "
                f"the evaluation: {', '.join(sorted(metrics))}"
            )
        value, best = metrics[name], self.state.best_metric
        better = not math.isnan(value) and (
            best is None or (value > best if self.args.greater_is_better else value < best)
        )
        if better:
            self.state.best_metric = value
            self.state.best_global_step = self.state.global_step
        return better

    def write_state(self, folder: str | Path) -> None:
        """Write ``trainer_state.json`` into a checkpoint that is being written (rank 0)."""
        stateful: list[Any] = [*self.handler.callbacks, self.control]
        stateful = [c for c in stateful if isinstance(c, ExportableState)]
        exported = RunState(stateful_callbacks=stateful)
        self.state.stateful_callbacks = exported.stateful_callbacks
        self.state.save_to_json(str(Path(folder) / STATE_FILE))

    def restore(self, folder: str | Path) -> None:
        """Load ``trainer_state.json`` of a checkpoint; call it before ``begin``.

        With ``restore_callback_states_from_checkpoint``, callbacks that export their state are
        restored too.
        """
        file = Path(folder) / STATE_FILE
        try:
            state = RunState.load_from_json(str(file))
        except (OSError, ValueError, TypeError) as e:
            raise DamagedCheckpointError(f"cannot read {file}: {e}") from e
        state.is_local_process_zero = self.state.is_local_process_zero
        state.is_world_process_zero = self.state.is_world_process_zero
        self.state = state
        if self.args.restore_callback_states_from_checkpoint:
            self._restore_callbacks(dict(state.stateful_callbacks or {}))

    def _restore_callbacks(self, saved: dict[str, Any]) -> None:
        saved.pop("TrainerControl", None)
        for i, callback in enumerate(self.handler.callbacks):
            states = saved.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and states:
                queue = states if isinstance(states, list) else [states]
                self.handler.callbacks[i] = type(callback).from_state(queue[0])
                saved[type(callback).__name__] = queue[1:]
        unknown = sorted(name for name, states in saved.items() if states)
        if unknown:
            logger.warning(
                "the checkpoint holds the state of callbacks that are not in this run: %s",
                ", ".join(unknown),
            )


def reporting_callbacks(report_to: str | list[str] | None) -> list[TrainerCallback]:
    """The integration callbacks of transformers for "none", "all" (installed), or names."""
    callbacks: list[TrainerCallback] = []
    for name in as_list(report_to or "none"):
        if name in plugins.find("kedge.trackers"):
            continue  # it gets the rows that the files do
        try:
            callbacks += [kind() for kind in get_reporting_integration_callbacks(name)]
        except (ValueError, RuntimeError, ImportError, AssertionError) as error:
            extra = name in ("tensorboard", "wandb", "trackio")
            install = install_command(name) if extra else f"pip install {name}"
            raise ConfigError(
                f"report_to={name!r} must be a tracker of transformers that is installed:"
                f" {error}; {install}, or set report_to='none'"
            ) from error
    return callbacks


def _check_callback(callback: Any) -> Any:
    kind = callback if isinstance(callback, type) else type(callback)
    if not issubclass(kind, TrainerCallback):
        raise ConfigError(
            f"a callback must be a transformers.TrainerCallback (an object or a class), got "
            f"{callback!r} of type {kind.__name__}"
        )
    return callback


def merge_rows(rows: list[dict[str, float]]) -> dict[str, float]:
    """Merge the rows of several iterations: the mean of each metric over the rows that have it.

    Counters and settings keep their latest value; minima and maxima stay minima and maxima.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name in LATEST:
            merged[name] = values[-1]
        elif name.endswith(("/min_length", "/min_terminated_length", "_min")):
            merged[name] = min(values)
        elif name.endswith(("/max_length", "/max_terminated_length", "_max")):
            merged[name] = max(values)
        else:
            merged[name] = math.fsum(values) / len(values)
    return merged


def share_control(control: TrainerControl, total: Callable[[Tensor], Tensor]) -> None:
    """Synchronize control over ranks, in place: a flag set on one rank is set on all."""
    names = ("should_training_stop", "should_log", "should_evaluate", "should_save")
    votes = total(torch.tensor([float(getattr(control, name)) for name in names]))
    for name, vote in zip(names, votes.tolist(), strict=True):
        setattr(control, name, vote > 0)


def build_callbacks(
    args: OnPolicyConfig,
    given: Iterable[TrainerCallback | type[TrainerCallback]] | None,
    accelerator: Accelerator,
) -> Callbacks:
    """The callbacks of the user and for ``push_to_hub`` and a Ray launch, not yet started."""
    callbacks = [*(given or [])]
    if "trackio" in as_list(args.report_to) and args.trackio_space_id is not None:
        from huggingface_hub import get_token

        if get_token() is None:
            logger.warning("report_to=trackio: not logged in to the hub; the dashboard stays local")
            args.trackio_space_id = None
    if args.push_to_hub:
        from kedge.reporting.hub import PushOnSave, build_hub

        callbacks.append(PushOnSave(build_hub(args)))
    if (context := launch_context()) is not None:
        callbacks.append(Reporting(context, main=args.process_index == 0))
    rank, local_rank = accelerator.process_index, accelerator.local_process_index
    return Callbacks(args, callbacks, rank=rank, local_rank=local_rank)


class Reporting(TrainerCallback):
    """Sends the rows of rank 0 to the driver of a Ray launch, and stops when the driver asks to."""

    def __init__(self, context: LaunchContext, *, main: bool) -> None:
        self._context, self._main = context, main

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save and stop if requested, on all ranks."""
        if self._main and self._context.stopping():
            control.should_training_stop = control.should_save = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Send the row, from rank 0."""
        if self._main:
            self._context.post({"step": state.global_step, **(logs or {})})
