"""Computes the common start of the two answers of a preference once.

On a CPU the answers run joined end to end without padding (``backends/hf/joined_rows.py``), and the
feed-forward part of the last layer only for the last token of each answer, which is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import BaseModelOutputWithPast

from kedge.backends.hf.joined_rows import JoinedAttention, joins_rows
from kedge.backends.hf.last_layer import LastLayers, expect_reads
from kedge.backends.hf.model import dropout_rates
from kedge.backends.hf.packing import Packed, join
from kedge.backends.hf.trunk import read_trunk

_NO_TOKENS = torch.empty(0, dtype=torch.long)


class JoinedPairs:
    """Runs the trunk of a sequence-classification model over joined pairs.

    A model is left as it is that is not on a CPU, has dropout, or whose scores of a few tokens
    would differ.

    Args:
        model: one with a ``score`` layer, or PEFT's around it; on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        base: Any = getattr(model, "get_base_model", lambda: model)()
        backbone = getattr(base, getattr(base, "base_model_prefix", None) or "-", None)
        self._backbone: Any = backbone
        self._usual: Callable[..., Any] = getattr(backbone, "forward", base.forward)
        self._last = LastLayers([])
        self._config: Any = None
        if isinstance(getattr(base, "score", None), nn.Module) and joins_rows(backbone):
            self._config = base.config.get_text_config()
        free = self._pad is not None and "forward" not in vars(backbone)
        # Checked by the rates: dropout has no effect yet if the model is still in evaluation mode.
        self.acts = free and not any(dropout_rates(model)) and self._agrees(base)
        if self.acts:
            self._last = LastLayers([SimpleNamespace(backbone=backbone)])

    @property
    def _pad(self) -> int | None:  # may differ from batch to batch
        pad: int | None = getattr(self._config, "pad_token_id", None)
        return pad

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context of forward and backward passes; the trunk gives the scored states alone."""
        if not self.acts:
            yield
            return
        with self._replaced(), JoinedAttention([self._backbone]).active(), self._last.active():
            yield

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        self._backbone.__dict__["forward"] = self._forward
        try:
            yield
        finally:
            del self._backbone.__dict__["forward"]

    def _forward(self, input_ids: Tensor | None = None, *args: Any, **options: Any) -> Any:
        """States [2 b, L, H] of chosen and rejected rows, 0 but at the last token of each."""
        if "joined_groups" in options:  # called by ``read_trunk``
            return self._usual(input_ids, *args, **options)
        given = {name for name, value in options.items() if value is not None}
        known = not args and given <= {"attention_mask", "use_cache", "return_dict"}
        if input_ids is None or len(input_ids) % 2 or not known:
            everything = Packed(ids=_NO_TOKENS, lengths=_NO_TOKENS, prompt_lengths=_NO_TOKENS)
            expect_reads(self._backbone, everything)
            return self._usual(input_ids, *args, **options)
        # transformers scores the last token that is not padding.
        places = torch.arange(input_ids.shape[1])
        last = ((input_ids != self._pad) * places).argmax(1)
        packed = join_pairs(input_ids, last + 1)
        states = read_trunk(self._backbone, packed)[0, packed.ends]
        index = torch.arange(len(last)) * input_ids.shape[1] + last
        shape = torch.Size((*input_ids.shape, states.shape[-1]))
        padded = states.new_zeros(shape[0] * shape[1], shape[2]).index_copy(0, index, states)
        return BaseModelOutputWithPast(last_hidden_state=padded.view(shape))

    @torch.no_grad()
    def _agrees(self, model: Any) -> bool:
        tokens = [i for i in range(6) if i != self._pad]
        start = tokens[:1] * 18 + tokens[1:2]
        rows = [[*start, *tokens[:3]], [*tokens[:2]], [*start, tokens[1]], [*tokens[1:3]]]
        padding = float(self._pad or 0)
        ids = pad_sequence([*map(torch.tensor, rows)], batch_first=True, padding_value=padding)
        inputs = {"input_ids": ids, "attention_mask": torch.ne(ids, padding).long()}
        try:
            with torch.random.fork_rng(devices=[]):
                expected = model(**inputs, use_cache=False).logits
                with self._replaced():
                    found = model(**inputs, use_cache=False).logits
        except (TypeError, ValueError, RuntimeError, IndexError):  # such as a vocabulary of three
            return False
        slack = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 2e-2
        gap = (found - expected).abs().max()
        return bool(gap <= slack * (1 + expected.abs().max()))


def join_pairs(ids: Tensor, lengths: Tensor) -> Packed:
    """Rows joined end to end, of which the rows i and i + b share the tokens they start with.

    Args:
        ids: int64 [2 b, L], right-padded.
        lengths: int64 [2 b].
    """
    half = len(ids) // 2
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    same = torch.eq(ids[:half], ids[half:]) & mask[:half] & mask[half:]
    starts = same.long().cumprod(1).sum(1).repeat(2)
    packed = join(ids, mask, starts, lengths, [*range(half)] * 2)
    return replace(packed, read=packed.ends.unique())
