"""The methods that all Trainer-style trainers share: train, evaluate, save, publish."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    enable_full_determinism,
    set_seed,
)
from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics, save_state
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as transformers_logging

from kedge.config.base import OnPolicyConfig
from kedge.loop.loop import Engine
from kedge.loop.shutdown import GracefulShutdown, exit_on_signals
from kedge.models.load import pick_tokenizer
from kedge.output import lock_output_dir
from kedge.records.errors import ConfigError, RewardError
from kedge.reporting.base import required_write
from kedge.rewards.build import as_list
from kedge.trainers.assembly import assemble
from kedge.trainers.launch import launch_context
from kedge.trainers.prompts import build_eval_sets
from kedge.trainers.spec import TrainerInputs, TrainerSpec

logger = logging.getLogger(__name__)


def _dataloader(trainer: Any) -> Any:
    """The rows of the dataset in batches of one rank, for a subclass with its own loop."""
    collate = trainer._inputs.data_collator or DataCollatorWithPadding(trainer.processing_class)
    loader = DataLoader(
        trainer.train_dataset,
        batch_size=trainer.engine.batch_sizes.local_prompts,
        shuffle=hasattr(trainer.train_dataset, "__len__"),  # not a stream
        collate_fn=collate,
        drop_last=True,
    )
    return trainer.accelerator.prepare(loader)


def _save_weights(trainer: Any, *_: Any, **__: Any) -> None:
    """Save the models of a subclass with its own loop, which counts its own steps."""
    trainer.save_model(
        str(Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}")
    )


# Trainer attributes that scripts for other libraries read, including options by TRL's names.
_ATTRIBUTES: Mapping[str, Callable[[Any], Any]] = {
    "tokenizer": lambda trainer: trainer.processing_class,
    "model_wrapped": lambda trainer: trainer.model,
    "ref_model": lambda trainer: getattr(trainer._run.learner.reference, "model", None),
    "callback_handler": lambda trainer: trainer.callbacks.handler,
    "control": lambda trainer: trainer.callbacks.control,
    "is_deepspeed_enabled": lambda trainer: _has_plugin(trainer, "deepspeed_plugin"),
    "is_fsdp_enabled": lambda trainer: _has_plugin(trainer, "fsdp_plugin"),
    "aux_loss_enabled": lambda trainer: False,  # load-balancing losses do not exist here
    "entropy_coef": lambda trainer: trainer.engine.entropy_coef,
    "ref_policy": lambda trainer: trainer.ref_model,
    "reward_model": lambda trainer: next(iter(trainer.reward_funcs), None),
    "stop_token_id": lambda trainer: next(iter(trainer.engine.sampling.stop_ids), None),
    "train_dataset_len": lambda trainer: len(trainer.train_dataset),
    "local_seed": lambda trainer: trainer.args.seed + trainer.accelerator.process_index * 100003,
    "dataloader": _dataloader,
    "_save_checkpoint": lambda trainer: functools.partial(_save_weights, trainer),
}
_OPTIONS = (
    *("beta", "temperature", "top_p", "top_k", "min_p", "num_generations", "reward_weights"),
)
_TRL_OPTIONS = {"max_completion_length": "response_length", "num_iterations": "num_ppo_epochs"}
# Methods of TRL's trainers that subclasses override, besides those of ``transformers.Trainer``.
_OF_TRL = (
    *("_calculate_rewards", "_compute_loss", "_generate", "_generate_and_score_completions"),
    *("_generate_single_turn", "_get_last_hidden_state", "_get_per_token_logps"),
    *("_get_per_token_logps_and_entropies", "_log_completions", "_tokenize_prompts"),
    *("compute_liger_loss", "get_high_entropy_mask", "_forward", "get_reward", "sampling_strategy"),
)
_LOSS = "pass algorithm=, such as replace(kedge.algorithms.ppo(), loss=my_loss)"
_ROWS = "pass the rows as train_dataset, in order with shuffle_dataset=False"
# Substring of the method's name -> what to do instead.
_WAYS_OUT = {
    **{"reward": "pass reward_funcs", "loss": _LOSS, "training_step": _LOSS, "logps": _LOSS},
    **{"generate": "pass rollout_func or rollout_engine", "data": _ROWS, "sampler": _ROWS},
    **dict.fromkeys(("optimizer", "scheduler"), "pass optimizers=(optimizer, scheduler)"),
    "save": "override save_model, which checkpoints call too",
}
_MAX_FRAMES = 4  # most frames shown of the user's code
P = ParamSpec("P")
R = TypeVar("R")


def short_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method so that a RewardError shows only its message and the user's frames.

    ``KEDGE_TRACEBACK=1`` shows every frame instead.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except RewardError as error:
            if os.environ.get("KEDGE_TRACEBACK", "0") not in ("", "0"):
                raise
            cause = error.__cause__
            if cause is not None and sys.version_info >= (3, 11):  # older versions have no notes
                error.add_note(_format_cause(cause))
                error.__cause__ = None
            raise error.with_traceback(None) from None

    return call


def _format_cause(cause: BaseException) -> str:
    """An exception with the first and the last frames of the user's code."""
    others = (str(Path(__file__).parents[1]), os.path.dirname(os.__file__))
    frames = traceback.extract_tb(cause.__traceback__)
    stack = [frame for frame in frames if not frame.filename.startswith(others)]
    if len(stack) > _MAX_FRAMES:
        stack = [stack[0], *stack[1 - _MAX_FRAMES :]]
    lines = [*traceback.format_list(stack), *traceback.format_exception_only(cause)]
    return "".join(lines).rstrip()


class TrainerShell:
    """The public methods of a trainer; subclasses add ``SPEC`` and the constructor's signature."""

    SPEC: ClassVar[TrainerSpec]
    stopped_by: str | None = None  # the finding that ended ``train``, with stop_on_finding

    def __init__(self, args: OnPolicyConfig | None, **arguments: Any) -> None:
        refuse_overrides(self, TrainerShell)
        kind = self.SPEC.config
        args = kind() if args is None else args
        if not isinstance(args, kind):
            raise ConfigError(
                f"args must be a kedge.{kind.__name__}, got a {type(args).__name__}; pass"
                " models by keyword: model=, ref_model="
            )
        inputs = TrainerInputs(spec=self.SPEC, args=args.checked(), trainer=self, **arguments)
        configure_process(inputs.args)
        in_launch = launch_context() is not None  # its driver handles signals
        with nullcontext() if in_launch else exit_on_signals():  # a server may start for minutes
            self._run = run = assemble(inputs)
        self.args = inputs.args
        self.processing_class = pick_tokenizer(inputs.processing_class, run.tokenizer)
        self.train_dataset, self.eval_dataset = inputs.train_dataset, inputs.eval_dataset
        self.accelerator = run.learner.accelerator
        self.callbacks = run.callbacks
        self.callbacks.log = self.log
        self.reward_funcs = [*as_list(inputs.reward_model), *as_list(inputs.reward_funcs)]
        given = as_list(inputs.reward_processing_classes)
        self.reward_processing_classes = given or [None] * len(self.reward_funcs)
        self._inputs = inputs

    # -- what users call ------------------------------------------------------------------------

    @short_errors
    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end; ``resume_from_checkpoint`` is True (newest checkpoint) or a folder.

        After a finished run it only warns; after an interrupted one it continues.  In the main
        thread, the first Ctrl-C or SIGTERM takes effect once the iteration is finished and saved, a
        second one at once.  Signals that the program handles itself are left alone.

        Raises:
            ConfigError: another run is writing to ``output_dir``.
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM.
        """
        resume, self.stopped_by = resume_from_checkpoint, None
        if not resume and self.engine.step >= (total := self.engine.batch_sizes.iterations):
            logger.warning(
                "all %d iterations are done, nothing to train; to train longer, resume with larger"
                " total_episodes, max_steps or num_train_epochs",
                total,
            )
        shutdown = self._run.checkpoints.shutdown = GracefulShutdown()
        in_launch = launch_context() is not None  # its driver handles signals
        with lock_output_dir(self.args), nullcontext() if in_launch else shutdown.install():
            if self.args.output_dir and self.accelerator.is_main_process:
                from kedge.reporting.run_info import write_run_info

                with required_write("output_dir", self.args.output_dir):
                    write_run_info(self._provenance, self.args, device=str(self.accelerator.device))
            with self._run.playing():
                chosen = self.args.resume_from_checkpoint if resume is None else resume
                output = self._run.train(chosen)
        if (shutdown.requested or self.stopped_by) and self.is_world_process_zero():
            step, args = self.engine.step, self.args
            saved = Path(args.output_dir or "") / f"checkpoint-{step}"
            complete = args.output_dir and saved.is_dir() and not args.save_only_model
            total = self.engine.batch_sizes.iterations
            how = self.resume_hint(saved if complete else None)
            why = f" by stop_on_finding ({self.stopped_by})" if self.stopped_by else ""
            sys.stderr.write(f"kedge: stopped after iteration {step} of {total}{why}; {how}\n")
        shutdown.reraise()
        return output

    @staticmethod
    def resume_hint(checkpoint: Path | None) -> str:
        """A sentence on how to resume a run that a signal stopped; commands print their own.

        ``checkpoint`` is None if none was saved.
        """
        if checkpoint is None:
            return "no checkpoint was saved to resume from"
        return f"resume from {checkpoint} with train(resume_from_checkpoint=True)"

    @short_errors
    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Score completions of the evaluation prompts; metrics named ``eval_...``.

        Raises:
            ConfigError: there is no evaluation dataset.
        """
        sets = self._run.eval_sets
        if eval_dataset is not None:
            tokenizer = self._run.tokenizer
            sets = build_eval_sets(eval_dataset, self.args, tokenizer, self.accelerator)
            if self._run.check_prompts is not None:
                self._run.check_prompts([eval_set.source for eval_set in sets])
        if not sets:
            raise ConfigError("evaluate() needs prompts: pass eval_dataset here or to the trainer")
        with self._run.playing():
            return self._run.evaluations.evaluate(sets)

    @short_errors
    def generate_completions(self, sampling: bool = False) -> list[dict[str, object]]:
        """Sample the evaluation prompts into a table: query, model response, score.

        Args:
            sampling: one batch only.
        """
        with self._run.playing():
            return self._run.evaluations.generate_completions(sampling=sampling)

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

        Calls ``push_to_hub`` afterwards if ``args.push_to_hub`` is set or one of the last four
        arguments is given.

        Args:
            output_dir: the folder; None: ``args.output_dir``, which is the folder to upload.
            commit_message: commit message of the upload.
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
        self._run.write_models(Path(folder))
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
        from kedge.reporting.hub import build_hub

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
            from kedge.reporting.run_info import write_card

            write_card(
                self._provenance,
                self.args,
                self.state.log_history,
                model_name=model_name,
                dataset_name=dataset_name,
                tags=tags,
            )

    @functools.cached_property
    def _provenance(self) -> dict[str, Any]:
        """Algorithm, model, prompts and rewards, for the model card and ``run.json``."""
        from kedge.reporting.run_info import reward_name

        inputs = self._inputs
        dataset = getattr(getattr(inputs.train_dataset, "info", None), "dataset_name", None)
        return {
            "algorithm": self.SPEC.name if inputs.algorithm is None else inputs.algorithm.name,
            "model": getattr(getattr(self.model, "config", None), "_name_or_path", "") or None,
            "datasets": [dataset] if dataset else [],
            "rewards": [*map(reward_name, self.reward_funcs)],
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a row to ``state.log_history`` and send it to callbacks and trackers.

        Every row of a run goes through this method, so a subclass can override it.

        Args:
            logs: numbers by name.
            start_time: not used; ``transformers.Trainer`` has it.
        """
        self.callbacks.write_row(logs)

    # Used by transformers' callbacks: they read is_world_process_zero, args.output_dir and state.
    log_metrics, save_metrics, save_state = log_metrics, save_metrics, save_state
    metrics_format = staticmethod(metrics_format)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a ``transformers.TrainerCallback``, an object or a class."""
        self.callbacks.add(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Remove and return a callback: an object, or the first of a class."""
        return self.callbacks.handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback: an object, or the first of a class."""
        self.callbacks.handler.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return bool(self.accelerator.is_main_process)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return bool(self.accelerator.is_local_main_process)

    def get_num_trainable_parameters(self) -> int:
        """Number of trainable parameters of the policy."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name](self)
        if name in (*_OPTIONS, *_TRL_OPTIONS) and "args" in vars(self):
            return getattr(self.args, _TRL_OPTIONS.get(name, name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of policy and value."""
        return self._run.learner.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule."""
        return self._run.learner.scheduler


def _has_plugin(trainer: Any, name: str) -> bool:
    return getattr(trainer.accelerator.state, name, None) is not None


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


def refuse_overrides(trainer: object, base: type) -> None:
    """Check that every hook that the class of a trainer overrides exists in ``base``."""
    hooks = {n for n in (*dir(Trainer), *_OF_TRL) if not n.startswith("__")} - set(dir(base))
    for kind in type(trainer).__mro__:
        unused = sorted(hooks & vars(kind).keys())
        if not unused or kind.__module__.startswith(("kedge.", "transformers.")):
            continue
        way = next((way for part, way in _WAYS_OUT.items() if part in unused[0]), None)
        raise ConfigError(
            f"{kind.__name__} overrides {', '.join(unused)}, which {base.__name__} never calls, so"
            f" it would train something else: {way or 'use a transformers.TrainerCallback'}"
            " instead, or give the method another name if your own code calls it"
        )
