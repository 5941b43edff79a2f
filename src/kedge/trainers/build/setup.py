"""The first stage of a run: tokenizer, sampling, prompts and sizes, before any weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from kedge.algorithms import Algorithm
from kedge.backends.data import DatasetPrompts
from kedge.backends.hf.distributed import accelerator_for
from kedge.backends.ray.resources import RayCluster
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import RolloutEngineSpec, find_engine
from kedge.config.sampling import build_sampling
from kedge.engine.batch_sizes import BatchSizes
from kedge.errors import ConfigError
from kedge.trainers.build.data import EvalSet, build_eval_sets, build_prompts
from kedge.trainers.build.inputs import TrainerInputs
from kedge.trainers.build.loading import end_tokens, load_tokenizer, loading_options
from kedge.trainers.run.output_lock import check_targets
from kedge.trainers.spec import shared_kwargs
from kedge.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is known of a run before any weights are loaded."""

    inputs: TrainerInputs
    algorithm: Algorithm
    accelerator: Accelerator
    tokenizer: Any
    sampling: Sampling
    prompts: DatasetPrompts
    sizes: BatchSizes
    eval_sets: list[EvalSet]
    engine: RolloutEngineSpec  # that the config names
    loading: Mapping[str, Any]  # arguments of ``load_policy`` for the policy and the reference

    @property
    def args(self) -> OnPolicyConfig:
        """The trainer's copy of the config, with the derived sizes."""
        return self.inputs.args

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of mixed precision; None is float32."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    @property
    def ray_cluster(self) -> RayCluster:
        """The Ray cluster that the config names."""
        args = self.args
        engines = args.vllm_num_engines if self.engine.actors else 0
        actors = engines + args.ray_reward_workers + args.ray_ref_workers
        return RayCluster(actors=actors, **shared_kwargs(args, RayCluster))

    @property
    def pad_id(self) -> int:
        """The id that pads responses."""
        return pad_id(self.tokenizer)


def build_setup(inputs: TrainerInputs) -> Setup:
    """Check the output folders, tokenize the prompts and derive the sizes.

    Raises:
        ConfigError: invalid or conflicting options.
        DataError: invalid prompts.
    """
    args = inputs.args
    check_targets(args)
    accelerator = accelerator_for(args)
    tokenizer = load_tokenizer(inputs.processing_class, inputs.model, args)
    sampling = build_sampling(args, end_tokens(inputs, tokenizer))
    algorithm = inputs.build_algorithm()
    prompts, sizes = build_prompts(
        inputs.train_dataset,
        args,
        tokenizer,
        accelerator,
        collator=inputs.data_collator,
        min_group=algorithm.min_group,
    )
    _check_whitening(args, sizes)
    _set_derived_sizes(args, sizes)
    return Setup(
        inputs=inputs,
        algorithm=algorithm,
        accelerator=accelerator,
        tokenizer=tokenizer,
        sampling=sampling,
        prompts=prompts,
        sizes=sizes,
        eval_sets=build_eval_sets(inputs.eval_dataset, args, tokenizer, accelerator),
        engine=find_engine(args),
        loading=loading_options(inputs),
    )


def pad_id(tokenizer: Any) -> int:
    """The id that pads responses; masks never depend on it."""
    token_id = tokenizer.pad_token_id
    if token_id is None:
        token_id = tokenizer.eos_token_id
    return 0 if token_id is None else int(token_id)


def _check_whitening(args: OnPolicyConfig, sizes: BatchSizes) -> None:
    for name in ("whiten_advantages", "whiten_rewards"):
        if getattr(args, name, False) and sizes.batch_size * args.response_length < 2:
            raise ConfigError(
                f"{name}=True needs a batch of at least 2 tokens, got one sample with "
                f"response_length=1, which has no variance; enlarge the batch or set {name}=False"
            )


def _set_derived_sizes(args: OnPolicyConfig, sizes: BatchSizes) -> None:
    """Fill in the trainer's copy of the config; a value that was set must agree."""
    for name, value in sizes.derived().items():
        if getattr(args, name) not in (None, value):
            raise ConfigError(
                f"{name}={getattr(args, name)} must be {value}, as the other sizes imply; leave it"
                " unset"
            )
        setattr(args, name, value)
