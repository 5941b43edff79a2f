"""How a policy and a reference that are given by name are loaded, as the options say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.backends.hf.end_tokens import eos_token_ids
from kedge.config.newer import NewerArguments
from kedge.config.on_policy import OnPolicyConfig
from kedge.config.rollout import json_object
from kedge.errors import ConfigError
from kedge.trainers.given import Given, trusts

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


def loading_of(given: Given) -> dict[str, Any]:
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


def end_tokens(given: Given, tokenizer: Any) -> tuple[int, ...]:
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
