"""Reads a reward model's logits at the position that scores the whole sequence."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import RewardError
from kedge.models.backbone import pack_sequences, run_packed, supports_packing

SHIFT = "kedge_score_shift"  # config key; added to every score (pretrain/reward.py)
SHIFT_FILE = f"{SHIFT}.json"  # in an adapter's folder, which has no model configuration
Head = Callable[[Tensor, Tensor], Tensor]  # ids [b, L], lengths [b] -> logits [b, labels]


def find_head(model: nn.Module) -> Head:
    """A function that scores right-padded rows with ``model``.

    A model with a backbone (named by ``base_model_prefix``) and a ``score`` layer is scored at the
    last real token, found by length.  If they are functions of a module without ``forward``,
    they are called as TRL does.  Any other model is called with an attention mask and returns
    logits (encoders with a ``classifier``), one number per row, or one per token.
    """
    backbone = getattr(model, getattr(model, "base_model_prefix", None) or "-", None)
    score = getattr(model, "score", None)
    if isinstance(backbone, nn.Module) and isinstance(score, nn.Module):
        return _last_token_head(backbone, score)
    if callable(backbone) and callable(score) and type(model).forward is nn.Module.forward:
        return _function_head(backbone, score)
    return _model_head(model)


def save_adapter_shift(folder: str | Path, shift: float) -> None:
    """Write the shift of scores next to an adapter, for ``adapter_shift``; 0 writes nothing."""
    file = Path(folder) / SHIFT_FILE
    if shift:
        file.write_text(json.dumps({SHIFT: shift}) + "\n")
    else:
        file.unlink(missing_ok=True)


def adapter_shift(source: str) -> float:
    """The shift of an adapter's scores, 0 if it has none.

    Args:
        source: folder or hub name of the adapter.
    """
    from transformers.utils.hub import cached_file

    file = cached_file(source, SHIFT_FILE, _raise_exceptions_for_missing_entries=False)
    return 0.0 if file is None else float(json.loads(Path(file).read_text())[SHIFT])


def float32_head(head: nn.Module, hidden: Tensor) -> Tensor:
    """Apply a head to hidden states in float32, regardless of autocast.

    In bfloat16, values between 8 and 16 are 1/16 apart: differences between neighboring states
    and between responses would be lost.
    """
    dtype = next((p.dtype for p in head.parameters()), hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        if type(head) is nn.Linear and dtype in (torch.bfloat16, torch.float16):
            bias = None if head.bias is None else head.bias.float()
            return nn.functional.linear(hidden.float(), head.weight.float(), bias)
        output: Tensor = head(hidden.to(dtype))
    return output


def _last_token_head(backbone: nn.Module, score: nn.Module) -> Head:
    """A score layer on the hidden state of the last real token."""
    wanted = {"use_cache": False, "return_dict": True}
    if not hasattr(backbone, "config"):
        wanted["output_hidden_states"] = True
    options = _accepted(backbone, wanted)
    # evaluated at the first call, when the model is on its device
    joins = functools.cache(lambda: supports_packing(backbone))

    def head(ids: Tensor, lengths: Tensor) -> Tensor:
        if joins():
            groups = [(n,) for n in lengths.tolist()]
            joined = run_packed(backbone, pack_sequences(ids, lengths), groups)
            return float32_head(score, joined[0, lengths.cumsum(0) - 1])
        out = backbone(input_ids=ids, attention_mask=_mask(ids, lengths), **options)
        hidden = getattr(out, "last_hidden_state", None)
        if hidden is None and getattr(out, "hidden_states", None) is not None:
            hidden = out.hidden_states[-1]
        if hidden is None:
            hidden = out[0] if isinstance(out, tuple) else out
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise RewardError(
                f"the reward model's backbone returned {_shape(hidden)}; expected last_hidden_state"
                " of shape [rows, tokens, width]"
            )
        last = hidden[torch.arange(len(ids), device=ids.device), lengths - 1]
        return float32_head(score, last[:, None])[:, 0]

    return head


def _function_head(backbone: Callable[..., Any], score: Callable[[Any], Tensor]) -> Head:
    """Call a reward module as TRL does: its backbone, then ``score`` on the last hidden states."""

    def head(ids: Tensor, lengths: Tensor) -> Tensor:
        mask = _mask(ids, lengths)
        out = backbone(
            input_ids=ids * mask,
            attention_mask=mask,
            position_ids=mask.cumsum(1) - mask,
            return_dict=True,
            output_hidden_states=True,
            use_cache=False,
        )
        scores = score(out.hidden_states[-1])
        if scores.shape[:2] != ids.shape:
            raise RewardError(
                f"the reward model's score returned {_shape(scores)}; expected [rows, tokens, 1] of"
                f" {len(ids)} rows and {ids.shape[1]} tokens"
            )
        return scores.reshape(*ids.shape, -1)[torch.arange(len(ids)), lengths - 1]

    return head


def _model_head(model: nn.Module) -> Head:
    """The logits of a whole model: per row, or those of the last real token."""
    masked = bool(_accepted(model, {"attention_mask": True}))
    named = bool(_accepted(model, {"input_ids": True}))

    def head(ids: Tensor, lengths: Tensor) -> Tensor:
        options: dict[str, Any] = {"attention_mask": _mask(ids, lengths)} if masked else {}
        out = model(input_ids=ids, **options) if named else model(ids, **options)
        logits = getattr(out, "logits", out)
        logits = logits[0] if isinstance(logits, tuple) else logits
        if not isinstance(logits, Tensor) or logits.shape[:1] != ids.shape[:1]:
            raise RewardError(
                f"reward model {type(model).__name__} returned {_shape(logits)} for {len(ids)}"
                " rows; expected logits [rows, labels], [rows] or [rows, tokens, 1]"
            )
        if logits.dim() == 1:
            return logits[:, None]
        if logits.dim() == 3:
            return logits[torch.arange(len(ids), device=ids.device), lengths - 1]
        return logits

    return head


def _mask(ids: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()


def _shape(x: object) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _accepted(module: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(module.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return dict(options)
    return {name: value for name, value in options.items() if name in known}
