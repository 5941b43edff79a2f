"""Callbacks for where a run was started: a launch on Ray, or a command that hears signals."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.backends.ray.seat import Here, here
from kedge.backends.wishes import Wishes
from kedge.config.on_policy import OnPolicyConfig
from kedge.trainers.publishing import pushing


def own_callbacks(args: OnPolicyConfig) -> list[TrainerCallback]:
    """Those that the options and the surroundings ask for."""
    place = here()
    return [*pushing(args), *([] if place is None else [Reporting(place)])]


class Reporting(TrainerCallback):
    """Takes logged rows to the driver of a launch, and its wish to stop to the trainer.

    Args:
        place: of this process.
    """

    def __init__(self, place: Here) -> None:
        self._place = place

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Send the row, from the first rank."""
        if state.is_world_process_zero:
            self._place.post({"step": state.global_step, **(logs or {})})

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save and stop, on all ranks, once the driver wished it."""
        if state.is_world_process_zero and self._place.stopping():
            control.should_training_stop = control.should_save = True


class Stopping(TrainerCallback):
    """Saves and stops, on all ranks, once there is a wish.

    Args:
        wishes: of this process.
    """

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save and stop once there is a wish."""
        if self._wishes.any:
            control.should_training_stop = control.should_save = True
