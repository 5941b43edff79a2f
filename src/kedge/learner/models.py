"""Loads the models of a run: the policy, the value model and the reference, in one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from kedge.learner.logprobs import Value
from kedge.learner.reference import AdapterReference, FrozenModel, Reference, frozen_copy
from kedge.models.compatibility import (
    check_no_shared_weights,
    check_saving,
    check_vocabulary,
    positions,
    same_tokens,
    vocabulary,
)
from kedge.models.fingerprint import fingerprint
from kedge.models.freezing import (
    find_layers,
    freeze_attention,
    share_frozen_weights,
    train_top_layers,
)
from kedge.models.load import load_policy, tokenizer_beside, without_weights
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

logger = logging.getLogger(__name__)
ValueSource = Literal["auto", "reward", "policy", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The models, and what of them trains."""

    policy: str | nn.Module
    loading: Mapping[str, Any]  # arguments of ``load_policy`` for policy and reference by name
    bf16: bool
    tokenizer: Any
    peft_config: Any = None  # of a new adapter on the policy
    adapter: str | None = None  # which trains
    train_layers: int | None = None  # None: all
    reentrant_checkpointing: bool = False
    allow_low_precision_weights: bool = False
    needs_values: bool = False
    value_source: ValueSource = "policy"
    value_model: str | nn.Module | None = None  # passed by the user; an adapter's folder or name
    value_adapter: bool = False  # the value model is an adapter on the policy's base
    freeze_value_attention: bool = False
    reward_model: str | nn.Module | None = None  # the first, from which the value may start
    reward_tokenizer: Any = None  # None: that in the reward model's folder, or the policy's
    plays: bool = False  # the policy plays in environments
    needs_reference: bool = False
    needs_full_kl: bool = False
    ref_model: str | nn.Module | None = None  # None: the initial policy
    ref_adapter: str | None = None  # of the policy, which is the reference
    ref_workers: int = 0  # other processes that compute the reference; 0: the learner does
    ref_moves: bool = False
    reward_adapter: str | None = None
    reward_models: tuple[nn.Module, ...] = ()  # loaded ones, which must not train
    sharded: bool = False  # the learner will shard the models
    without_weights: bool = False  # rank 0 sends them
    copy_to: torch.device | None = None  # where an engine gets a copy, made before sharding

    def adapted(self, policy: Any) -> bool:
        """Whether the policy, loaded or not, will train an adapter."""
        return bool(self.adapter or self.peft_config) or hasattr(policy, "peft_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The trained models and the reference."""

    policy: nn.Module
    reference: Reference | None
    fresh_reference: bool  # whether the reference has the policy's initial weights
    value: Value | None
    reward_adapter: AdapterRewardModel | None
    policy_copy: nn.Module | None  # for the rollout engine, if the learner shards the policy

    @property
    def named(self) -> dict[str, nn.Module]:
        """The separate models by the names that messages use."""
        models = {"the policy": self.policy}
        if isinstance(self.value, ScalarModel):
            models["the value model"] = self.value.model
        if self.reference is not None and self.reference.separate_models:
            models["the reference"] = self.reference.separate_models[0]
        return models

    @property
    def context(self) -> int | None:
        """Longest context that all models support, in tokens; None: no limit."""
        return min(filter(None, map(positions, self.named.values())), default=None)

    def to_send(self, given: str | nn.Module | None, accelerator: Accelerator) -> str | nn.Module:
        """The reference for other processes: the one that was passed, or the initial policy."""
        model = self.policy if given is None else given
        if isinstance(model, str):
            return model
        model = copy.deepcopy(model).requires_grad_(False).cpu()
        if accelerator.num_processes > 1:
            fingerprints = gather_object([fingerprint(dict(model.named_parameters()))])
            if len(set(fingerprints)) > 1:
                raise ConfigError(
                    "the reference must be the same on all ranks; seed the initialization of"
                    " the model, or pass ref_model"
                )
        return model


_NO_OWN_ATTENTION = (
    "freeze_value_attention needs a separate value model, but the value is a head or an adapter on"
    ' the policy; set value_source="copy", or leave it out'
)


def check_models(options: ModelOptions) -> None:
    """Check all that is known before models are loaded."""
    policy, reference = options.policy, options.ref_model
    if reference is policy and isinstance(policy, nn.Module):
        raise ConfigError(
            "model and ref_model must not be the same object: the reference would be trained"
            " too; pass ref_model=None for a frozen copy, or a second model"
        )
    if isinstance(policy, nn.Module):
        _check_ref_adapter(options, policy)
    _check_train_layers(options, policy)
    _check_ref_moves(options, adapted=options.adapted(policy))
    if options.needs_values:
        _check_value(options)
    if options.ref_workers:
        _check_ref_workers(options)


def load_models(options: ModelOptions) -> Models:
    """Load policy, value model and reference, and check that they fit together."""
    with without_weights(options.without_weights):
        policy: nn.Module = load_policy(options.policy, **options.loading)
        # A folder may turn out to hold an adapter.
        _check_train_layers(options, policy)
        if options.train_layers is not None:
            backbone = causal_parts(policy, verify=False).backbone
            train_top_layers(backbone, options.train_layers, what="the policy")
        if options.adapted(policy):
            policy = with_adapter(policy, options.peft_config, options.adapter)
        _check_ref_adapter(options, policy)
        converted = not options.allow_low_precision_weights and in_float32(policy, "model")
        # First adapters on the policy's base: a reference without copies switches all of them.
        value = _build_value(policy, options) if options.needs_values else None
        name = options.reward_adapter
        reward = AdapterRewardModel(policy, name) if name else None
        reference, fresh = _build_reference(policy, options)
    if converted and isinstance(reference, FrozenModel) and not options.bf16:
        reference.model.float()  # otherwise the KL would include the difference in precision
    for model in () if options.sharded else (value, getattr(reference, "parts", None)):
        theirs = getattr(model, "backbone", None)
        if isinstance(theirs, nn.Module):
            share_frozen_weights(theirs, causal_parts(policy, verify=False).backbone)
    whole, copied = not next(policy.parameters()).is_meta, None
    if options.copy_to is not None and whole:  # else the engine on rank 0 serves this rank, too
        copied = drop_adapters(copy.deepcopy(policy)).requires_grad_(False).to(options.copy_to)
    models = Models(
        policy=policy,
        reference=reference,
        fresh_reference=fresh,
        value=value,
        reward_adapter=reward,
        policy_copy=copied,
    )
    _check_together(models, options)
    return models


def value_start(source: ValueSource, *, plays: bool, rewarded: bool, frozen: bool) -> ValueSource:
    """What the value model starts from: ``source``, with auto resolved.

    With auto that is the reward model of a ``rewarded`` run; else the policy is copied if it
    ``plays`` in environments, unless an adapter or ``train_layers`` keeps weights ``frozen``.
    """
    if source != "auto":
        return source
    alone: ValueSource = "copy" if plays and not frozen else "policy"
    return "reward" if rewarded else alone


def _build_value(policy: nn.Module, options: ModelOptions) -> Value:
    """Build the value model, with the layers that it trains."""
    value = _start_value(policy, options)
    if options.train_layers is not None and isinstance(value, ScalarModel):
        found = find_layers(value.backbone)  # may have fewer layers than the policy
        layers = options.train_layers
        layers = layers if found is None else min(layers, len(found[1]))
        train_top_layers(value.backbone, layers, what="the value model")
    if options.freeze_value_attention:
        if not isinstance(value, ScalarModel):
            raise ConfigError(_NO_OWN_ATTENTION)
        freeze_attention(value.backbone, what="the value model")
    return value


def _start_value(policy: nn.Module, options: ModelOptions) -> Value:
    """An adapter, the given model, the reward model, a copy, or a head.

    With ``value_source="auto"`` a reward model that cannot be a value model is not used: one that
    is not causal, has no per-token head, or has another tokenizer than the policy.
    """
    source, given = options.value_source, options.value_model
    if options.value_adapter:
        folder: Any = given or (None if source == "policy" else options.reward_adapter)
        return value_adapter(policy, folder)
    if isinstance(given, str) and (Path(given) / HEAD_FILE).is_file():
        return load_value_head(given, causal_parts(policy))
    if given is not None:
        value = load_value(given)
        if not options.allow_low_precision_weights:
            in_float32(value, "value_model")
        return value
    frozen = options.adapted(policy) or options.train_layers is not None
    rewarded = options.reward_model is not None
    start = value_start(source, plays=options.plays, rewarded=rewarded, frozen=frozen)
    if start == "copy":
        return copy_as_value(policy, causal_parts(policy))
    if start == "reward":
        try:
            _check_reward(options)
            return _load_reward(options.reward_model)
        except ConfigError as problem:
            if source == "reward":
                raise
            logger.warning(
                "the value model is a head on the policy instead of the reward model: %s", problem
            )
    return build_value_head(causal_parts(policy))


def _load_reward(reward: Any) -> ScalarModel:
    """A value model with the weights of the reward model, in float32."""
    if isinstance(reward, str):
        return load_value(reward)
    model = copy.deepcopy(reward)
    for p in model.parameters():
        if p.dtype.is_floating_point:
            p.data = p.data.to(torch.float32)
            p.requires_grad_(True)
    return scalar_model(model)


def _build_reference(policy: nn.Module, options: ModelOptions) -> tuple[Reference | None, bool]:
    """Build the reference; also returns whether it equals the initial policy."""
    _check_ref_moves(options, adapted=hasattr(policy, "peft_config"))
    if options.ref_workers or not options.needs_reference:
        return None, options.ref_workers > 0 and options.ref_model is None
    if options.ref_model is not None:
        reference = load_policy(options.ref_model, **options.loading)
        check_no_shared_weights({"model": policy}, {"ref_model": reference})
        return FrozenModel(reference), False
    if hasattr(policy, "peft_config"):
        new, adapter = options.peft_config, options.ref_adapter
        if adapter or (new is not None and not changes_base(new)):
            return AdapterReference(policy, adapter), adapter is None
        trained = copy_adapter(policy)
        if trained is not None:
            return AdapterReference(policy, trained), True
    return frozen_copy(policy, sharded=options.sharded), True


def _check_together(models: Models, options: ModelOptions) -> None:
    """Check saving and vocabularies, and that frozen models share no weights with trained ones."""
    named, policy = models.named, models.policy
    trained: dict[str, Any] = {"model": policy}
    if (value := named.get("the value model")) is not None:
        check_no_shared_weights(trained, {"value_model": value})
        trained["value_model"] = value
    frozen = [("reward_model", model) for model in options.reward_models]
    if (reference := named.get("the reference")) is not None:
        frozen.insert(0, ("ref_model", reference))
    for name, model in frozen:
        check_no_shared_weights(trained, {name: model})
    check_saving(trained | {"processing_class": options.tokenizer})
    if (known := vocabulary(policy)) is not None:
        check_vocabulary(named, tokens=min(len(options.tokenizer), known))


def _check_train_layers(options: ModelOptions, policy: Any) -> None:
    option = f"train_layers={options.train_layers}"
    if options.train_layers is None:
        return
    if options.adapted(policy):
        raise ConfigError(
            f"{option} trains layers of the model itself, but the policy trains an adapter; leave"
            " it out, and set layers_to_transform in peft_config to adapt the top layers only"
        )
    if options.reentrant_checkpointing:
        raise ConfigError(
            f"{option} needs use_reentrant=False in gradient_checkpointing_kwargs: layers above"
            " frozen ones would get no gradient"
        )


def _check_ref_adapter(options: ModelOptions, policy: Any) -> None:
    adapter = options.ref_adapter
    if adapter is not None and adapter not in getattr(policy, "peft_config", {}):
        raise ConfigError(
            f"ref_adapter_name={adapter!r} must be an adapter of the policy; load it, or leave it"
            " unset: the reference is then the base model under a new adapter, and a copy of one"
            " that the model has"
        )


def _check_ref_workers(options: ModelOptions) -> None:
    """Check that workers can compute the reference, and that it is worth their memory."""
    option, given = f"ray_ref_workers={options.ref_workers}", options.ref_model
    if not options.needs_reference:
        raise ConfigError(f"{option} needs a KL term, and this run has none; set it to 0")
    if options.needs_full_kl:
        raise ConfigError(
            f"{option}: reference workers compute log-probabilities of the sampled tokens only, but"
            " kl_estimator='full' needs the whole vocabulary; set ray_ref_workers=0, or another"
            " estimator"
        )
    loading = options.loading if isinstance(given, str) else {}
    if any(x for name, x in loading.items() if name != "trust_remote_code"):
        raise ConfigError(
            f"{option}: reference workers load the reference without model_init_kwargs; pass"
            " ref_model as a loaded model"
        )
    adapted = options.peft_config is not None or hasattr(options.policy, "peft_config")
    if given is None and (adapted or options.ref_adapter is not None):
        raise ConfigError(
            f"{option} has no benefit: the reference is the policy's base model or a copy of its"
            " adapter, which needs little memory; set it to 0, or pass a ref_model"
        )


def _check_ref_moves(options: ModelOptions, *, adapted: bool) -> None:
    """Check that a reference which moves towards the policy is one of the learner's own."""
    problems = {
        "there is none; set beta or kl_coef above 0": not options.needs_reference,
        "ray_ref_workers have it; set ray_ref_workers=0": options.ref_workers,
        "an adapter shares its base with it": adapted,
    }
    for problem in [text for text, applies in problems.items() if applies and options.ref_moves]:
        raise ConfigError(
            f"sync_ref_model=True moves the reference, but {problem}, or leave it out"
        )


def _check_value(options: ModelOptions) -> None:
    """Check that the options of the value model agree, and that what it starts from is there."""
    head = options.value_source == "policy" and options.value_model is None
    if options.freeze_value_attention and (head or options.value_adapter):
        raise ConfigError(_NO_OWN_ATTENTION)
    if options.value_adapter:
        if isinstance(options.value_model, nn.Module):
            raise ConfigError(
                "value_adapter=True makes the value model an adapter on the policy's base, but"
                " value_model is a model; pass the folder of an adapter, or leave one of them out"
            )
        if options.value_source == "reward" and options.reward_adapter is None:
            raise ConfigError(
                'value_source="reward" with value_adapter=True starts from the reward adapter, and'
                ' none is set; set reward_adapter, or value_source="policy"'
            )
    elif options.value_model is not None:
        return
    elif options.value_source == "copy" and options.adapted(options.policy):
        raise ConfigError(
            'value_source="copy" copies a whole policy, but this one trains an adapter; set'
            " value_adapter=True for a value model on the same base"
        )
    elif options.value_source == "reward":
        _check_reward(options)


def _check_reward(options: ModelOptions) -> None:
    """Check that there is a reward model with the policy's tokenizer."""
    if options.reward_model is None:
        raise ConfigError(
            'value_source="reward" needs a reward model; pass value_model, or set'
            ' value_source="policy" for a value head on the policy'
        )
    tokenizer = options.reward_tokenizer
    if tokenizer is None and isinstance(options.reward_model, str):
        tokenizer = tokenizer_beside(options.reward_model)
    if tokenizer is not None and not same_tokens(tokenizer, options.tokenizer):
        raise ConfigError(
            "the value model must use the policy's tokenizer, but the reward model has another"
            ' one; set value_source="policy", or pass value_model'
        )
