"""The reference model, as a full copy or with layers shared with the policy."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from torch import nn

from kedge.classic.models.wrapper import PreTrainedModelWrapper
from kedge.errors import ConfigError

LAYERS = (
    "transformer.h.{layer}",
    "model.decoder.layers.{layer}",
    "gpt_neox.layers.{layer}",
    "model.layers.{layer}",
    "decoder.block.{layer}",
)


def create_reference_model(
    model: PreTrainedModelWrapper, num_shared_layers: int | None = None, pattern: str | None = None
) -> Any:
    """A frozen copy of a model in evaluation mode.

    With ``num_shared_layers`` N the weights below layer N (embeddings and N layers) are frozen in
    the policy too, and shared instead of copied.

    Args:
        model: a model of ``kedge.classic``.
        num_shared_layers: N; None: copy everything and freeze nothing in the policy.
        pattern: name pattern of layers, e.g. "transformer.h.{layer}"; None: detected.

    Raises:
        ConfigError: a PEFT model (its base is the reference), or a layer that does not exist.
    """
    if model.is_peft_model:
        raise ConfigError(
            "a PEFT model needs no reference model: its base without the adapter is the reference"
        )
    shared: list[str] = []
    if num_shared_layers is not None:
        shared = _weights_below(model, num_shared_layers, pattern)
    memo: dict[int, Any] = {}
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name in shared:
        weights[name].requires_grad_(False)
        memo[id(weights[name])] = weights[name]  # deepcopy treats these as copied
    reference = copy.deepcopy(model, memo)
    return reference.requires_grad_(False).eval()


def _weights_below(model: nn.Module, layer: int, pattern: str | None) -> list[str]:
    """Names of the weights before a layer, in model order."""
    names = [name for name, _ in model.named_parameters()]
    chosen = pattern or next((p for p in LAYERS if _first(names, p, 0) is not None), None)
    if chosen is None:
        raise ConfigError(
            "num_shared_layers needs a known layer name pattern, but this model matches none of "
            f"{', '.join(LAYERS)}; pass pattern"
        )
    first = _first(names, chosen, layer)
    if first is None:
        count = next(n for n in itertools.count() if _first(names, chosen, n) is None)
        raise ConfigError(
            f"num_shared_layers must be 0 to {max(count - 1, 0)} for the {count} layers that match "
            f"{chosen!r}, got {layer}"
        )
    return names[:first]


def _first(names: list[str], pattern: str, layer: int) -> int | None:
    """Index of the first weight of a layer."""
    part = f".{pattern.format(layer=layer)}."
    return next((i for i, name in enumerate(names) if part in f".{name}"), None)
