"""From what a user hands over to an engine that can run.  Everything is decided here, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator

from kedge.algorithms import Algorithm, ppo
from kedge.backends.data import DatasetPrompts
from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.backends.hf.settings import LearnerSettings
from kedge.backends.rewards import FunctionOptions, ModelOptions, RewardLog, reward_source
from kedge.config.ppo import PPOConfig
from kedge.config.resolve import DataOptions, PPOSettings
from kedge.engine.kl_control import AdaptiveKL, FixedKL
from kedge.engine.loop import Engine
from kedge.engine.plan import BatchPlan, plan_batches
from kedge.engine.recording import Replay, Replayed
from kedge.errors import ConfigError, DataError
from kedge.protocols import KLController, RewardSource, RolloutEngine
from kedge.trainers.models import Models
from kedge.trainers.saving import recording_of

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """Training prompts and the sizes that follow from them."""

    source: DatasetPrompts
    plan: BatchPlan


def text_tokenizer(processing_class: Any, model: Any) -> Any:
    """The tokenizer: given, inside a processor, or beside a model given by name.

    Raises:
        ConfigError: there is none.
    """
    if processing_class is None and isinstance(model, str):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is None or not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(
            f"processing_class={processing_class!r} is no tokenizer; pass"
            " AutoTokenizer.from_pretrained(...), which turns prompts into tokens and back"
        )
    return tokenizer


def prompting(
    dataset: Any,
    tokenizer: Any,
    settings: PPOSettings,
    accelerator: Accelerator,
    *,
    collator: Any = None,
    min_group: int = 1,
) -> Prompting:
    """Tokenise the training prompts and derive every size.

    Raises:
        DataError: no dataset, or one that cannot be used.
        ConfigError: sizes that do not divide.
    """
    if dataset is None:
        raise DataError("train_dataset=None: PPO needs prompts, a dataset with a `prompt` column")
    sizes = asdict(settings.batch)
    draft = plan_batches(**sizes | {"max_steps": 1}, min_group=min_group)
    source = prompt_source(
        dataset,
        tokenizer,
        settings.data,
        accelerator,
        prompts=draft.prompts,
        group=draft.group,
        shuffle=settings.data.shuffle,
        collator=collator,
    )
    plan = plan_batches(**sizes, dataset_rows=len(source), min_group=min_group)
    return Prompting(source=source, plan=plan)


def prompt_source(
    dataset: Any,
    tokenizer: Any,
    options: DataOptions,
    accelerator: Accelerator,
    *,
    prompts: int,
    group: int = 1,
    shuffle: bool,
    collator: Any = None,
) -> DatasetPrompts:
    """Prompts of a dataset, this process's share."""
    return DatasetPrompts(
        dataset,
        tokenizer,
        prompts_per_step=prompts,
        num_generations=group,
        seed=options.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        shuffle=shuffle,
        max_prompt_length=options.max_prompt_length,
        overlong=options.overlong,
        data_collator=collator,
        dataset_num_proc=options.num_proc,
    )


def judge_of(
    settings: PPOSettings,
    tokenizer: Any,
    accelerator: Accelerator,
    *,
    reward_model: Any,
    reward_funcs: Any,
    weights: Sequence[float] | None,
    tokenizers: Any,
    trainer_state: Any,
    log: RewardLog,
    policy_vocab_size: int | None,
) -> RewardSource:
    """One reward source out of models and functions, with the penalties of the options."""
    options = settings.reward
    return reward_source(
        reward_model,
        reward_funcs,
        policy_tokenizer=tokenizer,
        weights=options.weights if weights is None else weights,
        tokenizers=tokenizers,
        models=ModelOptions(
            chunk_rows=options.chunk,
            autocast=_DTYPES[settings.learner.precision],
            device=accelerator.device,
            policy_vocab_size=policy_vocab_size,
        ),
        functions=FunctionOptions(
            on_error=options.on_error,
            error_score=options.error_score,
            log=log,
            trainer_state=trainer_state,
        ),
        missing_eos_penalty=options.penalty if options.missing_stop == "subtract" else None,
        non_eos_penalty=options.missing_stop == "replace",
        penalty_reward_value=options.penalty,
    )


def learner_of(
    models: Models,
    args: PPOConfig,
    settings: PPOSettings,
    plan: BatchPlan,
    accelerator: Accelerator,
    optimizers: tuple[Any, Any],
) -> HFLearner:
    """The models that train, and their optimiser."""
    options, sampling = settings.learner, settings.sampling
    return HFLearner(
        models.policy,
        args,
        LearnerSettings(
            total_updates=plan.updates,
            temperature=sampling.temperature,
            min_new_tokens=sampling.min_new_tokens,
            stop_ids=sampling.stop_ids,
            value_learning_rate=settings.value.learning_rate,
            max_grad_norm=options.max_grad_norm,
            forward_rows=options.chunk,
            gradient_checkpointing=options.gradient_checkpointing,
            checkpointing_options=options.gradient_checkpointing_kwargs or None,
            reuse_behavior_logprobs=options.precision == "no" and settings.max_lag == 0,
            allow_low_precision_weights=options.allow_low_precision_weights,
        ),
        value=models.value,
        reference=models.reference,
        accelerator=accelerator,
        optimizers=optimizers,
    )


def algorithm_of(settings: PPOSettings, *, reference: bool) -> Algorithm:
    """PPO with the options of the config."""
    return ppo(**asdict(settings.ppo), reference=reference)


def engine_of(
    prompts: Prompting,
    learner: HFLearner,
    judge: RewardSource,
    algorithm: Algorithm,
    settings: PPOSettings,
    *,
    tokenizer: Any,
    rollout_engine: RolloutEngine | None,
) -> Engine:
    """The loop with all its parts."""
    rollouts = rollout_engine or EmbeddedEngine(
        learner.policy,
        pad_id=pad_id(tokenizer),
        tokenizer=tokenizer,
        live=settings.max_lag == 0,
        chunk_rows=settings.learner.chunk,
        autocast=_DTYPES[settings.learner.precision],
        spare_slot=settings.ppo.score_position == "after_last",
    )
    source: Any = prompts.source
    if settings.replay_rollouts is not None:
        replay = Replay(
            settings.replay_rollouts,
            about=recording_of(settings),
            rank=learner.accelerator.process_index,
            world_size=learner.accelerator.num_processes,
        )
        source = rollouts = judge = Replayed(replay, rows=prompts.plan.local_rows)
    return Engine(
        source=source,
        rollouts=rollouts,
        judge=judge,
        learner=learner,
        algorithm=algorithm,
        kl=kl_controller(settings),
        plan=prompts.plan,
        sampling=settings.sampling,
        seed=settings.seed,
        max_lag=settings.max_lag,
        value_warmup_steps=settings.value.warmup_steps if algorithm.needs_values else 0,
    )


def kl_controller(settings: PPOSettings) -> KLController:
    """The coefficient of the KL penalty."""
    options = settings.kl
    if options.adaptive:
        return AdaptiveKL(value=options.coef, target=options.target, horizon=options.horizon)
    return FixedKL(value=options.coef)


def pad_id(tokenizer: Any) -> int:
    """What fills the slots after a response; masks never depend on it."""
    given = tokenizer.pad_token_id
    if given is None:
        given = tokenizer.eos_token_id
    return 0 if given is None else int(given)
