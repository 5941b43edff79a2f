"""Models that give one number per token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from kedge.backends.hf.load import check_folder, load_whole
from kedge.backends.hf.model import CausalParts, get_backbone, silence_mask_warning, trunk
from kedge.backends.rewards.heads import SHIFT, in_full
from kedge.errors import ConfigError

HEAD_FILE = "value_head.safetensors"
_HEADS = ("score", "classifier", "v_head")


class ScalarHead(nn.Module):
    """A linear map from hidden states to one number, in float32.

    Args:
        size: H.
        init: "zero", or "normal" with standard deviation 1/sqrt(H + 1) (arXiv:2403.17031).
        bias: whether it has one, 0 at first.
    """

    def __init__(self, size: int, *, init: Literal["zero", "normal"] = "zero", bias: bool = True):
        super().__init__()
        self.summary = nn.Linear(size, 1, bias=bias, dtype=torch.float32)
        nn.init.zeros_(self.summary.weight)
        if init == "normal":
            nn.init.normal_(self.summary.weight, std=(size + 1) ** -0.5)
        if bias:
            nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Float [..., H] -> float32 [..., 1]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.summary(hidden.to(self.summary.weight.dtype))


class ScalarModel(nn.Module):
    """A trunk and a head that gives one number per state.

    A reward model whose scores are shifted (``kedge reward``) is a value model with the same shift,
    so that it starts from what its scores are.

    Args:
        model: the whole model, what is saved.
        backbone: the part of it that makes hidden states.
        head: the part that makes numbers, [..., H] -> [..., 1].
    """

    def __init__(self, model: nn.Module, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._backbone, self._head = [backbone], [head]  # lists: their weights are model's
        self.shift = float(getattr(getattr(model, "config", None), SHIFT, 0.0))

    @property
    def backbone(self) -> nn.Module:
        """The trunk."""
        return self._backbone[0]

    @property
    def head(self) -> nn.Module:
        """The head."""
        return self._head[0]

    def compile_trunk(self, **how: Any) -> None:
        """Run the trunk through torch.compile from now on."""
        compiled: Any = torch.compile(self.backbone, **how)
        self._backbone = [compiled]

    def forward(self, ids: Tensor, states: Tensor) -> Tensor:
        """Float32 [n]: the value of each of the flat ``states`` of right-padded ``ids`` [b, L]."""
        hidden = trunk(self.backbone, ids).flatten(0, 1)[states]
        return in_full(self.head, hidden).float().sum(1) + self.shift  # one column


def scalar_model(model: nn.Module) -> ScalarModel:
    """One number per token from a sequence-classification model with one label.

    Raises:
        ConfigError: no trunk, no head for single states, several labels, or a trunk that looks
            ahead (a value must not see the tokens after it).
    """
    name = type(model).__name__
    if isinstance(model, ScalarModel):
        return model
    backbone = get_backbone(model)
    head = next((getattr(model, h) for h in _HEADS if hasattr(model, h)), None)
    if backbone is None or head is None:
        raise ConfigError(
            f"{name} cannot be a value model: it needs a trunk and a head named "
            f"{' or '.join(_HEADS[:2])}; pass an AutoModelForSequenceClassification"
        )
    silence_mask_warning(backbone)
    found = ScalarModel(model, backbone, head)
    _verify(found, name)
    return found


@torch.no_grad()
def _verify(value: ScalarModel, name: str) -> None:
    was_training = value.training
    device = next(value.parameters()).device
    ids = torch.arange(8, device=device)[None]
    value.eval()
    try:
        hidden = trunk(value.backbone, ids)[0]
        prefix = trunk(value.backbone, ids[:, :4])[0]
        out = value.head(hidden)
    finally:
        value.train(was_training)
    if out.shape != (8, 1):
        raise ConfigError(
            f"{name} gives {out.shape[-1]} numbers per token; a value model has num_labels=1"
        )
    if not torch.allclose(hidden[:4], prefix, rtol=1e-2, atol=1e-3):
        raise ConfigError(f"{name} cannot be a value model: it reads the tokens that come after")


def load_value(
    source: str | nn.Module, *, dtype: torch.dtype = torch.float32, **options: Any
) -> ScalarModel:
    """A value model from a sequence-classification model, its hub name, or its folder.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if isinstance(source, nn.Module):
        return scalar_model(source)
    check_folder(source, "the value model")
    given = {"use_safetensors": True, "trust_remote_code": False, "num_labels": 1}
    given |= {k: v for k, v in options.items() if v is not None}
    try:
        model = load_whole(
            AutoModelForSequenceClassification,
            f"the value model {source!r}",
            source,
            new_head=True,
            dtype=dtype,
            **given,
        )
    except ConfigError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise ConfigError(f"the value model {source!r} cannot be loaded: {error}") from error
    return scalar_model(model)


def value_from_trunk(parts: CausalParts, *, init: Literal["zero", "normal"] = "zero") -> ScalarHead:
    """A value head that reads the policy's own trunk."""
    weight = parts.head().weight
    return ScalarHead(weight.shape[1], init=init).to(weight.device)


def save_value(
    value: ScalarModel | ScalarHead, folder: str | Path, state: dict[str, Tensor] | None = None
) -> None:
    """Write a value model as a transformers folder, a value head as ``value_head.safetensors``.

    Args:
        value: what to write.
        folder: made if it is missing.
        state: a value model's tensors, where it does not hold them whole itself.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(value, ScalarModel):
        model: Any = value.model
        model.save_pretrained(folder, state_dict=state)
        return
    tensors = {name: x.detach().contiguous() for name, x in value.state_dict().items()}
    save_file(tensors, folder / HEAD_FILE, metadata={"format": "pt"})


def load_value_head(folder: str | Path) -> ScalarHead:
    """A value head that ``save_value`` wrote.

    Raises:
        ConfigError: the folder has none.
    """
    file = Path(folder) / HEAD_FILE
    if not file.is_file():
        raise ConfigError(f"{folder} has no {HEAD_FILE}; it was not written by save_value")
    tensors = load_file(file)
    head = ScalarHead(tensors["summary.weight"].shape[1], bias="summary.bias" in tensors)
    head.load_state_dict(tensors)
    return head
