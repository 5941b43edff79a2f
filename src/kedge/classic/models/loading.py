"""Loads the base model for a value head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.hub import cached_file

from kedge.backends.hf.peft import quantization, with_adapter
from kedge.errors import ConfigError

HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")


def find_file(source: str | Path, name: str, hub: dict[str, Any]) -> Path | None:
    """A file of a folder or hub repository; None: it has none."""
    file = cached_file(
        str(source),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
    return None if file is None else Path(file)


def load_base(
    loader: Any,
    source: str | Path | nn.Module,
    args: tuple[Any, ...],
    *,
    peft_config: Any = None,
    is_trainable: bool = False,
    **options: Any,
) -> Any:
    """The base model for a value head: the given one, from files, or an adapter on its base.

    Raises:
        ConfigError: an argument of the wrong type, both 8 and 4 bits, or two adapters.
    """
    if peft_config is not None and not hasattr(peft_config, "peft_type"):
        raise ConfigError(
            "peft_config must be a peft.PeftConfig such as LoraConfig, got "
            f"{type(peft_config).__name__}"
        )
    bits = [n for n in (8, 4) if options.pop(f"load_in_{n}bit", False)]
    if len(bits) > 1 or (bits and "quantization_config" in options):
        raise ConfigError("choose one of load_in_8bit, load_in_4bit and quantization_config")
    if bits:
        options["quantization_config"] = quantization(8 if bits[0] == 8 else 4)
    if "use_auth_token" in options:  # the name before transformers 5
        options["token"] = options.pop("use_auth_token")
    dtype = options.pop("torch_dtype", None)
    options.setdefault("dtype", torch.float32 if dtype is None else dtype)
    hub = {k: options[k] for k in HUB if k in options}
    if isinstance(source, nn.Module):
        if not hasattr(source, "get_output_embeddings"):
            raise ConfigError(
                "from_pretrained needs a name, a folder, a transformers language model or a PEFT "
                f"model, got {type(source).__name__}"
            )
        model: Any = source
    elif find_file(source, "adapter_config.json", hub) is None:
        model = loader.from_pretrained(source, *args, **options)
    elif peft_config is None:
        from peft import PeftConfig, PeftModel

        stored = PeftConfig.from_pretrained(str(source), **hub)
        base = loader.from_pretrained(stored.base_model_name_or_path, *args, **options)
        return PeftModel.from_pretrained(base, str(source), is_trainable=is_trainable, **hub)
    else:
        raise ConfigError(
            f"{source} is already an adapter, so peft_config would add a second; remove it to "
            "continue training that adapter (is_trainable=True)"
        )
    if peft_config is None or hasattr(model, "peft_config"):
        return model
    return with_adapter(model, peft_config)
