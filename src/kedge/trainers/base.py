"""The methods that all Trainer-style trainers share: train, evaluate, save, publish."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    enable_full_determinism,
    set_seed,
)
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as transformers_logging

from kedge.engine.loop import Engine
from kedge.errors import ConfigError
from kedge.trainers.build.build import build_run
from kedge.trainers.build.data import build_eval_sets
from kedge.trainers.build.inputs import TrainerInputs
from kedge.trainers.build.loading import own_or
from kedge.trainers.reporting.best_effort import required_write
from kedge.trainers.reporting.hub import build_hub, provenance, write_card
from kedge.trainers.reporting.run_info import read_run_info, write_run_info
from kedge.trainers.run.checkpoint import write_models
from kedge.trainers.run.output_lock import claimed
from kedge.trainers.run.short_errors import short_errors
from kedge.trainers.spec import TrainerSpec

logger = logging.getLogger(__name__)


class TrainerShell:
    """The public methods of a trainer; subclasses add ``SPEC`` and the constructor's signature.

    Args:
        arguments: the constructor's arguments by name; see ``kedge.PPOTrainer``.
    """

    SPEC: ClassVar[TrainerSpec]

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        inputs = TrainerInputs.of(self.SPEC, arguments)
        configure_process(inputs.args)
        self._run = run = build_run(inputs)
        self.args = inputs.args
        self.processing_class = own_or(inputs.processing_class, run.tokenizer)
        self.train_dataset, self.eval_dataset = inputs.train_dataset, inputs.eval_dataset
        self.accelerator = run.learner.accelerator
        tokenizers = inputs.reward_processing_classes
        self.reward_processing_classes = (
            list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
        )
        self.callbacks = run.callbacks
        self._provenance = provenance(
            self.SPEC.name if inputs.algorithm is None else inputs.algorithm.name,
            self.model,
            inputs.train_dataset,
            inputs.reward_model,
            inputs.reward_funcs,
        )

    # -- what users call ------------------------------------------------------------------------

    @short_errors
    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end; ``resume_from_checkpoint`` is True (newest checkpoint) or a folder.

        After a finished run it only warns; after an interrupted one it continues.

        Raises:
            ConfigError: another run is writing to ``output_dir``.
        """
        resume = resume_from_checkpoint
        if not resume and self.engine.step >= (total := self.engine.batch_sizes.iterations):
            logger.warning(
                "all %d iterations are done, nothing to train; to train longer, resume with larger"
                " total_episodes, max_steps or num_train_epochs",
                total,
            )
        with claimed(self.args):
            if self.args.output_dir and self.accelerator.is_main_process:
                with required_write("output_dir", self.args.output_dir):
                    write_run_info(self._provenance, self.args, device=str(self.accelerator.device))
            return self._run.train(self.args.resume_from_checkpoint if resume is None else resume)

    @short_errors
    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Score completions of the evaluation prompts; metrics named ``eval_...``.

        Raises:
            ConfigError: there is no evaluation dataset.
        """
        evaluator = self._run.evaluator
        sets = evaluator.sets
        if eval_dataset is not None:
            tokenizer = self._run.tokenizer
            sets = build_eval_sets(eval_dataset, self.args, tokenizer, self.accelerator)
        if not sets:
            raise ConfigError("evaluate() needs prompts: pass eval_dataset here or to the trainer")
        return evaluator.evaluate(sets)

    @short_errors
    def generate_completions(self, sampling: bool = False) -> list[dict[str, object]]:
        """Sample the evaluation prompts into a table: query, model response, score.

        Args:
            sampling: one batch only.
        """
        return self._run.evaluator.generate_completions(sampling=sampling)

    def save_model(
        self,
        output_dir: str | None = None,
        _internal_call: bool = False,
        *,
        commit_message: str | None = None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
    ) -> None:
        """Save policy and tokenizer, and the value model in a subfolder.

        With ``args.push_to_hub``, or if one of the last four is given, ``push_to_hub`` follows.

        Args:
            output_dir: the folder; None: ``args.output_dir``, which is also what is uploaded.
            commit_message: of the upload.
            blocking: wait for the end of the upload.
            token: access token; None: ``args.hub_token``.
            revision: branch to upload to; None: ``args.hub_revision``.

        Raises:
            ConfigError: no folder is given.
        """
        folder = output_dir or self.args.output_dir
        if not folder:
            raise ConfigError("save_model() needs a folder: set output_dir here or in the config")
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_models(Path(folder), self._run.learner, self._run.tokenizer)
        asked = self.args.push_to_hub or commit_message or token or revision or not blocking
        if asked and not _internal_call:
            self.push_to_hub(commit_message or "Model save", blocking, token, revision)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save model and model card, and upload the folder to the hub."""
        self.save_model(_internal_call=True)
        self.create_model_card(**kwargs)
        if not self.accelerator.is_main_process:
            return None
        hub = build_hub(self.args, token=token, revision=revision)
        message = commit_message or "End of training"
        return hub.push(str(self.args.output_dir), message=message, blocking=blocking)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the model card ``README.md`` into ``output_dir``: setup and results."""
        if self.accelerator.is_main_process:
            write_card(
                self._provenance,
                self.args,
                self.state.log_history,
                about=read_run_info(self.args.output_dir),
                model_name=model_name,
                dataset_name=dataset_name,
                tags=tags,
            )

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a ``transformers.TrainerCallback``, an object or a class."""
        self.callbacks.add(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Remove and return a callback: an object, or the first of a class."""
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback: an object, or the first of a class."""
        self.callbacks.remove(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return bool(self.accelerator.is_main_process)

    # -- what users look at ---------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """Progress; ``log_history`` holds every logged row."""
        return self.callbacks.state

    @property
    def engine(self) -> Engine:
        """The loop and its parts: prompts, rollout engine, reward, learner, KL controller."""
        return self._run.engine

    @property
    def model(self) -> nn.Module:
        """The policy."""
        return self._run.learner.policy

    @property
    def value_model(self) -> nn.Module | None:
        """The value model, or the value head on the policy."""
        value = self._run.learner.value
        return getattr(value, "model", value)

    @property
    def aux_loss_enabled(self) -> bool:
        """TRL's name: whether MoE models get a load-balancing loss; always False."""
        return False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of policy and value."""
        return self._run.learner.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule."""
        return self._run.learner.scheduler


def configure_process(args: TrainingArguments) -> None:
    """Seed all generators, and set the verbosity by ``log_level`` and ``log_level_replica``.

    ``log_level="passive"`` leaves the verbosity unchanged.
    """
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)
    wanted = args.log_level if args.should_log else args.log_level_replica
    if wanted != "passive":
        level = args.get_process_log_level()
        transformers_logging.set_verbosity(level)
        logging.getLogger("kedge").setLevel(level)
