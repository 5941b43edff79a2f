"""Loads the base model for a value head."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.hub import cached_file

from kedge.backends.hf.peft import quantization
from kedge.errors import ConfigError

HEAD_OPTIONS = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")
_HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
_PEFT_FILE = "adapter_config.json"


@dataclass(slots=True, kw_only=True)
class LoadingOptions:
    """The arguments of ``from_pretrained``, grouped by consumer."""

    head: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    hub: dict[str, Any] = field(default_factory=dict)
    peft_config: Any = None
    is_trainable: bool = False
    reward_adapter: str | None = None
    reward_adapter_name: str = "reward_adapter"


def split_options(arguments: dict[str, Any]) -> LoadingOptions:
    """Group the arguments of ``from_pretrained``.

    Raises:
        ConfigError: an argument of the wrong type, or both 8 and 4 bits.
    """
    rest = dict(arguments)
    options = LoadingOptions(
        head={k: rest.pop(k) for k in HEAD_OPTIONS if k in rest},
        peft_config=rest.pop("peft_config", None),
        is_trainable=rest.pop("is_trainable", False),
        reward_adapter=rest.pop("reward_adapter", None),
        reward_adapter_name=rest.pop("reward_adapter_name", "reward_adapter"),
    )
    if options.reward_adapter is not None and not isinstance(options.reward_adapter, str | Path):
        raise ConfigError(
            "reward_adapter must be the name or folder of an adapter, got "
            f"{options.reward_adapter!r}"
        )
    if options.peft_config is not None and not hasattr(options.peft_config, "peft_type"):
        raise ConfigError(
            "peft_config must be a peft.PeftConfig such as LoraConfig, got "
            f"{type(options.peft_config).__name__}"
        )
    bits = [n for n in (8, 4) if rest.pop(f"load_in_{n}bit", False)]
    if len(bits) > 1 or (bits and "quantization_config" in rest):
        raise ConfigError("choose one of load_in_8bit, load_in_4bit and quantization_config")
    dtype = rest.pop("torch_dtype", None)
    rest.setdefault("dtype", torch.float32 if dtype is None else dtype)
    if bits:
        rest["quantization_config"] = quantization(8 if bits[0] == 8 else 4)
    options.hub = {k: rest[k] for k in _HUB if k in rest}
    options.model = rest
    return options


def load_base(
    loader: Any, source: str | Path | nn.Module, args: tuple[Any, ...], options: LoadingOptions
) -> Any:
    """The base model for a value head: the given one, from files, or an adapter on its base."""
    if isinstance(source, nn.Module):
        if not hasattr(source, "get_output_embeddings"):
            raise ConfigError(
                "from_pretrained needs a name, a folder, a transformers language model or a PEFT "
                f"model, got {type(source).__name__}"
            )
        return source
    adapter = _has_adapter(source, options)
    if not adapter:
        return loader.from_pretrained(source, *args, **options.model)
    if options.peft_config is not None:
        raise ConfigError(
            f"{source} is already an adapter, so peft_config would add a second; remove it to "
            "continue training that adapter (is_trainable=True)"
        )
    from peft import PeftConfig, PeftModel

    stored = PeftConfig.from_pretrained(str(source), **options.hub)
    base = loader.from_pretrained(stored.base_model_name_or_path, *args, **options.model)
    return PeftModel.from_pretrained(
        base, str(source), is_trainable=options.is_trainable, **options.hub
    )


def _has_adapter(source: str | Path, options: LoadingOptions) -> bool:
    if Path(source).is_dir():
        return (Path(source) / _PEFT_FILE).is_file()
    file = cached_file(
        str(source),
        _PEFT_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **options.hub,
    )
    return file is not None
