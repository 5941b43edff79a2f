"""Models from a folder or the hub, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from kedge.backends.hf.peft import without_notices
from kedge.errors import ConfigError

_HEADS = {
    *("score", "classifier", "pre_classifier", "classification_head", "pooler", "v_head"),
    *("sequence_summary", "logits_proj"),
}


def check_folder(source: str, what: str) -> None:
    """Refuse a path that leads nowhere, which the hub would be asked for.

    Raises:
        ConfigError: there is no such folder.
    """
    path = Path(source).expanduser()
    if source.startswith(("/", ".", "~")) and not path.is_dir():
        why = "it is a file" if path.exists() else "there is no such folder"
        raise ConfigError(f"{what} {source!r} cannot be loaded: {why}")


def load_policy(
    source: str | nn.Module,
    *,
    dtype: torch.dtype | str = torch.float32,
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    quantization: Any = None,
    more: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal language model, from a name, a folder, or as it is.

    A folder that a run with adapters wrote holds the adapter alone: it is put on the base model
    that it names, and trains.

    Args:
        source: hub name or local folder, or a loaded model, which is returned unchanged.
        dtype: of the loaded weights; weights that train must be float32.
        revision: branch, tag or commit on the hub.
        attn_implementation: "sdpa", "eager", ...; None lets transformers choose.
        trust_remote_code: run Python code that comes with the model.
        quantization: a transformers quantization config, for frozen bases.
        more: further arguments of ``from_pretrained``.

    Raises:
        ConfigError: it cannot be loaded, or its files lack weights.
    """
    if isinstance(source, nn.Module):
        return source  # type: ignore[return-value]
    check_folder(source, "the model")
    given = {
        "revision": revision,
        "attn_implementation": attn_implementation,
        "quantization_config": quantization,
    }
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}
    options["trust_remote_code"] = trust_remote_code
    options |= {name: value for name, value in given.items() if value is not None}
    options |= more or {}
    try:
        if find_adapter_config_file(source, revision=revision) is not None:
            return _with_its_adapter(source, options)
        return load_whole(AutoModelForCausalLM, f"the model {source!r}", source, **options)
    except ConfigError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise ConfigError(f"the model {source!r} cannot be loaded: {error}") from error


def load_whole(kind: Any, what: str, source: str, *, new_head: bool = False, **options: Any) -> Any:
    """``kind.from_pretrained``, refusing files that lack weights: those would start at random.

    Args:
        kind: an auto class of transformers.
        what: how messages call the model.
        source: its name or folder.
        new_head: a language model may be given a head that scores, which no file holds.
        options: of ``from_pretrained``.

    Raises:
        ConfigError: naming some of the weights that are missing.
    """
    model, found = kind.from_pretrained(source, output_loading_info=True, **options)
    kinds = getattr(model.config, "architectures", None) or []
    scores = any("SequenceClassification" in name for name in kinds)
    heads = set() if scores or not new_head else _HEADS
    missing = sorted(name for name in found["missing_keys"] if not heads & set(name.split(".")))
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ConfigError(
            f"{what} lacks {len(missing)} of its weights ({shown}), which would start at random; "
            "its files are incomplete, or belong to another kind of model"
        )
    return model


def _with_its_adapter(source: str, options: dict[str, Any]) -> Any:
    if find_spec("peft") is None:
        raise ConfigError(f"{source!r} is an adapter: pip install 'kedge[peft]'")
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(source).base_model_name_or_path
    if not base:
        raise ConfigError(
            f"{source!r} is an adapter and does not say of which model; load that model, put the "
            "adapter on it (peft.PeftModel.from_pretrained(model, folder, is_trainable=True)), and "
            "pass the result as model"
        )
    own = {k: v for k, v in options.items() if k != "revision"}  # the base has branches of its own
    model = load_whole(AutoModelForCausalLM, f"the model {base!r}", base, **own)
    with without_notices():
        return PeftModel.from_pretrained(model, source, is_trainable=True)
