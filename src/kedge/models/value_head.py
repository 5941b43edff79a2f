"""Value models and value heads: one number per token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from kedge.models.backbone import read_backbone
from kedge.models.load import check_source, load_whole
from kedge.models.model import (
    CausalParts,
    eval_mode,
    get_backbone,
    look_ahead,
    rounds_activations,
    silence_mask_warning,
)
from kedge.models.packing import JoinedInput
from kedge.models.score_head import SHIFT, float32_head
from kedge.records.errors import ConfigError

HEAD_FILE = "value_head.safetensors"
_HEADS = ("score", "classifier", "v_head")


class ScalarHead(nn.Module):
    """A linear map from hidden states of ``size`` to one number, in float32; 0 at first."""

    def __init__(self, size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.summary = nn.Linear(size, 1, bias=bias, dtype=torch.float32)
        for p in self.summary.parameters():
            nn.init.zeros_(p)

    def forward(self, hidden: Tensor) -> Tensor:
        """Float [..., H] -> float32 [..., 1]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.summary(hidden.to(self.summary.weight.dtype))

    def save(self, folder: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """Write ``value_head.safetensors`` to a folder, which is created if it is missing."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors = {name: x.detach().contiguous() for name, x in self.state_dict().items()}
        save_file(tensors, Path(folder) / HEAD_FILE, metadata={"format": "pt"})


class ScalarModel(nn.Module):
    """A model as backbone and head, [..., H] -> [..., 1], that returns one number per state.

    A value model from a reward model with shifted scores (``kedge reward``) has the same shift.
    """

    def __init__(self, model: nn.Module, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._backbone, self._head = [backbone], [head]  # lists: these belong to the model
        self.shift = float(getattr(getattr(model, "config", None), SHIFT, 0.0))

    @property
    def backbone(self) -> nn.Module:
        """The backbone."""
        return self._backbone[0]

    @property
    def head(self) -> nn.Module:
        """The head."""
        return self._head[0]

    def compile_backbone(self, **how: Any) -> None:
        """Run the backbone through torch.compile from now on."""
        compiled: Any = torch.compile(self.backbone, **how)
        self._backbone = [compiled]

    def forward(self, packed: JoinedInput, states: Tensor) -> Tensor:
        """Float32 [n]: the value of each of the flat ``states`` of packed rows."""
        hidden = read_backbone(self.backbone, packed).flatten(0, 1).index_select(0, states)
        return float32_head(self.head, hidden).float().sum(1) + self.shift  # a single column

    def save(self, folder: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """Write a transformers folder; ``state`` has the full tensors of a sharded model."""
        model: Any = self.model
        model.save_pretrained(folder, state_dict=state)


def scalar_model(model: nn.Module) -> ScalarModel:
    """Turn a causal sequence-classification model with one label into a value model.

    Raises:
        ConfigError: the model has no backbone or head for single states, several labels, or is
            not causal.
    """
    name = type(model).__name__
    if isinstance(model, ScalarModel):
        return model
    backbone = get_backbone(model)
    head = next((getattr(model, h) for h in _HEADS if hasattr(model, h)), None)
    if not isinstance(backbone, nn.Module) or not isinstance(head, nn.Module):
        raise ConfigError(
            f"{name} cannot be a value model: it needs a backbone and a head named "
            f"{' or '.join(_HEADS[:2])}; pass an AutoModelForSequenceClassification"
        )
    silence_mask_warning(backbone)
    value = ScalarModel(model, backbone, head)
    _verify(value, name)
    return value


@torch.no_grad()
def _verify(value: ScalarModel, name: str) -> None:
    device = next(value.parameters()).device
    if device.type == "meta":  # rank 0 holds the weights
        return
    ids = torch.arange(8, device=device)[None]
    with eval_mode(value):
        hidden, ahead = look_ahead(value.backbone, ids)
        out = value.head(hidden)
    if out.shape != (8, 1):
        raise ConfigError(
            f"{name} gives {out.shape[-1]} numbers per token; a value model has num_labels=1"
        )
    slack = 5e-2 if rounds_activations(value.model) else 1e-3
    if not ahead <= slack * float(hidden.abs().max() + 1):
        raise ConfigError(
            f"{name} cannot be a value model: it must be causal, but sees later tokens; set"
            ' value_source="policy", or pass another value_model'
        )


def load_value(source: str | nn.Module) -> ScalarModel:
    """A value model from a sequence-classification model, its hub name, or its folder."""
    if isinstance(source, nn.Module):
        return scalar_model(source)
    check_source(source, "the value model")
    what, kind = f"the value model {source!r}", AutoModelForSequenceClassification
    arguments: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
    arguments |= {"num_labels": 1, "dtype": torch.float32}
    return scalar_model(load_whole(kind, what, source, new_head=True, **arguments))


def copy_as_value(policy: nn.Module, parts: CausalParts) -> ScalarModel:
    """A value model with a copy of the policy's backbone and a new head, which gives 0 at first."""
    config: Any = copy.deepcopy(policy.config)
    config.num_labels = 1
    weights = parts.backbone.state_dict()
    sample = next(iter(weights.values()))
    try:
        with sample.device:
            model: Any = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f'value_source="copy": transformers has no {type(policy).__name__} with a score head;'
            ' set value_source="policy", or pass value_model'
        ) from error
    model.to(torch.float32)
    backbone = get_backbone(model)
    assert backbone is not None
    backbone.load_state_dict(weights)
    head = next(getattr(model, name) for name in _HEADS if hasattr(model, name))
    nn.init.zeros_(head.weight)
    return scalar_model(model)


def build_value_head(parts: CausalParts) -> ScalarHead:
    """A value head that reads the policy's own backbone."""
    weight = parts.head().weight
    return ScalarHead(weight.shape[1]).to(weight.device)


def load_value_head(folder: str, parts: CausalParts) -> ScalarHead:
    """Load the value head that ``ScalarHead.save`` wrote, onto the policy's backbone."""
    head, file = build_value_head(parts), Path(folder) / HEAD_FILE
    try:
        head.load_state_dict(load_file(file))
    except (RuntimeError, SafetensorError) as error:
        raise ConfigError(f"value_model={folder!r}: {file} cannot be loaded: {error}") from error
    return head
