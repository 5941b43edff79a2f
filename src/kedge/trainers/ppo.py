"""PPO for language models, Trainer style."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState, set_seed
from transformers.trainer_utils import TrainOutput

from kedge.algorithms import Algorithm
from kedge.backends.hf.device import accelerator_for
from kedge.backends.rewards import RewardLog
from kedge.config.ppo import PPOConfig
from kedge.config.resolve import resolve
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine
from kedge.trainers import assembly
from kedge.trainers.evaluation import EvalSet, Evaluator
from kedge.trainers.hf_callbacks import Callbacks
from kedge.trainers.models import Models, policy_of, reference_of, value_of
from kedge.trainers.publishing import hub_of, provenance, pushing, write_card
from kedge.trainers.run import Run
from kedge.trainers.saving import write_models

_OLDER_NAMES = {
    "config": "args",
    "tokenizer": "processing_class",
    "policy": "model",
    "ref_policy": "ref_model",
}


class PPOTrainer:
    """Trains a causal language model with PPO against a reward.

    Args:
        args: every option; see ``PPOConfig``.
        processing_class: the policy's tokenizer.  None loads the one beside a model given by name.
        model: the policy: a model, a folder or a hub name.
        ref_model: what the KL penalty holds the policy to.  None: a frozen copy of the policy, or
            with PEFT its base without adapter.
        reward_model: a sequence-classification model, a folder or name, or a list of them.
        train_dataset: prompts: a column ``prompt`` or ``query`` (text or chat messages), or
            ``input_ids``.
        value_model: predicts the value.  None: see ``PPOConfig.value_source``.
        data_collator: pads a list of ``{"input_ids", "attention_mask"}``; None: Kedge's own.
        eval_dataset: prompts for evaluation, or a dict of named ones.
        optimizers: your own ``(optimizer, lr_scheduler)``, each may be None.
        callbacks: ``transformers.TrainerCallback`` objects or classes.
        peft_config: trains an adapter of this kind on the policy.
        reward_funcs: Python functions, ``"module:function"`` strings, models, or a list of these,
            next to or instead of ``reward_model``.
        reward_weights: weight of each source, models first; overrides ``PPOConfig``'s.
        reward_processing_class: tokenizers of reward models that do not share the policy's.
        rollout_engine: samples instead of the embedded engine.
        algorithm: a learning rule of your own instead of PPO.

    Raises:
        ConfigError: options that cannot work, before any weight is loaded where possible.
        DataError: prompts that cannot be used.
    """

    algorithm_name = "PPO"

    def __init__(  # noqa: PLR0913
        self,
        args: PPOConfig | None = None,
        processing_class: Any = None,
        model: str | nn.Module | None = None,
        ref_model: str | nn.Module | None = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: str | nn.Module | None = None,
        data_collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
        *,
        reward_funcs: Any = None,
        reward_weights: Sequence[float] | None = None,
        reward_processing_class: Any = None,
        rollout_engine: RolloutEngine | None = None,
        algorithm: Algorithm | None = None,
    ) -> None:
        self.args = args = checked(args)
        set_seed(args.seed)
        self.accelerator = accelerator = accelerator_for(args)
        self.processing_class = processing_class
        tokenizer = self._tokenizer = assembly.text_tokenizer(processing_class, model)
        settings = self._settings = resolve(
            args, world_size=accelerator.num_processes, eos_token_id=tokenizer.eos_token_id
        )
        wants_reference = ref_model is not None or settings.kl.coef > 0 or settings.kl.adaptive
        rule = algorithm or assembly.algorithm_of(settings, reference=wants_reference)
        prompts = assembly.prompting(
            train_dataset,
            tokenizer,
            settings,
            accelerator,
            collator=data_collator,
            min_group=rule.min_group,
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        eval_sets = self._eval_sets(eval_dataset)
        policy = policy_of(model, peft_config, args.model_adapter_name)
        reference, fresh = reference_of(
            policy, ref_model, args.ref_adapter_name, wanted=rule.needs_reference
        )
        self._made_of = provenance(
            self.algorithm_name, policy, train_dataset, reward_model, reward_funcs
        )
        value = None
        if rule.needs_values:
            value = value_of(value_model, reward_model, policy, settings.value)
        learner = assembly.learner_of(
            Models(policy=policy, reference=reference, fresh_reference=fresh, value=value),
            args,
            settings,
            prompts.plan,
            accelerator,
            optimizers,
        )
        log = RewardLog()
        judge = assembly.judge_of(
            settings,
            tokenizer,
            accelerator,
            reward_model=reward_model,
            reward_funcs=reward_funcs,
            weights=reward_weights,
            tokenizers=reward_processing_class,
            trainer_state=lambda: self.state,
            log=log,
            policy_vocab_size=getattr(policy.config, "vocab_size", None),
        )
        self._fill_in(prompts.plan.derived())
        self.callbacks = Callbacks(
            args,
            [*(callbacks or []), *pushing(args)],
            model=policy,
            processing_class=processing_class,
            rank=accelerator.process_index,
            local_rank=accelerator.local_process_index,
        )
        self.callbacks.watch(learner.optimizer, learner.scheduler)
        self.engine = assembly.engine_of(
            prompts,
            learner,
            judge,
            rule,
            settings,
            tokenizer=tokenizer,
            rollout_engine=rollout_engine,
        )
        evaluator = Evaluator(
            engine=self.engine,
            settings=settings,
            callbacks=self.callbacks,
            tokenizer=tokenizer,
            sets=eval_sets,
            reference=reference is not None,
        )
        self._run = Run(
            args=args,
            settings=settings,
            engine=self.engine,
            learner=learner,
            callbacks=self.callbacks,
            evaluator=evaluator,
            tokenizer=processing_class
            if hasattr(processing_class, "save_pretrained")
            else tokenizer,
            reward_log=log,
            fresh_reference=fresh,
        )

    # -- what users call ------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end; ``resume_from_checkpoint`` is True (the newest) or a folder."""
        resume = resume_from_checkpoint
        return self._run.train(self.args.resume_from_checkpoint if resume is None else resume)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Score completions of the evaluation prompts; metrics named ``eval_...``.

        Raises:
            ConfigError: there is no evaluation dataset.
        """
        evaluator = self._run.evaluator
        sets = evaluator.sets if eval_dataset is None else self._eval_sets(eval_dataset)
        if not sets:
            raise ConfigError("evaluate() needs prompts: give eval_dataset here or to the trainer")
        return evaluator.evaluate(sets)

    def generate_completions(self, sampling: bool = False) -> list[dict[str, object]]:
        """Completions of the evaluation prompts as a table: query, model response, score.

        Args:
            sampling: one batch only.
        """
        return self._run.evaluator.generate_completions(sampling=sampling)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save policy and tokenizer, and the value model in a folder below.

        Raises:
            ConfigError: there is no folder to save to.
        """
        folder = output_dir or self.args.output_dir
        if not folder:
            raise ConfigError("save_model() needs a folder: give output_dir here or in the config")
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_models(Path(folder), self._run.learner, self._run.tokenizer)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save model and card, and upload the folder to the hub."""
        self.save_model(_internal_call=True)
        self.create_model_card(**kwargs)
        if not self.accelerator.is_main_process:
            return None
        hub = hub_of(self.args, token=token, revision=revision)
        message = commit_message or "End of training"
        return hub.push(str(self.args.output_dir), message=message, blocking=blocking)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write ``README.md`` into ``output_dir``: what was trained, how, and what came out."""
        if self.accelerator.is_main_process:
            write_card(
                self._made_of,
                self.args,
                self.state.log_history,
                model_name=model_name,
                dataset_name=dataset_name,
                tags=tags,
            )

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a ``transformers.TrainerCallback``, an object or a class."""
        self.callbacks.add(callback)

    # -- what users look at ---------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """Progress; ``log_history`` holds every logged row."""
        return self.callbacks.state

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
        """The optimiser of policy and value."""
        return self._run.learner.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule."""
        return self._run.learner.scheduler

    def _eval_sets(self, dataset: Any) -> list[EvalSet]:
        if dataset is None:
            return []
        if isinstance(dataset, Mapping) and not _is_columns(dataset):
            return [s for name, d in dataset.items() for s in [self._eval_set(f"eval_{name}_", d)]]
        return [self._eval_set("eval_", dataset)]

    def _eval_set(self, prefix: str, dataset: Any) -> EvalSet:
        per_batch = self.args.per_device_eval_batch_size * self.accelerator.num_processes
        source = assembly.prompt_source(
            dataset,
            self._tokenizer,
            self._settings.data,
            self.accelerator,
            prompts=per_batch,
            shuffle=False,
        )
        batches = math.ceil(len(source) / per_batch)
        return EvalSet(prefix=prefix, source=source, batches=batches, rows=len(source))

    def _fill_in(self, derived: Mapping[str, int]) -> None:
        for name, value in derived.items():
            given = getattr(self.args, name)
            if given is not None and given != value:
                raise ConfigError(
                    f"{name}={given} was given, but the other sizes make it {value}; leave it unset"
                )
            setattr(self.args, name, value)


class PPOv2Trainer(PPOTrainer):
    """``PPOTrainer`` under its first name, which takes the older argument names too.

    ``config``, ``tokenizer``, ``policy`` and ``ref_policy`` mean ``args``, ``processing_class``,
    ``model`` and ``ref_model``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for old, new in _OLDER_NAMES.items():
            if old in kwargs:
                if new in kwargs:
                    raise ConfigError(f"{old} is the older name of {new}; give one of them")
                kwargs[new] = kwargs.pop(old)
        super().__init__(*args, **kwargs)


def checked(args: Any) -> PPOConfig:
    """The config, or defaults.

    Raises:
        ConfigError: something else was passed as the first argument.
    """
    if args is None:
        return PPOConfig()
    if not isinstance(args, PPOConfig):
        raise ConfigError(
            f"args is a {type(args).__name__}; kedge.PPOTrainer takes a kedge.PPOConfig first"
            " (models are given by keyword: model=, ref_model=, reward_model=)"
        )
    return args


def _is_columns(dataset: Mapping[str, Any]) -> bool:
    return any(name in dataset for name in ("prompt", "query", "input_ids"))
