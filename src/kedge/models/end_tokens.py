"""Tokens that end a response."""

from __future__ import annotations

from typing import Any

from torch import nn

from kedge.models.compatibility import text_config
from kedge.models.load import configuration_source


def eos_token_ids(
    model: str | nn.Module,
    tokenizer: Any,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[int, ...]:
    """The tokenizer's EOS token and every ``eos_token_id`` of the model's generation_config.

    Chat models often name several: the end of the text and the end of a turn. Ids beyond the
    model's vocabulary, which it cannot sample, are left out. No weights are loaded.

    Args:
        model: the policy, or its folder or hub name.
        tokenizer: tokenizer of the policy.
        revision: revision of the hub repository.
        trust_remote_code: run Python code that comes with the model.
    """
    if isinstance(model, str):
        config, generation = _configs(model, revision, trust_remote_code)
    else:
        config = getattr(model, "config", None)
        generation = getattr(model, "generation_config", None)
    ids = [tokenizer.eos_token_id, *as_list(getattr(generation, "eos_token_id", None))]
    size = getattr(text_config(config), "vocab_size", None) or float("inf")
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None and 0 <= i < size))


def as_list(eos_token_id: int | list[int] | None) -> list[int]:
    """Convert ``eos_token_id`` (None, an id or a list) to a list."""
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


def _configs(source: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    """Configuration and generation_config, as ``from_pretrained`` would give them to the model."""
    from transformers import AutoConfig, GenerationConfig

    try:
        source, revision = configuration_source(source, revision)
        options: dict[str, Any] = {} if revision is None else {"revision": revision}
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
        try:
            return config, GenerationConfig.from_pretrained(source, **options)
        except OSError:
            return config, GenerationConfig.from_model_config(config)
    except Exception:  # loading the model reports errors in its files
        return None, None
