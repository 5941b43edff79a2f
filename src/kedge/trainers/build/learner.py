"""Builds the learner: the trained models, their optimizer, and a reference in Ray workers."""

from __future__ import annotations

import copy
import math
from typing import Any

from accelerate.utils import gather_object
from torch import nn

from kedge.backends.hf.fingerprint import fingerprint
from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.reference import RemoteReference
from kedge.backends.hf.settings import LearnerSettings
from kedge.backends.hf.sharding import sharding_strategy
from kedge.config.ppo import PPOConfig
from kedge.errors import ConfigError
from kedge.trainers.build.loading import trusts
from kedge.trainers.build.models import Models
from kedge.trainers.build.setup import Setup


class LearnerStage:
    """The models that train, and the workers that compute the reference."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        if setup.args.ray_ref_workers:
            check_reference_workers(setup)

    def build(self, models: Models) -> HFLearner:
        """Build the optimizer, start the workers, and shard the models if asked."""
        setup, args, settings = self.setup, self.setup.args, self._settings()
        return HFLearner(
            models.policy,
            args,
            settings,
            value=models.value,
            reference=models.reference,
            remote=self._build_remote_reference(models.policy, settings)
            if args.ray_ref_workers
            else None,
            accelerator=setup.accelerator,
            optimizers=setup.inputs.optimizers,
        )

    def _settings(self) -> LearnerSettings:
        args, sampling = self.setup.args, self.setup.sampling
        kwargs = args.gradient_checkpointing_kwargs
        rate = args.value_learning_rate if isinstance(args, PPOConfig) else None
        return LearnerSettings(
            total_iterations=self.setup.sizes.iterations,
            temperature=sampling.temperature,
            min_new_tokens=sampling.min_new_tokens,
            stop_ids=sampling.stop_ids,
            value_learning_rate=args.learning_rate if rate is None else rate,
            max_grad_norm=args.max_grad_norm or math.inf,
            forward_rows=args.local_rollout_forward_batch_size,
            gradient_checkpointing=bool(args.gradient_checkpointing),
            checkpointing_options=kwargs if kwargs and isinstance(kwargs, dict) else None,
            reuse_behavior_logprobs=self.setup.dtype is None
            and not args.tf32  # rounds by the shapes of a batch
            and args.max_lag == 0
            and not self.setup.engine.copies_weights
            and self.setup.inputs.rollout_engine is None,  # those of other engines are verified
            allow_low_precision_weights=args.allow_low_precision_weights,
            cache_trunk=args.cache_trunk,
        )

    def _build_remote_reference(
        self, policy: nn.Module, settings: LearnerSettings
    ) -> RemoteReference:
        """Start the reference workers, with ``ref_model`` or a copy of the initial policy."""
        from kedge.backends.ray.reference import ray_reference

        args, model = self.setup.args, self.setup.inputs.ref_model
        model = policy if model is None else model
        if isinstance(model, nn.Module):
            model = copy.deepcopy(model).requires_grad_(False).cpu()
            self._check_equal(model)
        return ray_reference(
            model,
            settings,
            self.setup.ray_cluster,
            workers=args.ray_ref_workers,
            gpus=args.ray_ref_gpus,
            autocast=self.setup.dtype,
            quick=not args.torch_compile,
            trust=trusts(args),
        )

    def _check_equal(self, model: nn.Module) -> None:
        if self.setup.accelerator.num_processes == 1:
            return
        fingerprints = gather_object([fingerprint(dict(model.named_parameters()))])
        if len(set(fingerprints)) > 1:
            raise ConfigError(
                "the reference must be the same on all ranks; seed the initialization of the model,"
                " or pass ref_model"
            )


def receives_weights(setup: Setup) -> bool:
    """Whether this rank loads its models without weights: it gets its shards from rank 0.

    Not if it needs a whole model: for an engine or for reference workers.
    """
    args, engine, accelerator = setup.args, setup.engine, setup.accelerator
    separate = engine.per_rank or not engine.copies_weights
    separate |= args.rollout_schedule == "as_completed"
    samples = separate and (engine.copies_weights or args.max_lag > 0)
    sharded = sharding_strategy(accelerator) != "none"
    needs_whole = samples or args.ray_ref_workers or setup.loading.get("quantization") is not None
    return accelerator.process_index > 0 and sharded and not needs_whole


def check_reference_workers(setup: Any) -> None:
    """Check the options of reference workers."""
    inputs, args, algorithm = setup.inputs, setup.args, setup.algorithm
    option = f"ray_ref_workers={args.ray_ref_workers}"
    if not algorithm.needs_reference:
        raise ConfigError(f"{option} needs a KL term, and this run has none; set it to 0")
    if algorithm.needs_full_kl:
        raise ConfigError(
            f"{option}: reference workers compute log-probabilities of the sampled tokens only, but"
            " kl_estimator='full' needs the whole vocabulary; set ray_ref_workers=0, or another"
            " estimator"
        )
    loading = setup.loading if isinstance(inputs.ref_model, str) else {}
    if any(x for name, x in loading.items() if name != "trust_remote_code"):
        raise ConfigError(
            f"{option}: reference workers load the reference without model_init_kwargs; pass"
            " ref_model as a loaded model"
        )
    adapted = inputs.peft_config is not None or hasattr(inputs.model, "peft_config")
    if inputs.ref_model is None and (adapted or args.ref_adapter_name is not None):
        raise ConfigError(
            f"{option} has no benefit: the reference is the policy's base model, which needs no"
            " extra memory; set it to 0, or pass a ref_model"
        )
