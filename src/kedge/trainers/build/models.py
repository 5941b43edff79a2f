"""The models of a run: policy, reference, value, reward."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kedge.backends.data import DatasetPrompts
from kedge.backends.hf.compatibility import check_apart, check_length, check_vocabulary, vocabulary
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
from kedge.config.rollout import json_object
from kedge.errors import ConfigError
from kedge.trainers.build.inputs import TrainerInputs, trusts

logger = logging.getLogger(__name__)

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What trains and what it is held to."""

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
    """The policy, loaded and with its adapter; ``loading`` is for ``load_policy``.

    Raises:
        ConfigError: no model, or a PEFT model together with a peft_config.
    """
    if model is None:
        raise ConfigError("model=None: give the policy as a model, a folder or a hub name")
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
    """The reference, and whether it was made from the policy as it is.

    An adapter that has trained before sets the policy apart from its base from the start;
    ``new_adapter`` says that it has not.

    Raises:
        ConfigError: the reference is the very module that trains, or holds some of its weights.
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
        own = load_policy(ref_model, **loading or {})
        check_apart({"model": policy}, {"ref_model": own})
        return FrozenModel(own), False
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
    """The value model: given, from the reward model's weights, or a head on the policy.

    With ``value_source="auto"`` a reward model that cannot be a value model (it looks ahead, has
    no head for single states, or reads other tokens than the policy writes) is left alone.

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
        logger.warning("the value is a head on the policy, not the reward model's: %s", problem)
        return value_from_trunk(causal_parts(policy))


def in_float32(value: ScalarModel) -> ScalarModel:
    """The value model with trainable weights in float32, which is said once if it changes any."""
    low = [p for p in value.parameters() if p.requires_grad and p.dtype in LOW]
    if low:
        logger.warning(
            "value_model has weights in %s; it is trained in float32, since steps of a learning"
            " rate like 1e-6 are lost in rounding",
            str(low[0].dtype).removeprefix("torch."),
        )
    for p in low:
        p.data = p.data.float()
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstReward:
    """The first reward model, by name or as it is, and the tokens it reads."""

    model: str | nn.Module | None
    tokenizer: Any  # its own; None: the policy's, or the one beside a model given by name
    policy_tokenizer: Any

    def check_tokens(self) -> None:
        """Refuse a tokenizer that is not the policy's.

        Raises:
            ConfigError: a value is asked of the policy's tokens, which mean something else here.
        """
        own = self.tokenizer
        if own is None and isinstance(self.model, str):
            own = load_tokenizer(self.model)
        if own is not None and not same_tokens(own, self.policy_tokenizer):
            raise ConfigError(
                "the reward model has a tokenizer of its own, so its weights cannot read the "
                'policy\'s tokens as a value model must; set value_source="policy", or give '
                "value_model"
            )


def first_reward(reward_model: Any, tokenizers: Any, policy_tokenizer: Any) -> FirstReward:
    """The first reward model among what the user gave, if there is one."""
    given = reward_model if isinstance(reward_model, list | tuple) else [reward_model]
    own = tokenizers if isinstance(tokenizers, list | tuple) else [tokenizers] * len(given)
    pairs = zip(given, [*own, *[None] * len(given)], strict=False)
    model, tokenizer = next(
        ((m, t) for m, t in pairs if isinstance(m, nn.Module | str)), (None, None)
    )
    return FirstReward(model=model, tokenizer=tokenizer, policy_tokenizer=policy_tokenizer)


def _value_from(reward: FirstReward) -> ScalarModel:
    if reward.model is None:
        raise ConfigError(
            'value_source="reward", but there is no reward model to start from; give value_model,'
            ' or value_source="policy" for a value head on the policy'
        )
    reward.check_tokens()
    if isinstance(reward.model, str):
        return load_value(reward.model)
    return scalar_model(_trainable_copy(reward.model))


def check_models(
    models: Models, judges: Iterable[Any], sources: Iterable[Any], *, tokens: int, args: Any
) -> None:
    """Whether the models of a run can read its rows, and share no weights that they must not.

    Args:
        models: what trains and what it is held to.
        judges: what scores, as the user gave it: models, functions, lists of them.
        sources: prompts of training and evaluation.
        tokens: of the policy's tokenizer.
        args: the config; says how long a response may be, and what it calls that.

    Raises:
        ConfigError: naming the model, the number and the way out.
        DataError: a prompt with a token that the policy does not know.
    """
    held = {"the policy": models.policy}
    trained = {"model": models.policy}
    if isinstance(models.value, ScalarModel):
        held["the value model"] = trained["value_model"] = models.value.model
        check_apart({"model": models.policy}, {"value_model": models.value.model})
    if models.reference is not None and models.reference.own:
        held["the reference"] = models.reference.own[0]
        check_apart(trained, {"ref_model": models.reference.own[0]})
    for given in judges:
        for each in given if isinstance(given, list | tuple) else [given]:
            if isinstance(each, nn.Module):
                check_apart(trained, {"reward_model": each})
    known = vocabulary(models.policy)
    if known is not None:
        check_vocabulary(held, tokens=min(tokens, known))
    for source in sources:
        if not isinstance(source, DatasetPrompts):
            continue
        check_length(
            held,
            prompt=source.report.longest,
            response=args.response_length,
            option=args.length_option,
        )
        if known is not None:
            source.check_tokens(known)


def _trainable_copy(model: nn.Module) -> nn.Module:
    mine = copy.deepcopy(model)
    for p in mine.parameters():
        if p.dtype.is_floating_point:
            p.data = p.data.to(torch.float32)
            p.requires_grad_(True)
    return mine


NAME = "model_init_kwargs"
_REFUSED = {
    "device_map": "accelerate places the models; leave it out",
    "use_safetensors": "pickled weights can run code when they are loaded; leave it out",
    "output_loading_info": "it changes what is returned; leave it out",
}


def init_kwargs(config: OnPolicyConfig) -> dict[str, Any]:
    """``model_init_kwargs``, in today's names.

    Raises:
        ConfigError: it is no mapping, or sets what Kedge decides.
    """
    if not isinstance(config, NewerArguments):
        return {}
    found = dict(json_object(NAME, config.model_init_kwargs))
    for name, reason in _REFUSED.items():
        if found.get(name) is not None:
            raise ConfigError(f"{NAME} sets {name}={found[name]!r}: {reason}")
        found.pop(name, None)
    if "torch_dtype" in found:
        found.setdefault("dtype", found.pop("torch_dtype"))
    return found


def loading_options(given: TrainerInputs) -> dict[str, Any]:
    """Arguments of ``load_policy`` for the policy and a reference by name.

    Raises:
        ConfigError: options that nothing would read, or weights that could not train.
    """
    found = init_kwargs(given.args)
    if found and not isinstance(given.model, str):
        raise ConfigError(
            f"{NAME} sets {', '.join(found)}, and the model is loaded already; load it with them,"
            f" or leave {NAME} out"
        )
    if given.quantization_config is not None:
        if "quantization_config" in found:
            raise ConfigError(
                f"quantization_config is given to the trainer and in {NAME}; give it once"
            )
        if not isinstance(given.model, str):
            raise ConfigError(
                "quantization_config is given, and the model is loaded already; load it with it"
            )
        found["quantization_config"] = given.quantization_config
    if "quantization_config" in found and given.peft_config is None:
        raise ConfigError(
            "quantization_config makes weights that do not train; give a peft_config, whose adapter"
            " does"
        )
    return split(found) | {"trust_remote_code": found.get("trust_remote_code", trusts(given.args))}


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
    """Arguments of ``from_pretrained`` as those of ``load_policy``."""
    own = {"dtype", "revision", "attn_implementation", "trust_remote_code"}
    found = {name: x for name, x in options.items() if name in own}
    found["quantization"] = options.get("quantization_config")
    rest = {n: x for n, x in options.items() if n not in own and n != "quantization_config"}
    return found | {"more": rest}
