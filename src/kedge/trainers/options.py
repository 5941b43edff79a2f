"""From a config to what each builder takes, most often a frozen record: one function for each."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from kedge.algorithms import Algorithm
from kedge.config.algorithms import ValueArguments
from kedge.config.base import OnPolicyConfig
from kedge.config.common import EnvironmentArguments, GroupArguments, check_end
from kedge.config.declare import read_mapping
from kedge.config.ppo import PPOConfig
from kedge.config.rollout_engines import RolloutEngineSpec
from kedge.learner.distributed import sharding_strategy
from kedge.learner.models import ModelOptions
from kedge.learner.settings import LearnerSettings
from kedge.loop.batch_sizes import BatchSizes
from kedge.loop.corrections import CorrectionOptions
from kedge.models.load import check_init_kwargs, policy_loading
from kedge.records.errors import ConfigError
from kedge.records.types import Sampling
from kedge.rewards.build import RewardOptions, as_list
from kedge.trainers.spec import TrainerInputs

if TYPE_CHECKING:
    from kedge.environments import EpisodeLimits

logger = logging.getLogger(__name__)


def size_options(args: OnPolicyConfig) -> dict[str, Any]:
    """The options that ``compute_batch_sizes`` takes."""
    return {
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "num_mini_batches": args.num_mini_batches,
        "num_ppo_epochs": args.num_ppo_epochs,
        "num_generations": args.num_generations,
        "total_episodes": args.total_episodes,
        "max_steps": args.max_steps,
        "num_train_epochs": args.num_train_epochs,
        "max_tokens_per_micro_batch": args.max_tokens_per_micro_batch,
    }


def check_sizes(args: OnPolicyConfig, sizes: BatchSizes) -> None:
    """Check that what is whitened has a variance, and that given sizes are the derived ones.

    Unset sizes are filled in, for scripts that read them.
    """
    whitens = {}
    if isinstance(args, PPOConfig):
        whitens = {"advantages": args.whiten_advantages, "rewards": args.whiten_rewards}
    for name, whiten in whitens.items():
        if whiten and sizes.batch_size * args.response_length < 2:
            raise ConfigError(
                f"whiten_{name}=True needs a batch of at least 2 tokens, got one sample with"
                " response_length=1, which has no variance; enlarge the batch or set"
                f" whiten_{name}=False"
            )
    given: Mapping[str, Any] = vars(args)
    for name, size in sizes.derived().items():
        if given[name] not in (None, size):
            raise ConfigError(
                f"{name}={given[name]} must be {size}, as the other sizes imply"
                f" (per_device_train_batch_size={args.per_device_train_batch_size},"
                f" gradient_accumulation_steps={args.gradient_accumulation_steps}, ...); change"
                " those and leave it unset"
            )
        setattr(args, name, size)  # only in the trainer's copy


def prompt_options(args: OnPolicyConfig, accelerator: Accelerator) -> dict[str, Any]:
    """Arguments of ``DatasetPrompts``, for training and for evaluation."""
    return {
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "max_prompt_length": args.max_prompt_length,
        "overlong": args.overlong_prompts,
        "chat_template_kwargs": read_mapping(args.chat_template_kwargs),
        "dataset_num_proc": args.dataset_num_proc,
    }


def sampling_options(args: OnPolicyConfig, eos_token_ids: Sequence[int]) -> Sampling:
    """Sampling distribution of responses and where they end."""
    check_end(args, has_eos=bool(eos_token_ids))
    stops = [*eos_token_ids] if args.stop_token == "eos" else []
    stops += args.stop_token_ids or []
    if args.stop_token == "eos" and not (stops or args.stop_strings):
        logger.warning(
            "neither the tokenizer nor the model's generation_config has an EOS token: every"
            " response has response_length=%d tokens",
            args.response_length,
        )
    sampling = Sampling(
        max_new_tokens=args.response_length,
        min_new_tokens=args.min_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        stop_ids=tuple(dict.fromkeys(stops)),
        stop_strings=tuple(args.stop_strings or ()),
    )
    cut = {"top_k": (args.top_k, 0), "top_p": (args.top_p, 1.0), "min_p": (args.min_p, 0.0)}
    if shown := [f"{name}={x}" for name, (x, off) in cut.items() if x != off]:
        logger.warning(
            "%s: training normalizes over the tokens that could be sampled, which are recorded",
            ", ".join(shown),
        )
    return sampling


def precision(args: OnPolicyConfig) -> torch.dtype | None:
    """Dtype of mixed precision; None is float32."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def loading_options(args: OnPolicyConfig) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a policy or reference given by name."""
    trust = {"trust_remote_code": args.trust_remote_code}
    return trust | check_init_kwargs(read_mapping(args.model_init_kwargs))


def value_arguments(args: OnPolicyConfig) -> ValueArguments:
    """The options of the value model; a config without them has a head on the policy."""
    none = ValueArguments(value_source="policy")
    return args if isinstance(args, ValueArguments) else none


def model_options(
    inputs: TrainerInputs,
    algorithm: Algorithm,
    engine: RolloutEngineSpec,
    accelerator: Accelerator,
    *,
    tokenizer: Any,
    loading: Mapping[str, Any],
    plays: bool,
) -> ModelOptions:
    """The models; ``loading``: arguments of ``from_pretrained`` for policy and reference."""
    args, model, lag = inputs.args, inputs.model, bool(inputs.args.max_lag)
    assert model is not None  # find_tokenizer requires it
    adapts = inputs.peft_config is not None
    kwargs = args.gradient_checkpointing_kwargs if args.gradient_checkpointing else None
    loading = policy_loading(
        model,
        loading,
        quantization=inputs.quantization_config,
        adapts=adapts,
        bf16=bool(args.bf16),
    )
    sharded = sharding_strategy(accelerator) != "none"
    receives = sharded and accelerator.process_index > 0  # shards from rank 0
    # Some need a whole model here: quantized weights, an engine of this rank, reference workers.
    here = engine.per_rank if engine.copies_weights else lag
    whole = loading["quantization"] is not None or here or args.ray_ref_workers
    copies = (engine.copies_weights or lag) and inputs.rollout_engine is None
    value, rewards = value_arguments(args), as_list(inputs.reward_model)
    # The value model may start from the first reward model.
    tokenizers = inputs.reward_processing_classes
    if not isinstance(tokenizers, list | tuple):
        tokenizers = [tokenizers] * len(rewards)
    pairs = zip_longest(rewards, tokenizers)
    reward = next((pair for pair in pairs if isinstance(pair[0], nn.Module | str)), (None, None))
    return ModelOptions(
        policy=model,
        loading=loading,
        bf16=bool(args.bf16),
        tokenizer=tokenizer,
        peft_config=inputs.peft_config,
        adapter=args.model_adapter_name,
        train_layers=args.train_layers,
        reentrant_checkpointing=isinstance(kwargs, dict) and bool(kwargs.get("use_reentrant")),
        allow_low_precision_weights=args.allow_low_precision_weights,
        needs_values=algorithm.needs_values,
        value_source=value.value_source,
        value_model=inputs.value_model,
        value_adapter=value.value_adapter,
        freeze_value_attention=value.freeze_value_attention,
        reward_model=reward[0],
        reward_tokenizer=reward[1],
        plays=plays,
        needs_reference=algorithm.needs_reference,
        needs_full_kl=algorithm.needs_full_kl,
        ref_model=inputs.ref_model,
        ref_adapter=args.ref_adapter_name,
        ref_workers=args.ray_ref_workers,
        ref_moves=isinstance(args, GroupArguments) and args.sync_ref_model,
        reward_adapter=args.reward_adapter,
        reward_models=tuple(
            x for x in (*rewards, *as_list(inputs.reward_funcs)) if isinstance(x, nn.Module)
        ),
        sharded=sharded,
        without_weights=receives and not whole,
        copy_to=accelerator.device if sharded and copies else None,
    )


def reward_options(
    inputs: TrainerInputs, tokenizer: Any, sampling: Sampling, *, vocabulary: int | None
) -> RewardOptions:
    """How responses are scored; ``vocabulary``: token ids that the policy knows, None: unknown."""
    args = inputs.args
    models: dict[str, Any] = {
        "chunk_rows": args.local_rollout_forward_batch_size,
        "trust_remote_code": args.trust_remote_code,
        "autocast": precision(args),
        "policy_vocab_size": min(len(tokenizer), vocabulary or len(tokenizer)),
    }
    if inputs.spec.equal_vocabulary:
        models["equal_vocabulary"] = vocabulary
    if inputs.own_loop:
        models["check_labels"] = False  # it may read another number
    return RewardOptions(
        policy_tokenizer=tokenizer,
        ends=sampling.stop_ids,
        weights=inputs.weights,
        tokenizers=inputs.reward_processing_classes,
        missing_eos_penalty=args.missing_eos_penalty,
        non_eos_penalty=args.non_eos_penalty,
        penalty_reward_value=args.penalty_reward_value,
        models=models,
        functions={
            "on_error": args.on_reward_error,
            "error_score": args.reward_error_score,
            "timeout": args.reward_timeout,
        },
    )


def learner_settings(
    args: OnPolicyConfig,
    sizes: BatchSizes,
    sampling: Sampling,
    *,
    needs_values: bool,
    own_samples: bool,
) -> LearnerSettings:
    """How the learner computes; ``own_samples``: the rollout engine shares its weights."""
    kwargs, value = args.gradient_checkpointing_kwargs, value_arguments(args)
    rate = value.value_learning_rate
    settings = LearnerSettings(
        total_iterations=sizes.iterations,
        value_warmup_steps=value.value_warmup_steps if needs_values else 0,
        temperature=sampling.temperature,
        min_new_tokens=sampling.min_new_tokens,
        stop_ids=sampling.stop_ids,
        value_learning_rate=args.learning_rate if rate is None else rate,
        max_grad_norm=args.max_grad_norm or math.inf,
        forward_rows=args.local_rollout_forward_batch_size,
        gradient_checkpointing=bool(args.gradient_checkpointing),
        checkpointing_options=kwargs if kwargs and isinstance(kwargs, dict) else None,
        # tf32 rounds by batch shape
        reuse_behavior_logprobs=own_samples and precision(args) is None and not args.tf32,
        allow_low_precision_weights=args.allow_low_precision_weights,
        entropy_grad=bool(args.entropy_coef),
        cache_trunk=args.cache_trunk,
    )
    if isinstance(args, GroupArguments) and args.sync_ref_model:
        steps, alpha = args.ref_model_sync_steps, args.ref_model_mixup_alpha
        settings = replace(settings, reference_sync_steps=steps, reference_mixup=alpha)
    return settings


def episode_limits(args: EnvironmentArguments, *, context: int | None = None) -> EpisodeLimits:
    """What ends an episode; ``context``: tokens that the models can read, None: the engine's."""
    from kedge.environments import EpisodeLimits

    return EpisodeLimits(
        max_turns=args.max_turns,
        max_turn_tokens=args.max_turn_tokens,
        max_observation_tokens=args.max_observation_tokens,
        max_seconds=args.max_episode_seconds,
        context=context,
        keeps_last=isinstance(args, PPOConfig) and args.bootstrap_truncated,
        timeout=args.environment_timeout,
        max_concurrency=args.environment_concurrency,
        on_env_error=args.on_env_error,
        env_error_score=args.env_error_score,
    )


def check_limits(args: EnvironmentArguments, *, plays: bool) -> None:
    """Reject limits on episodes in a run without an environment."""
    for f in fields(EnvironmentArguments):
        if not plays and (value := getattr(args, f.name)) != f.default:
            raise ConfigError(
                f"{f.name}={value!r} has no effect without an environment; leave it"
                " out, or pass environment, tools or environment_factory"
            )


def correction_options(args: OnPolicyConfig) -> CorrectionOptions:
    """What is asked for against samples of another policy."""
    return CorrectionOptions(
        mode=args.sampler_correction or "off",
        level=args.sampler_correction_level,
        low=args.sampler_correction_low,
        high=args.sampler_correction_high,
        max_lag=args.max_lag or 0,
        in_flight=args.in_flight_weight_updates,
    )
