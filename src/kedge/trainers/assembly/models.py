"""The models of a run (policy, reference, value model) and the learner that trains them."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import load_workers, vllm_limit
from kedge.data import DatasetPrompts
from kedge.learner.distributed import sharding_strategy
from kedge.learner.learner import HFLearner
from kedge.learner.logprobs import Value
from kedge.learner.reference import (
    AdapterReference,
    FrozenModel,
    Reference,
    RemoteReference,
    frozen_copy,
)
from kedge.learner.settings import LearnerSettings
from kedge.models.compatibility import (
    check_length,
    check_no_shared_weights,
    check_saving,
    check_vocabulary,
    positions,
    vocabulary,
)
from kedge.models.fingerprint import fingerprint
from kedge.models.freezing import (
    find_layers,
    freeze_attention,
    share_frozen_weights,
    train_top_layers,
)
from kedge.models.load import load_policy
from kedge.models.model import causal_parts, in_float32
from kedge.models.peft import drop_adapters, with_adapter
from kedge.models.shared_base import AdapterRewardModel, changes_base, copy_adapter, value_adapter
from kedge.models.value_head import (
    HEAD_FILE,
    ScalarModel,
    build_value_head,
    copy_as_value,
    load_value,
    load_value_head,
    scalar_model,
)
from kedge.records.errors import ConfigError
from kedge.rewards.build import as_list, find_tokenizer
from kedge.rewards.model import same_tokens
from kedge.trainers.assembly.setup import Setup, trusts_remote_code
from kedge.trainers.spec import TrainerInputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The trained models and the reference."""

    policy: nn.Module
    reference: Reference | None
    fresh_reference: bool  # whether the reference has the policy's initial weights
    value: Value | None
    reward_adapter: AdapterRewardModel | None
    policy_copy: nn.Module | None  # for the rollout engine, if the learner shards the policy

    def context(self, args: Any) -> int | None:
        """Maximum tokens of prompt and response in the models and vLLM."""
        value = [self.value.model] if isinstance(self.value, ScalarModel) else []
        reference = [] if self.reference is None else self.reference.separate_models
        limits = [positions(model) for model in (self.policy, *value, *reference)]
        return min(filter(None, [*limits, *vllm_limit(args).values()]), default=None)


class ModelStage:
    """Policy, reference and value model."""

    def __init__(self, setup: Setup) -> None:
        inputs, args = setup.inputs, setup.args
        self.setup, self.loading = setup, setup.loading
        if inputs.ref_model is inputs.model and isinstance(inputs.model, nn.Module):
            raise ConfigError(
                "model and ref_model must not be the same object: the reference would be trained"
                " too; pass ref_model=None for a frozen copy, or a second model"
            )
        if not isinstance(inputs.model, str):
            _check_adapter(inputs.model, args.ref_adapter_name)
        _check_train_layers(args, adapted=has_adapter(inputs.model, inputs))
        self.value_adapter: bool = getattr(args, "value_adapter", False)
        self.value_source: str = getattr(args, "value_source", "policy")
        if self.value_adapter:
            check_value_adapter(args, inputs)
        # First reward model and its tokenizer; the value model may start from them.
        models, tokenizers = as_list(inputs.reward_model), inputs.reward_processing_classes
        if not isinstance(tokenizers, list | tuple):
            tokenizers = [tokenizers] * len(models)
        pairs = zip_longest(models, tokenizers)
        usable = [pair for pair in pairs if isinstance(pair[0], nn.Module | str)]
        self.reward: Any = usable[0][0] if usable else None
        self.reward_tokenizer: Any = usable[0][1] if usable else None
        copies = self.value_source == "copy" and inputs.value_model is None
        if copies and not self.value_adapter and has_adapter(inputs.model, inputs):
            raise ConfigError(
                'value_source="copy" copies a whole policy, but this one trains an adapter; set'
                " value_adapter=True for a value model on the same base"
            )
        starts = setup.algorithm.needs_values and inputs.value_model is None
        if starts and not self.value_adapter and self.value_source == "reward":
            self._check_reward()

    def _check_reward(self) -> None:
        """Check that there is a reward model with the policy's tokenizer."""
        if self.reward is None:
            raise ConfigError(
                'value_source="reward" needs a reward model; pass value_model, or set'
                ' value_source="policy" for a value head on the policy'
            )
        tokenizer = self.reward_tokenizer
        if tokenizer is None and isinstance(self.reward, str):
            tokenizer = find_tokenizer(self.reward)
        if tokenizer is not None and not same_tokens(tokenizer, self.setup.tokenizer):
            raise ConfigError(
                "the value model must use the policy's tokenizer, but the reward model has another"
                ' one; set value_source="policy", or pass value_model'
            )

    def build(self) -> Models:
        """Load the models and check that they fit together."""
        setup, inputs, args = self.setup, self.setup.inputs, self.setup.args
        assert inputs.model is not None  # load_tokenizer requires it
        policy: nn.Module = load_policy(inputs.model, **self.loading)
        _check_train_layers(args, adapted=has_adapter(policy, inputs))
        if args.train_layers is not None:
            backbone = causal_parts(policy, verify=False).backbone
            train_top_layers(backbone, args.train_layers, what="the policy")
        if has_adapter(policy, inputs):
            policy = with_adapter(policy, inputs.peft_config, args.model_adapter_name)
        _check_adapter(policy, args.ref_adapter_name)
        converted = not args.allow_low_precision_weights and in_float32(policy, "model")
        # First adapters on the policy's base: a reference without copies switches all of them.
        value = self._build_value(policy) if setup.algorithm.needs_values else None
        if args.train_layers is not None and isinstance(value, ScalarModel):
            found = find_layers(value.backbone)  # may have fewer layers than the policy
            layers = args.train_layers if found is None else min(args.train_layers, len(found[1]))
            train_top_layers(value.backbone, layers, what="the value model")
        if getattr(args, "freeze_value_attention", False):
            if not isinstance(value, ScalarModel):
                raise ConfigError(
                    "freeze_value_attention needs a separate value model, but the value is a head"
                    ' or an adapter on the policy; set value_source="copy", or leave it out'
                )
            freeze_attention(value.backbone, what="the value model")
        reward = AdapterRewardModel(policy, args.reward_adapter) if args.reward_adapter else None
        reference, fresh = self._build_reference(policy)
        if converted and isinstance(reference, FrozenModel) and not args.bf16:
            reference.model.float()  # otherwise the KL would include the difference in precision
        if sharding_strategy(setup.accelerator) == "none":
            backbone = causal_parts(policy, verify=False).backbone
            for model in (value, getattr(reference, "parts", None)):
                theirs = getattr(model, "backbone", None)
                if isinstance(theirs, nn.Module):
                    share_frozen_weights(theirs, backbone)
        models = Models(
            policy=policy,
            reference=reference,
            fresh_reference=fresh,
            value=value,
            reward_adapter=reward,
            policy_copy=self._copy_policy(policy),
        )
        check_models(models, setup)
        return models

    def _build_reference(self, policy: nn.Module) -> tuple[Reference | None, bool]:
        """Build the reference; also returns whether it equals the initial policy."""
        inputs, adapter = self.setup.inputs, self.setup.args.ref_adapter_name
        remote = self.setup.args.ray_ref_workers > 0
        if getattr(self.setup.args, "sync_ref_model", False):
            problems = {
                "there is none; set beta or kl_coef above 0": (
                    not self.setup.algorithm.needs_reference
                ),
                "ray_ref_workers have it; set ray_ref_workers=0": remote,
                "an adapter shares its base with it": hasattr(policy, "peft_config"),
            }
            for problem in [text for text, applies in problems.items() if applies]:
                raise ConfigError(
                    f"sync_ref_model=True moves the reference, but {problem}, or leave it out"
                )
        if remote or not self.setup.algorithm.needs_reference:
            return None, remote and inputs.ref_model is None
        if inputs.ref_model is not None:
            reference = load_policy(inputs.ref_model, **self.loading)
            check_no_shared_weights({"model": policy}, {"ref_model": reference})
            return FrozenModel(reference), False
        config: Any = inputs.peft_config
        starts_at_base = config is not None and not changes_base(config)
        if hasattr(policy, "peft_config") and (adapter or starts_at_base):
            return AdapterReference(policy, adapter), adapter is None
        if hasattr(policy, "peft_config"):
            trained = copy_adapter(policy)
            if trained is not None:
                return AdapterReference(policy, trained), True
        sharded = sharding_strategy(self.setup.accelerator) != "none"
        return frozen_copy(policy, sharded=sharded), True

    def _build_value(self, policy: nn.Module) -> Value:  # noqa: C901, PLR0912
        """Build the value model: as given, an adapter, the reward model, a copy, or a head.

        With ``value_source="auto"`` a reward model that cannot be a value model is not used: one
        that is not causal, has no per-token head, or has another tokenizer than the policy.
        """
        inputs, args = self.setup.inputs, self.setup.args
        if self.value_adapter:
            starts = None if self.value_source == "policy" else args.reward_adapter
            given: Any = inputs.value_model  # a folder's name
            return value_adapter(policy, given or starts)
        given = inputs.value_model
        if isinstance(given, str) and (Path(given) / HEAD_FILE).is_file():
            return load_value_head(given, causal_parts(policy))
        if inputs.value_model is not None:
            value = load_value(inputs.value_model)
            if not args.allow_low_precision_weights:
                in_float32(value, "value_model")
            return value
        plays = inputs.environment or inputs.tools or inputs.environment_factory or args.environment
        frozen = has_adapter(policy, inputs) or args.train_layers is not None
        start = value_start(args, plays=plays, rewarded=self.reward is not None, frozen=frozen)
        if start == "copy":
            return copy_as_value(policy, causal_parts(policy))
        if start == "reward":
            try:
                self._check_reward()
                if isinstance(self.reward, str):
                    return load_value(self.reward)
                model = copy.deepcopy(self.reward)
                for p in model.parameters():
                    if p.dtype.is_floating_point:
                        p.data = p.data.to(torch.float32)
                        p.requires_grad_(True)
                return scalar_model(model)
            except ConfigError as problem:
                if self.value_source == "reward":
                    raise
                logger.warning(
                    "the value model is a head on the policy instead of the reward model: %s",
                    problem,
                )
        return build_value_head(causal_parts(policy))

    def _copy_policy(self, policy: nn.Module) -> nn.Module | None:
        """Copy the whole policy for the rollout engine, before the learner shards it."""
        setup = self.setup
        copies = setup.engine.copies_weights or bool(setup.args.max_lag)
        sharded = sharding_strategy(setup.accelerator) != "none"
        if not (copies and sharded) or setup.inputs.rollout_engine is not None:
            return None
        if next(policy.parameters()).is_meta:  # the engine on rank 0 serves this rank, too
            return None
        own = drop_adapters(copy.deepcopy(policy))
        return own.requires_grad_(False).to(setup.accelerator.device)


def value_start(args: Any, *, plays: Any, rewarded: bool, frozen: bool) -> str:
    """What the value model starts from: ``value_source``, where auto is decided.

    With auto that is the reward model of a ``rewarded`` run; else the policy is copied if it
    ``plays`` in environments, unless an adapter or ``train_layers`` keeps weights ``frozen``.
    """
    source: str = getattr(args, "value_source", "policy")
    if source != "auto":
        return source
    alone = "copy" if plays and not frozen else "policy"
    return "reward" if rewarded else alone


def has_adapter(policy: Any, inputs: TrainerInputs) -> bool:
    """Whether the policy will train an adapter."""
    new = inputs.args.model_adapter_name or inputs.peft_config
    return bool(new) or hasattr(policy, "peft_config")


def _check_train_layers(args: OnPolicyConfig, *, adapted: bool) -> None:
    option = f"train_layers={args.train_layers}"
    if args.train_layers is None:
        return
    if adapted:
        raise ConfigError(
            f"{option} trains layers of the model itself, but the policy trains an adapter; leave"
            " it out, and set layers_to_transform in peft_config to adapt the top layers only"
        )
    kwargs = args.gradient_checkpointing_kwargs
    if args.gradient_checkpointing and isinstance(kwargs, dict) and kwargs.get("use_reentrant"):
        raise ConfigError(
            f"{option} needs use_reentrant=False in gradient_checkpointing_kwargs: layers above"
            " frozen ones would get no gradient"
        )


def check_value_adapter(args: Any, inputs: TrainerInputs) -> None:
    """Check that no other option sets or initializes the value model."""
    if isinstance(inputs.value_model, nn.Module):
        raise ConfigError(
            "value_adapter=True makes the value model an adapter on the policy's base, but"
            " value_model is a model; pass the folder of an adapter, or leave one of them out"
        )
    if args.value_source == "reward" and args.reward_adapter is None:
        raise ConfigError(
            'value_source="reward" with value_adapter=True starts from the reward adapter, and none'
            ' is set; set reward_adapter, or value_source="policy"'
        )


def _check_adapter(policy: Any, adapter: str | None) -> None:
    if adapter is not None and adapter not in getattr(policy, "peft_config", {}):
        raise ConfigError(
            f"ref_adapter_name={adapter!r} must be an adapter of the policy; load it, or leave it"
            " unset: the reference is then the base model under a new adapter, and a copy of one"
            " that the model has"
        )


def check_models(models: Models, setup: Setup) -> None:
    """Check saving, vocabularies, context lengths, and that frozen models share no weights."""
    inputs, args = setup.inputs, setup.args
    all_models = {"the policy": models.policy}
    trained: dict[str, Any] = {"model": models.policy}
    if isinstance(models.value, ScalarModel):
        all_models["the value model"] = trained["value_model"] = models.value.model
        check_no_shared_weights({"model": models.policy}, {"value_model": models.value.model})
    if models.reference is not None and models.reference.separate_models:
        all_models["the reference"] = models.reference.separate_models[0]
        check_no_shared_weights(trained, {"ref_model": models.reference.separate_models[0]})
    for reward in (*as_list(inputs.reward_model), *as_list(inputs.reward_funcs)):
        if isinstance(reward, nn.Module):
            check_no_shared_weights(trained, {"reward_model": reward})
    check_saving(trained | {"processing_class": setup.tokenizer})
    known = vocabulary(models.policy)
    if known is not None:
        check_vocabulary(all_models, tokens=min(len(setup.tokenizer), known))
    if inputs.data_collator is not None:  # the collator makes prompts later
        return
    # An episode may be longer, if its environment begins new contexts; else it is truncated.
    turn = getattr(args, "max_turn_tokens", None)
    for source in (setup.prompts, *(eval_set.source for eval_set in setup.eval_sets)):
        if not isinstance(source, DatasetPrompts):
            continue
        check_length(
            {**all_models, **vllm_limit(args)},
            prompt=source.report.longest,
            response=min(args.response_length, turn or args.response_length),
            option=args.length_option if turn is None else "max_turn_tokens",
        )
        if known is not None:
            source.check_tokens(known)


class LearnerStage:
    """Builds the learner, and the workers that compute the reference."""

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
        rate = getattr(args, "value_learning_rate", None)
        return LearnerSettings(
            total_iterations=self.setup.sizes.iterations,
            value_warmup_steps=self.setup.value_warmup_steps,
            temperature=sampling.temperature,
            min_new_tokens=sampling.min_new_tokens,
            stop_ids=sampling.stop_ids,
            value_learning_rate=args.learning_rate if rate is None else rate,
            max_grad_norm=args.max_grad_norm or math.inf,
            forward_rows=args.local_rollout_forward_batch_size,
            gradient_checkpointing=bool(args.gradient_checkpointing),
            checkpointing_options=kwargs if kwargs and isinstance(kwargs, dict) else None,
            reuse_behavior_logprobs=self.setup.dtype is None
            and not args.tf32  # tf32 rounds by batch shape
            and args.max_lag == 0
            and not self.setup.engine.copies_weights
            and self.setup.inputs.rollout_engine is None,  # other engines are verified anyway
            allow_low_precision_weights=args.allow_low_precision_weights,
            entropy_grad=bool(args.entropy_coef),
            cache_trunk=args.cache_trunk,
            reference_sync_steps=getattr(args, "sync_ref_model", False)
            and getattr(args, "ref_model_sync_steps", 512),
            reference_mixup=getattr(args, "ref_model_mixup_alpha", 0.6),
        )

    def _build_remote_reference(
        self, policy: nn.Module, settings: LearnerSettings
    ) -> RemoteReference:
        """Start the reference workers, with ``ref_model`` or a copy of the initial policy."""
        args, model = self.setup.args, self.setup.inputs.ref_model
        model = policy if model is None else model
        if isinstance(model, nn.Module):
            model = copy.deepcopy(model).requires_grad_(False).cpu()
            if self.setup.accelerator.num_processes > 1:
                fingerprints = gather_object([fingerprint(dict(model.named_parameters()))])
                if len(set(fingerprints)) > 1:
                    raise ConfigError(
                        "the reference must be the same on all ranks; seed the initialization of"
                        " the model, or pass ref_model"
                    )
        reference: RemoteReference = load_workers(args).build_reference(
            args,
            model,
            settings,
            autocast=self.setup.dtype,
            quick=not args.torch_compile,
            trust=trusts_remote_code(args),
        )
        return reference


def receives_weights(setup: Setup) -> bool:
    """Whether this rank loads models without weights, to get shards from rank 0.

    Not if it needs a whole model: for an engine or for reference workers.
    """
    args, engine, accelerator = setup.args, setup.engine, setup.accelerator
    separate = engine.per_rank or not engine.copies_weights
    samples = separate and (engine.copies_weights or bool(args.max_lag))
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
            f"{option} has no benefit: the reference is the policy's base model or a copy of its"
            " adapter, which needs little memory; set it to 0, or pass a ref_model"
        )
