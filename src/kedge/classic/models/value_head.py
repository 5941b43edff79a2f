"""The value head of the classic models, and how to read one from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kedge.backends.hf.value_head import HEAD_FILE, ScalarHead
from kedge.classic.models.loading import find_file
from kedge.errors import ConfigError

PREFIX = "v_head."
_WHOLE = ("model.safetensors", "pytorch_model.bin")


class ValueHead(ScalarHead):
    """A linear map from hidden states to one number, after dropout, in float32.

    The trainer runs models in evaluation mode, as TRL does: dropout would make the probability
    ratio of an unchanged policy differ from 1.  It acts if you train the model yourself.

    Args:
        config: of the model; its ``summary_dropout_prob`` takes precedence over the argument.
        summary_dropout_prob: dropout rate.
        v_head_init_strategy: "normal", or None for the usual initialization of a linear layer.
        v_head_initializer_range: standard deviation of "normal"; the bias is then 0.

    Raises:
        ConfigError: the config has no hidden size, or the strategy is unknown.
    """

    def __init__(
        self,
        config: Any,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        super().__init__(hidden_size(config))
        rate = getattr(config, "summary_dropout_prob", summary_dropout_prob)
        self.dropout: nn.Module = nn.Dropout(rate) if rate else nn.Identity()
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.summary.weight, std=v_head_initializer_range)
        elif v_head_init_strategy is None:
            self.summary.reset_parameters()
        else:
            raise ConfigError(
                f'v_head_init_strategy must be "normal" or None, got {v_head_init_strategy!r}'
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """Float [..., H] -> float32 [..., 1]."""
        return super().forward(self.dropout(hidden))


def hidden_size(config: Any) -> int:
    """Size of the hidden states that the output layer reads."""
    places = (config, getattr(config, "text_config", None), getattr(config, "decoder", None))
    for place in places:
        for name in ("word_embed_proj_dim", "hidden_size"):
            if getattr(place, name, None):
                return int(getattr(place, name))
    raise ConfigError(f"{type(config).__name__} must have a hidden_size for a value head")


def read_value_head(source: str | Path, **hub: Any) -> dict[str, Tensor]:
    """The tensors ``summary.weight`` [1, H] and ``summary.bias`` [1] of a saved model, or {}.

    Reads what Kedge writes, LLaMA-Factory's value_head.safetensors, and the "v_head." entries of
    TRL in model.safetensors or pytorch_model.bin, whole or sharded.  Only tensors are read from a
    .bin file, never objects.

    Raises:
        ConfigError: a file is damaged, or contains other objects than tensors.
    """
    head_file = find_file(source, HEAD_FILE, hub)
    if head_file is not None:
        return {name.removeprefix(PREFIX): x for name, x in _tensors(head_file, "").items()}
    for name in _WHOLE:
        index, files = find_file(source, f"{name}.index.json", hub), {name}
        if index is not None:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file for key, file in shards.items() if key.startswith(PREFIX)}
        tensors: dict[str, Tensor] = {}
        for path in (find_file(source, file, hub) for file in sorted(files)):
            tensors |= {} if path is None else _tensors(path, PREFIX)
        if tensors:
            return tensors
    return {}


def _tensors(file: Path, prefix: str) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                keys = [k for k in tensors.keys() if k.startswith(prefix)]  # noqa: SIM118
                return {k.removeprefix(prefix): tensors.get_tensor(k) for k in keys}
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise ConfigError(f"the value head in {file} cannot be read: {error}") from error
    except Exception as error:  # pickle.UnpicklingError: other objects
        raise ConfigError(
            f"{file} contains objects other than tensors, which could run arbitrary code; if you "
            f"trust it, convert it to safetensors ({error})"
        ) from error
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
