"""How models and tokenizers given by name are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module

from kedge.backends.hf.end_tokens import eos_token_ids
from kedge.backends.hf.load import check_folder
from kedge.config.base import OnPolicyConfig
from kedge.config.compat.trl import NewerArguments
from kedge.config.rollout import json_object
from kedge.errors import ConfigError
from kedge.trainers.build.inputs import TrainerInputs

NAME = "model_init_kwargs"
_REFUSED = {
    "device_map": "accelerate places the models; leave it out",
    "use_safetensors": "loading pickled weights can run arbitrary code; leave it out",
    "output_loading_info": "it changes the return value; leave it out",
}


def trusts(config: OnPolicyConfig) -> bool:
    """Whether code from model repositories may run."""
    return isinstance(config, NewerArguments) and config.trust_remote_code


def load_tokenizer(processing_class: Any, model: Any, args: OnPolicyConfig) -> Any:
    """The tokenizer: an object, a name or folder, part of a processor, or saved with the model."""
    if model is None or model == "" or not isinstance(model, str | Module):
        raise ConfigError(f"model={model!r} must be the policy: a model, a folder or a hub name")
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
    name = processing_class if isinstance(processing_class, str) else name
    if isinstance(name, str) and name and isinstance(processing_class, str | None):
        revision = None if processing_class else init_kwargs(args).get("revision")  # the model's
        return _load_tokenizer(name, trusts(args), revision)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is None or not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(
            f"processing_class={processing_class!r} must be a tokenizer, for example"
            " AutoTokenizer.from_pretrained(...)"
        )
    return tokenizer


def own_or(processing_class: Any, tokenizer: Any) -> Any:
    """The given object (perhaps a processor), or the loaded tokenizer for None or a name."""
    return tokenizer if isinstance(processing_class, str | None) else processing_class


def _load_tokenizer(name: str, trust: bool, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    check_folder(name, "the tokenizer")
    try:
        kwargs = {} if revision is None else {"revision": revision}
        return AutoTokenizer.from_pretrained(
            name, padding_side="left", trust_remote_code=trust, **kwargs
        )
    except Exception as error:  # a damaged file raises any type
        raise ConfigError(f"cannot load the tokenizer from {name!r}: {error}") from error


def init_kwargs(config: OnPolicyConfig) -> dict[str, Any]:
    """``model_init_kwargs``, with ``torch_dtype`` renamed to ``dtype``."""
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


def loading_options(inputs: TrainerInputs) -> dict[str, Any]:
    """Arguments of ``load_policy`` for the policy and a reference by name."""
    kwargs = init_kwargs(inputs.args)
    if kwargs and not isinstance(inputs.model, str):
        raise ConfigError(
            f"{NAME} sets {', '.join(kwargs)}, but the model is already loaded; pass them when you"
            f" load it, or leave {NAME} unset"
        )
    if inputs.quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ConfigError(
                f"quantization_config is set in the trainer and in {NAME}; set it once"
            )
        if not isinstance(inputs.model, str):
            raise ConfigError(
                "quantization_config is set, but the model is already loaded; pass it when"
                " you load it"
            )
        kwargs["quantization_config"] = inputs.quantization_config
    if "quantization_config" in kwargs and inputs.peft_config is None:
        raise ConfigError(
            "quantization_config freezes the weights; pass a peft_config to train an adapter"
        )
    if inputs.args.bf16 and inputs.peft_config is not None and isinstance(inputs.model, str):
        kwargs.setdefault("dtype", "bfloat16")  # the base under the adapter is frozen
    return split(kwargs) | {
        "trust_remote_code": kwargs.get("trust_remote_code", trusts(inputs.args))
    }


def split(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of ``from_pretrained`` to those of ``load_policy``."""
    names = {"dtype", "revision", "attn_implementation", "trust_remote_code"}
    arguments = {name: x for name, x in options.items() if name in names}
    arguments["quantization"] = options.get("quantization_config")
    rest = {n: x for n, x in options.items() if n not in names and n != "quantization_config"}
    return arguments | {"more": rest}


def end_tokens(inputs: TrainerInputs, tokenizer: Any) -> tuple[int, ...]:
    """The ids that ``stop_token="eos"`` means for the policy, before its weights are loaded."""
    options = init_kwargs(inputs.args)
    assert inputs.model is not None  # load_tokenizer refuses it
    return eos_token_ids(
        inputs.model,
        tokenizer,
        revision=options.get("revision"),
        trust_remote_code=options.get("trust_remote_code", trusts(inputs.args)),
    )
