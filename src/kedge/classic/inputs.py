"""Query and response as padded model inputs, and where the response is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad_id(tokenizer: Any) -> int:
    """What fills empty slots; masks never depend on it."""
    pad = tokenizer.pad_token_id
    return int(pad if pad is not None else tokenizer.eos_token_id or 0)


def model_inputs(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    *,
    pad: int,
    start: int | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Right-padded ids and masks int64, as a model's forward takes them.

    Args:
        queries: int64 [P_i] each.
        responses: int64 [R_i] each.
        pad: fills what is empty.
        start: an encoder-decoder's start token; None: decoder only.
        device: where they go.
    """
    if start is None:
        rows = [torch.cat([q, r.to(q)]) for q, r in zip(queries, responses, strict=True)]
        ids, mask = _padded(rows, pad, device)
        return {"input_ids": ids, "attention_mask": mask}
    ids, mask = _padded(queries, pad, device)
    decoder, decoder_mask = _padded([begun(r, start) for r in responses], pad, device)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": decoder,
        "decoder_attention_mask": decoder_mask,
    }


def collated(
    collator: Any,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    *,
    start: int | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """The same, padded by a collator of transformers' kind: rows as dictionaries -> batch."""

    def batch(rows: Sequence[Tensor]) -> dict[str, Tensor]:
        features = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in rows]
        return {k: v.to(device) for k, v in collator(features).items() if k != "labels"}

    if start is None:
        return batch([torch.cat([q, r.to(q)]) for q, r in zip(queries, responses, strict=True)])
    decoder = batch([begun(r, start) for r in responses])
    return batch(queries) | {
        "decoder_input_ids": decoder["input_ids"],
        "decoder_attention_mask": decoder["attention_mask"],
    }


def begun(response: Tensor, start: int | None) -> Tensor:
    """A response int64 [R] that begins with the decoder's start token, if there is one."""
    if start is None or (len(response) > 0 and int(response[0]) == start):
        return response
    return torch.cat([response.new_tensor([start]), response])


def _padded(rows: Sequence[Tensor], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = pad_sequence([r.long() for r in rows], batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(r) for r in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return ids.to(device), mask.to(device)


def response_mask(
    inputs: Mapping[str, Tensor],
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    masks: Sequence[Tensor] | None,
    *,
    start: int | None,
) -> Tensor:
    """Int64 [B, T]: 1 where the token at t + 1 of the (decoder's) inputs is a response's.

    Args:
        inputs: with an ``attention_mask``, padded on either side.
        queries: int64 [P_i] each.
        responses: int64 [R_i] each.
        masks: [R_i] each, of the tokens that train; None: all.
        start: see ``model_inputs``.
    """
    whole = inputs["attention_mask" if start is None else "decoder_attention_mask"]
    out = torch.zeros_like(whole[:, 1:])
    for i, (row, query, response) in enumerate(zip(whole, queries, responses, strict=True)):
        first = int(row.argmax())  # left padding
        skip = int(start is not None and len(response) > 0 and int(response[0]) == start)
        begin = first + (len(query) - 1 if start is None else 0)
        count = len(response) - skip
        kept = torch.ones(count) if masks is None else masks[i][skip:]
        out[i, begin : begin + count] = kept.to(out)
    return out
