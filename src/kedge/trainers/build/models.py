"""Builds the policy, reference and value model of a run, and checks all models."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kedge.backends.data import DatasetPrompts
from kedge.backends.hf.compatibility import (
    check_length,
    check_no_shared_weights,
    check_vocabulary,
    vocabulary,
)
from kedge.backends.hf.end_tokens import eos_token_ids
from kedge.backends.hf.load import load_policy
from kedge.backends.hf.model import causal_parts
from kedge.backends.hf.reference import AdapterReference, FrozenModel, Reference, frozen_copy
from kedge.backends.hf.value_head import (
    ScalarHead,
    ScalarModel,
    load_value,
    scalar_model,
    value_from_trunk,
)
from kedge.backends.rewards.load import load_tokenizer
from kedge.backends.rewards.model import same_tokens
from kedge.config.base import OnPolicyConfig
from kedge.config.compat.trl import NewerArguments
from kedge.config.resolve import ValueOptions
from kedge.config.rollout import json_object, vllm_limit
from kedge.errors import ConfigError
from kedge.trainers.build.inputs import TrainerInputs, trusts

logger = logging.getLogger(__name__)

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The trained models and the reference."""

    policy: nn.Module
    reference: Reference | None
    fresh_reference: bool  # the reference was made from the policy's weights
    value: ScalarModel | ScalarHead | None


def build_policy(
    model: str | nn.Module | None,
    peft_config: Any,
    adapter: str | None,
    *,
    loading: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The policy, with its adapter if any; ``loading`` are arguments of ``load_policy``.

    Raises:
        ConfigError: no model is given, or a PEFT model together with a peft_config.
    """
    if model is None:
        raise ConfigError("model=None: pass the policy as a model, a folder or a hub name")
    policy = load_policy(model, **loading or {})
    if peft_config is None and adapter is None and not hasattr(policy, "peft_config"):
        return policy
    from kedge.backends.hf.peft import with_adapter

    return with_adapter(policy, peft_config, adapter)


def build_reference(
    policy: nn.Module,
    ref_model: str | nn.Module | None,
    adapter: str | None,
    *,
    wanted: bool,
    new_adapter: bool = False,
    loading: Mapping[str, Any] | None = None,
) -> tuple[Reference | None, bool]:
    """The reference, and whether it equals the initial policy.

    A policy with an adapter equals its base only if the adapter is new (``new_adapter``).

    Raises:
        ConfigError: the reference is the trained module or shares weights with it.
    """
    if ref_model is policy:
        raise ConfigError(
            "model and ref_model must not be the same object: the reference would be trained too;"
            " pass ref_model=None for a frozen copy, or a second model"
        )
    if adapter is not None and adapter not in getattr(policy, "peft_config", {}):
        raise ConfigError(
            f"ref_adapter_name={adapter!r} must be an adapter of the policy; load it, or leave it"
            " unset to use the base model without adapter as the reference"
        )
    if not wanted:
        return None, False
    if ref_model is not None:
        reference = load_policy(ref_model, **loading or {})
        check_no_shared_weights({"model": policy}, {"ref_model": reference})
        return FrozenModel(reference), False
    if hasattr(policy, "peft_config"):
        return AdapterReference(policy, adapter), adapter is None and new_adapter
    return frozen_copy(policy), True


def build_value_model(
    value_model: str | nn.Module | None,
    reward: FirstReward,
    policy: nn.Module,
    options: ValueOptions,
    *,
    allow_low: bool = False,
) -> ScalarModel | ScalarHead:
    """The value model: given, initialized from the reward model, or a head on the policy.

    With ``value_source="auto"`` a reward model that cannot be a value model is not used: one that
    is not causal, has no per-token head, or has another tokenizer than the policy.

    Raises:
        ConfigError: ``value_source="reward"`` without a reward model to start from.
    """
    if value_model is not None:
        value = load_value(value_model)
        return value if allow_low else in_float32(value)
    if options.source == "policy" or (options.source == "auto" and reward.model is None):
        return value_from_trunk(causal_parts(policy))
    try:
        return _value_from(reward)
    except ConfigError as problem:
        if options.source == "reward":
            raise
        logger.warning(
            "the value model is a head on the policy instead of the reward model: %s", problem
        )
        return value_from_trunk(causal_parts(policy))


def in_float32(value: ScalarModel) -> ScalarModel:
    """Convert trainable weights of the value model to float32; log it if any change."""
    low = [p for p in value.parameters() if p.requires_grad and p.dtype in LOW]
    if low:
        logger.warning(
            "value_model has weights in %s; converting them to float32, since updates at small"
            " learning rates such as 1e-6 would be rounded away",
            str(low[0].dtype).removeprefix("torch."),
        )
    for p in low:
        p.data = p.data.float()
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstReward:
    """The first reward model, a name or a module, and its tokenizer."""

    model: str | nn.Module | None
    tokenizer: Any  # None: the policy's, or the one saved with a model given by name
    policy_tokenizer: Any

    def check_tokens(self) -> None:
        """Check that the reward model uses the policy's tokenizer.

        Raises:
            ConfigError: it does not, so it cannot initialize the value model.
        """
        tokenizer = self.tokenizer
        if tokenizer is None and isinstance(self.model, str):
            tokenizer = load_tokenizer(self.model)
        if tokenizer is not None and not same_tokens(tokenizer, self.policy_tokenizer):
            raise ConfigError(
                "the value model must use the policy's tokenizer, but the reward model has another "
                'one; set value_source="policy", or pass value_model'
            )


def first_reward(reward_model: Any, tokenizers: Any, policy_tokenizer: Any) -> FirstReward:
    """The first reward model, if there is one, with its tokenizer."""
    models = reward_model if isinstance(reward_model, list | tuple) else [reward_model]
    if not isinstance(tokenizers, list | tuple):
        tokenizers = [tokenizers] * len(models)
    pairs = zip(models, [*tokenizers, *[None] * len(models)], strict=False)
    model, tokenizer = next(
        ((m, t) for m, t in pairs if isinstance(m, nn.Module | str)), (None, None)
    )
    return FirstReward(model=model, tokenizer=tokenizer, policy_tokenizer=policy_tokenizer)


def _value_from(reward: FirstReward) -> ScalarModel:
    if reward.model is None:
        raise ConfigError(
            'value_source="reward" needs a reward model; pass value_model, or set'
            ' value_source="policy" for a value head on the policy'
        )
    reward.check_tokens()
    if isinstance(reward.model, str):
        return load_value(reward.model)
    return scalar_model(_trainable_copy(reward.model))


def check_models(
    models: Models, rewards: Iterable[Any], sources: Iterable[Any], *, tokens: int, args: Any
) -> None:
    """Check vocabularies, context lengths, and that frozen and trained models share no weights.

    Args:
        models: the trained models and the reference.
        rewards: reward models, functions, or lists of them.
        sources: prompts of training and evaluation.
        tokens: size of the policy's tokenizer.
        args: the config; gives the response length and the name of that option.

    Raises:
        ConfigError: names the model, the value and the fix.
        DataError: a prompt has a token outside the policy's vocabulary.
    """
    all_models = {"the policy": models.policy}
    trained = {"model": models.policy}
    if isinstance(models.value, ScalarModel):
        all_models["the value model"] = trained["value_model"] = models.value.model
        check_no_shared_weights({"model": models.policy}, {"value_model": models.value.model})
    if models.reference is not None and models.reference.separate_models:
        all_models["the reference"] = models.reference.separate_models[0]
        check_no_shared_weights(trained, {"ref_model": models.reference.separate_models[0]})
    for group in rewards:
        for reward in group if isinstance(group, list | tuple) else [group]:
            if isinstance(reward, nn.Module):
                check_no_shared_weights(trained, {"reward_model": reward})
    known = vocabulary(models.policy)
    if known is not None:
        check_vocabulary(all_models, tokens=min(tokens, known))
    for source in sources:
        if not isinstance(source, DatasetPrompts):
            continue
        check_length(
            {**all_models, **vllm_limit(args)},
            prompt=source.report.longest,
            response=args.response_length,
            option=args.length_option,
        )
        if known is not None:
            source.check_tokens(known)


def _trainable_copy(model: nn.Module) -> nn.Module:
    trainable = copy.deepcopy(model)
    for p in trainable.parameters():
        if p.dtype.is_floating_point:
            p.data = p.data.to(torch.float32)
            p.requires_grad_(True)
    return trainable


NAME = "model_init_kwargs"
_REFUSED = {
    "device_map": "accelerate places the models; leave it out",
    "use_safetensors": "loading pickled weights can run arbitrary code; leave it out",
    "output_loading_info": "it changes the return value; leave it out",
}


def init_kwargs(config: OnPolicyConfig) -> dict[str, Any]:
    """``model_init_kwargs``, with ``torch_dtype`` renamed to ``dtype``.

    Raises:
        ConfigError: it is not a mapping, or sets a reserved argument.
    """
    if not isinstance(config, NewerArguments):
        return {}
    kwargs = dict(json_object(NAME, config.model_init_kwargs))
    for name, reason in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"{NAME} sets {name}={kwargs[name]!r}: {reason}")
        kwargs.pop(name, None)
    if "torch_dtype" in kwargs:
        kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
    return kwargs


def loading_options(given: TrainerInputs) -> dict[str, Any]:
    """Arguments of ``load_policy`` for the policy and a reference by name.

    Raises:
        ConfigError: options without effect, or quantized weights without an adapter to train.
    """
    kwargs = init_kwargs(given.args)
    if kwargs and not isinstance(given.model, str):
        raise ConfigError(
            f"{NAME} sets {', '.join(kwargs)}, but the model is already loaded; pass them when you"
            f" load it, or leave {NAME} unset"
        )
    if given.quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ConfigError(
                f"quantization_config is set in the trainer and in {NAME}; set it once"
            )
        if not isinstance(given.model, str):
            raise ConfigError(
                "quantization_config is set, but the model is already loaded; pass it when"
                " you load it"
            )
        kwargs["quantization_config"] = given.quantization_config
    if "quantization_config" in kwargs and given.peft_config is None:
        raise ConfigError(
            "quantization_config freezes the weights; pass a peft_config to train an adapter"
        )
    return split(kwargs) | {
        "trust_remote_code": kwargs.get("trust_remote_code", trusts(given.args))
    }


def end_tokens(given: TrainerInputs, tokenizer: Any) -> tuple[int, ...]:
    """The ids that ``stop_token="eos"`` means for the policy, before its weights are loaded."""
    options = init_kwargs(given.args)
    assert given.model is not None  # text_tokenizer refuses it
    return eos_token_ids(
        given.model,
        tokenizer,
        revision=options.get("revision"),
        trust_remote_code=options.get("trust_remote_code", trusts(given.args)),
    )


def split(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of ``from_pretrained`` to those of ``load_policy``."""
    names = {"dtype", "revision", "attn_implementation", "trust_remote_code"}
    arguments = {name: x for name, x in options.items() if name in names}
    arguments["quantization"] = options.get("quantization_config")
    rest = {n: x for n, x in options.items() if n not in names and n != "quantization_config"}
    return arguments | {"more": rest}
