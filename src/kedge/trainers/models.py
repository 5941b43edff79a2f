"""The models of a run: policy, reference, value, reward."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kedge.backends.hf.model import causal_parts, load_policy
from kedge.backends.hf.reference import FrozenModel, OtherAdapter, Reference, copy_of
from kedge.backends.hf.value_head import (
    ScalarHead,
    ScalarModel,
    load_value,
    scalar_model,
    value_from_trunk,
)
from kedge.config.resolve import ValueOptions
from kedge.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What trains and what it is held to."""

    policy: nn.Module
    reference: Reference | None
    fresh_reference: bool  # the reference was made from the policy's weights
    value: ScalarModel | ScalarHead | None


def policy_of(
    model: str | nn.Module | None, peft_config: Any, adapter: str | None, *, trust: bool = False
) -> nn.Module:
    """The policy, loaded and with its adapter.

    Raises:
        ConfigError: no model, or a PEFT model together with a peft_config.
    """
    if model is None:
        raise ConfigError("model=None: give the policy as a model, a folder or a hub name")
    policy = load_policy(model, trust_remote_code=trust)
    if peft_config is None and adapter is None and not hasattr(policy, "peft_config"):
        return policy
    from kedge.backends.hf.peft import with_adapter

    return with_adapter(policy, peft_config, adapter)


def reference_of(
    policy: nn.Module,
    ref_model: str | nn.Module | None,
    adapter: str | None,
    *,
    wanted: bool,
    trust: bool = False,
) -> tuple[Reference | None, bool]:
    """The reference, and whether it was made from the policy.

    Raises:
        ConfigError: the reference is the very module that trains.
    """
    if ref_model is policy:
        raise ConfigError(
            "model and ref_model are the same object, so the reference would train along; pass"
            " ref_model=None for a frozen copy, or a second model"
        )
    if adapter is not None and adapter not in getattr(policy, "peft_config", {}):
        raise ConfigError(
            f"ref_adapter_name={adapter!r}, but the policy has no adapter of that name; load one,"
            " or leave it unset: the reference is then the base without adapter"
        )
    if not wanted:
        return None, False
    if ref_model is not None:
        return FrozenModel(load_policy(ref_model, trust_remote_code=trust)), False
    if hasattr(policy, "peft_config"):
        return OtherAdapter(policy, adapter), adapter is None
    return copy_of(policy), True


def value_of(
    value_model: str | nn.Module | None,
    reward_model: Any,
    policy: nn.Module,
    options: ValueOptions,
) -> ScalarModel | ScalarHead:
    """The value model: given, from the reward model's weights, or a head on the policy.

    Raises:
        ConfigError: ``value_source="reward"`` without a reward model to start from.
    """
    if value_model is not None:
        return load_value(value_model)
    rewards = reward_model if isinstance(reward_model, list | tuple) else [reward_model]
    models = [m for m in rewards if isinstance(m, nn.Module | str)]
    if options.source == "policy" or (options.source == "auto" and not models):
        return value_from_trunk(causal_parts(policy))
    if not models:
        raise ConfigError(
            'value_source="reward", but there is no reward model to start from; give value_model,'
            ' or value_source="policy" for a value head on the policy'
        )
    if isinstance(models[0], str):
        return load_value(models[0])
    return scalar_model(_trainable_copy(models[0]))


def _trainable_copy(model: nn.Module) -> nn.Module:
    mine = copy.deepcopy(model)
    for p in mine.parameters():
        if p.dtype.is_floating_point:
            p.data = p.data.to(torch.float32)
            p.requires_grad_(True)
    return mine
