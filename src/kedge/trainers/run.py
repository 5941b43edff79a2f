"""One training run behind a Trainer-style API: train, resume, evaluate, save."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as transformers_logging

from kedge.checkpoint import checkpoint
from kedge.checkpoint.replay import RolloutRecorder, RolloutReplay
from kedge.loop.batch_sizes import BatchSizes
from kedge.output import share_weights
from kedge.records.errors import CheckpointError, way_out
from kedge.records.protocols import EngineInfo, Hook, read_info
from kedge.records.types import Sampling
from kedge.reporting.base import required_write
from kedge.reporting.responses import IntervalSchedule, TokenLog
from kedge.trainers.hooks.checkpoints import Checkpoints
from kedge.trainers.hooks.evaluations import Evaluations
from kedge.trainers.hooks.logging import Logging
from kedge.trainers.hooks.parts import RunParts
from kedge.trainers.hooks.warnings import Warnings

VALUE_FOLDER = "value_model"


def recording_fingerprint(sampling: Sampling) -> dict[str, Any]:
    """Settings that a recording and a replaying run must share."""
    return {"temperature": sampling.temperature, "stop_ids": [*sampling.stop_ids]}


def open_replay(
    folder: str | None, sampling: Sampling, sizes: BatchSizes, *, rank: int
) -> RolloutReplay | None:
    """The recording in ``folder``, if one is named; of batches with these sizes."""
    if folder is None:
        return None
    return RolloutReplay(
        folder,
        settings=recording_fingerprint(sampling),
        rank=rank,
        world_size=sizes.world_size,
        rows=sizes.local_rows,
    )


@dataclass(kw_only=True)
class Run(RunParts):
    """The engine of a Trainer-style trainer, and its hooks: what happens beside training.

    Order within one iteration, as in ``transformers.Trainer``: on_step_begin; per optimizer step
    on_optimizer_step; on_step_end; then, if control asks for it, on_log, evaluation with
    on_evaluate, saving with on_save; after each pass over the prompts on_epoch_end, and again the
    requested actions.
    """

    check_prompts: Callable[[list[Any]], None] | None = None  # columns that environments read
    _playing: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(**self.parts)
        self.evaluations = Evaluations(**self.parts)

    def train(self, resume: str | Path | bool | None) -> TrainOutput:
        """Train all iterations, or until a callback stops the run.

        ``resume`` is True for the newest intact checkpoint in ``output_dir``, or a folder.
        """
        engine, checkpoints, callbacks = self.engine, self.checkpoints, self.callbacks
        checkpoints.tidy(new_run=not resume)
        resumed = checkpoints.resume(resume) if resume else None
        logging = self._open(resumed)
        state = self.state
        if resumed is None:
            if state.is_world_process_zero:
                from kedge.reporting.trackers import log_prompt_lengths

                log_prompt_lengths(callbacks.handler.callbacks, engine.source)
            at_start = self.args.eval_against_start or self.args.eval_on_start
            if at_start and self.eval_sets:
                self.trainer.evaluate()
        begin, before = time.perf_counter(), engine.step
        try:
            engine.run(engine.batch_sizes.iterations)
            requested = torch.tensor([float(checkpoints.shutdown.requested)])
            asked = bool(self.learner.all_reduce(requested))
            if asked and checkpoints.last < engine.step and self.args.output_dir:
                checkpoints.save()  # the signal came after the last iteration
            seconds, iterations = time.perf_counter() - begin, engine.step - before
            rate = iterations / max(seconds, 1e-9)
            totals = {  # totals of this call under transformers' names
                "train_runtime": seconds,
                "train_samples_per_second": rate * engine.batch_sizes.batch_size,
                "train_steps_per_second": rate,
                "train_loss": state.loss_sum / max(engine.step, 1),
            }
            if iterations > 0 or resumed is not None:  # the last row may be missing
                callbacks.log(logging.take_pending() | totals)
            if not asked:  # or a second call would continue from the best weights
                checkpoints.load_best()
            callbacks.fire("on_train_end")
        finally:
            callbacks.tracker.close()
        if self.args.output_dir and logging.screen is not None:
            root = shlex.quote(str(checkpoints.root))
            logging.screen.note(
                f"the run is in {root}; `kedge report {root}` writes a report of it"
            )
        if self.args.output_dir and state.is_world_process_zero:
            file = checkpoints.root / "curves.png"
            from kedge.reporting.log import draw_curves

            with self.best_effort.writing("curves", file):
                draw_curves(state.log_history, file)
        metrics = totals | {"episode": state.episode, "epoch": state.epoch or 0.0}
        return TrainOutput(engine.step, totals["train_loss"], metrics)

    def _open(self, resumed: Path | None) -> Logging:
        """Open screen, trackers and files, and set the hooks of this call of ``train``."""
        from kedge.reporting.trackers import ConsoleTracker, build_trackers, link

        engine, sizes, args = self.engine, self.engine.batch_sizes, self.args
        state, handler, screen = self.state, self.callbacks.handler, None
        if state.is_world_process_zero:
            screen = ConsoleTracker(
                sizes.iterations,
                start=engine.step,
                bar=not args.disable_tqdm,
                tables=args.num_sample_generations > 0,
                max_rows=self.evaluations.printed_rows,
            )
            trackers = build_trackers(
                handler.callbacks, state.log_history, args, screen, self.best_effort
            )
            self.callbacks.tracker = trackers
        if screen is not None and resumed is not None:
            done = "; nothing is left to train" if engine.step >= sizes.iterations else ""
            place = f"iteration {engine.step} of {sizes.iterations}"
            screen.note(f"resuming from {resumed} ({place}){done}")
        epochs = sizes.iterations / sizes.epoch_length
        self.callbacks.begin(max_steps=sizes.iterations, epochs=epochs, batch_size=sizes.local_rows)
        if screen is not None:
            link(handler.callbacks, args)
        recorder = None
        if args.save_rollouts is not None:
            with required_write("save_rollouts", args.save_rollouts):
                recorder = RolloutRecorder(
                    args.save_rollouts,
                    settings=recording_fingerprint(engine.sampling),
                    rank=self.learner.rank,
                    world_size=self.learner.world_size,
                )
        self.checkpoints.last = state.global_step
        self.evaluations.schedule = schedule = IntervalSchedule(
            args, iterations=sizes.iterations, iterations_per_epoch=sizes.epoch_length
        )
        warnings = Warnings(**self.parts, screen=screen)
        logging = Logging(**self.parts, screen=screen, recorder=recorder)
        hooks: list[Hook] = [logging, warnings, self.evaluations, self.checkpoints]
        if args.output_dir and schedule.tokens_every is not None:
            token_log = TokenLog(
                self.checkpoints.root,
                rows=args.log_token_rows,
                due=schedule.writes_tokens,
                learner=self.learner,
                tokenizer=self.tokenizer,
            )
            hooks.insert(0, token_log)
        engine.hooks = hooks
        return logging

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Context in which environments are kept; the outermost one closes them at its end."""
        self._playing += 1
        try:
            yield
        finally:
            self._playing -= 1
            if not self._playing:
                read_info(self.engine.rollout_engine, EngineInfo).close_environments()

    def write_models(self, folder: Path) -> None:
        """Write policy, tokenizer and value model in the layout of ``from_pretrained``.

        Every rank calls it; rank 0 writes.
        """
        if bad := self.learner.non_finite_weights():
            root = self.args.output_dir
            earlier = checkpoint.checkpoints(root) if root else []
            last = f"{earlier[-1]} is the last good checkpoint" if earlier else "none was saved yet"
            raise CheckpointError(
                f"{len(bad)} trained weights, such as {bad[0]}, are NaN or infinite after iteration"
                f" {self.engine.step}, so they are not saved; {last}. Lower the learning rate"
            )
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()  # it would interrupt the run's own bar
        try:
            self.learner.save(folder, folder / VALUE_FOLDER)
            if self.learner.accelerator.is_main_process:
                if hasattr(self.tokenizer, "save_pretrained"):
                    self.tokenizer.save_pretrained(folder)
                for models in (folder, folder / VALUE_FOLDER):
                    share_weights(models)
        except Exception as error:
            # tokenizers raises a bare Exception for file-system errors
            if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
                raise CheckpointError(
                    f"cannot write the models to {folder}: {error}; {way_out(error)}, or pass"
                    " another folder to save_model()"
                ) from error
            raise
        finally:
            if bars:
                transformers_logging.enable_progress_bar()
