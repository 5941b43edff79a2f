"""Freezes all but the top layers, or the attention, of a model."""

from __future__ import annotations

import torch
from torch import nn

from kedge.models.compatibility import text_config
from kedge.records.errors import ConfigError

_MIXERS = ("attn", "attention", "mixer", "mamba", "conv")  # names of sequence-mixing modules


def find_layers(backbone: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Name and list of the decoder layers of a backbone; None if it has no such list."""
    count = getattr(text_config(backbone), "num_hidden_layers", 0)
    named = backbone.named_modules()
    return next(
        ((n, m) for n, m in named if isinstance(m, nn.ModuleList) and len(m) == count), None
    )


def layer_number(name: str, layers: str) -> int | None:
    """The layer number of a backbone's weight; None outside of layers."""
    rest = name.removeprefix(f"{layers}.")
    return None if rest == name else int(rest.split(".")[0])


def find_final_norms(backbone: nn.Module, layers: str) -> tuple[str, ...]:
    """Name prefixes of the norms after the layers."""
    return tuple(
        f"{name}."
        for name, module in backbone.named_modules()
        if "norm" in type(module).__name__.lower()
        and "emb" not in name
        and layer_number(name, layers) is None
    )


def train_top_layers(backbone: nn.Module, count: int, *, what: str) -> None:
    """Freeze a backbone except for its last ``count`` layers and the norm after them.

    An output layer outside of the backbone trains as before, unless it is tied to the embedding.
    """
    prefix, layers = _require_layers(backbone, f"train_layers={count}", what)
    if count > len(layers):
        raise ConfigError(
            f"train_layers={count} must be at most {len(layers)}, the layers of {what}; leave it"
            " out to train the whole model"
        )
    final = find_final_norms(backbone, prefix)
    for name, p in backbone.named_parameters():
        layer = layer_number(name, prefix)
        if not (name.startswith(final) or (layer is not None and layer >= len(layers) - count)):
            p.requires_grad_(False)


def freeze_attention(backbone: nn.Module, *, what: str) -> None:
    """Freeze the token mixing in every layer of a backbone: full, linear or recurrent attention.

    The feed-forward parts (or experts), norms and embeddings train: the critic of SAO
    (arXiv:2607.07508).
    """
    _, layers = _require_layers(backbone, "freeze_value_attention", what)
    for number, layer in enumerate(layers):
        mixers = [
            module
            for name, module in layer.named_children()
            if "norm" not in name and any(mixer in name for mixer in _MIXERS)
        ]
        if not mixers:
            children = ", ".join(name for name, _ in layer.named_children())
            raise ConfigError(
                f"freeze_value_attention: layer {number} of {what}, a {type(backbone).__name__},"
                f" has no attention among its parts ({children}); leave the option out"
            )
        for module in mixers:
            module.requires_grad_(False)


def _require_layers(backbone: nn.Module, option: str, what: str) -> tuple[str, nn.ModuleList]:
    named_layers = find_layers(backbone)
    if named_layers is None:
        raise ConfigError(
            f"{option}: {what}, a {type(backbone).__name__}, must have a list of num_hidden_layers"
            " decoder layers; leave the option out, and set requires_grad of the weights that train"
        )
    return named_layers


def share_frozen_weights(model: nn.Module, source: nn.Module) -> None:
    """Replace frozen weights of a backbone by those of another one, where they are equal."""
    theirs = dict(source.named_parameters(remove_duplicate=False))
    for name, p in list(model.named_parameters(remove_duplicate=False)):
        twin = theirs.get(name)
        if twin is None or twin is p or p.requires_grad or twin.requires_grad:
            continue
        alike = type(p) is type(twin) and (p.dtype, p.device) == (twin.dtype, twin.device)
        if alike and not p.is_meta and torch.equal(p, twin):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, twin)
