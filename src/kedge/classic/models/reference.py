"""The reference model, with layers of its own or shared with the policy."""

from __future__ import annotations

import copy
import re
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
    the policy too, and are not copied: both models hold the very same tensors.

    Args:
        model: of ``kedge.classic``.
        num_shared_layers: N; None: everything is copied and nothing of the policy is frozen.
        pattern: how layers are named, e.g. "transformer.h.{layer}"; None: found.

    Raises:
        ConfigError: a PEFT model (its base without adapter is the reference), or no such layer.
    """
    if model.is_peft_model:
        raise ConfigError(
            "a PEFT model needs no reference model: its base without the adapter is the reference"
        )
    shared: list[str] = []
    if num_shared_layers is not None:
        shared = _below(model, num_shared_layers, pattern)
    memo: dict[int, Any] = {}
    held = dict(model.named_parameters(remove_duplicate=False))
    for name in shared:
        held[name].requires_grad_(False)
        memo[id(held[name])] = held[name]  # deepcopy takes these as copied already
    made = copy.deepcopy(model, memo)
    return made.requires_grad_(False).eval()


def _below(model: nn.Module, layer: int, pattern: str | None) -> list[str]:
    """Names of the weights that come before a layer, in the order of the model."""
    names = [name for name, _ in model.named_parameters()]
    chosen = pattern or next((p for p in LAYERS if any(_at(p, 0) in f".{n}" for n in names)), None)
    if chosen is None:
        raise ConfigError(
            "num_shared_layers: the layers of this model are named in none of the known ways "
            f"({', '.join(LAYERS)}); pass pattern"
        )
    matches = [
        re.search(re.escape(chosen).replace(r"\{layer\}", r"(\d+)") + r"\.", n) for n in names
    ]
    count = 1 + max((int(m[1]) for m in matches if m), default=-1)
    first = next((i for i, n in enumerate(names) if _at(chosen, layer) in f".{n}"), None)
    if first is None:
        raise ConfigError(
            f"num_shared_layers={layer} with pattern {chosen!r}: the model has {count} such "
            f"layers, so share 0 to {max(count - 1, 0)}"
        )
    return names[:first]


def _at(pattern: str, layer: int) -> str:
    return f".{pattern.format(layer=layer)}."
