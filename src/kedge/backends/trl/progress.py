"""Progress of TRL's trainers in the rows of ``kedge ppo`` instead of printed dictionaries."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from kedge.backends.trackers import Screen
from kedge.backends.trl.joined_pairs import JoinedPairs
from kedge.ops.cpu.heap import keep_free_memory, release_free_memory
from kedge.ops.cpu.patch import Kernels

LABELS = {
    "loss": "loss",
    "mean_token_accuracy": "token accuracy",
    "accuracy": "accuracy",
    "margin": "margin",
    "learning_rate": "lr",
    "eval_loss": "eval loss",
    "eval_mean_token_accuracy": "eval token accuracy",
    "eval_accuracy": "eval accuracy",
    "eval_margin": "eval margin",
}


def train_with_progress(trainer: Any, *, pairs: bool = False) -> None:
    """Call ``trainer.train`` with a ``RowCallback``.

    On CPUs with faster matrix products; without checkpointing, memory that a step frees is kept for
    the next one.

    Args:
        trainer: a ``transformers.Trainer``; resumes as ``args.resume_from_checkpoint`` says.
        pairs: the model scores pairs of answers, as in ``trl.RewardTrainer``.
    """
    for printing in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(printing)
    plain = _is_plain(trainer)
    rows, kernels = RowCallback(), Kernels([trainer.model] if plain else [])
    joined = JoinedPairs(trainer.model).active() if pairs and plain else nullcontext()
    trainer.add_callback(rows)
    trainer.add_callback(_AfterStep(kernels))
    # With checkpointing the heap would grow by the activations that it frees (``ops.cpu.heap``).
    new_name = getattr(trainer.args, "activation_checkpointing", None)
    checkpoints = new_name or trainer.args.gradient_checkpointing
    if trainer.args.device.type == "cpu" and not checkpoints:
        keep_free_memory()
    else:
        release_free_memory()  # a run before may have kept it
    try:
        with kernels.active(), joined:
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    finally:
        release_free_memory()
        rows.close()


def _is_plain(trainer: Any) -> bool:
    """Whether the model runs as it is, neither compiled nor sharded nor copied to other GPUs."""
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return not (trainer.args.torch_compile or sharded or trainer.args.n_gpu > 1)


class _AfterStep(TrainerCallback):
    """Tells kernels that weights have changed."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Copies of trained weights are out of date."""
        self._kernels.weights_changed()


class RowCallback(TrainerCallback):
    """Prints each logged row on one line, above a progress bar on a terminal (rank 0)."""

    def __init__(self) -> None:
        self.screen: Screen | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Open the screen."""
        if state.is_world_process_zero:
            self.screen = Screen(
                state.max_steps, start=state.global_step, bar=not args.disable_tqdm, labels=LABELS
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Move the bar."""
        if self.screen is not None:
            self.screen.advance(state.global_step, {})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Print the row."""
        if self.screen is not None:
            self.screen.log(logs or {}, step=state.global_step)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.screen is not None:
            self.screen.close()
