"""Pushes to the hub while training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.backends.hub import Hub


class PushOnSave(TrainerCallback):
    """Pushes after each save what ``hub_strategy`` asks for; acts on rank 0 alone.

    The repository is made when training begins, so that a wrong token is found then.

    Args:
        hub: where to.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Make the repository."""
        if state.is_world_process_zero:
            self.hub.create()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Push the checkpoint just written."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            self.hub.push_checkpoint(folder, str(getattr(args.hub_strategy, "value", "end")))
