"""Sampling responses to one query or a list of queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.backends.hf.end_tokens import listed
from kedge.classic.inputs import pad_id
from kedge.classic.properties import Views
from kedge.errors import DataError

LengthFn = Callable[[], int]


class Generation(Views):
    """Sampling responses with transformers' ``generate``."""

    tokenizer: Any

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: LengthFn | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample responses with transformers' ``generate``.

        Args:
            query_tensor: int64 [P], or a list of them.
            length_sampler: draws ``max_new_tokens``, once per ``batch_size`` queries.
            batch_size: queries of a list to sample together.
            return_prompt: whether to return the query before its response; an encoder-decoder
                returns its start token instead.
            generate_ref_response: also sample from the reference.
            **generation_kwargs: of ``generate``.

        Returns:
            Int64 [1, n] for one query; for a list, a list of int64 [n_i], each up to its first end
            token.  With ``generate_ref_response`` a pair, the reference's second.
        """

        def sample(model: Any) -> Any:
            if isinstance(query_tensor, list):
                return self._generate_batched(
                    model,
                    query_tensor,
                    length_sampler=length_sampler,
                    batch_size=batch_size,
                    return_prompt=return_prompt,
                    **generation_kwargs,
                )
            model.eval()
            return generate_one(
                model,
                query_tensor,
                length=length_sampler,
                prompt=return_prompt,
                options=generation_kwargs,
            )

        response = sample(self.model)
        if not generate_ref_response:
            return response
        if self.ref_model is not None:
            return response, sample(self.ref_model)
        with self.optional_peft_ctx():
            return response, sample(self.model)

    def _generate_batched(
        self,
        model: Any,
        query_tensors: list[Tensor],
        length_sampler: LengthFn | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        pad_to_multiple_of: int | None = None,
        remove_padding: bool = True,
        **generation_kwargs: Any,
    ) -> list[Tensor]:
        """``generate`` for a list of queries, from one model.

        Args:
            model: policy or reference.
            query_tensors: int64 [P_i] each.
            length_sampler: as in ``generate``.
            batch_size: as in ``generate``.
            return_prompt: as in ``generate``.
            pad_to_multiple_of: queries are padded on the left to a multiple of it.
            remove_padding: whether a response is cut after its first end token.
            **generation_kwargs: of transformers' ``generate``.
        """
        model.eval()
        return generate_many(
            model,
            query_tensors,
            length=length_sampler,
            rows=batch_size,
            prompt=return_prompt,
            eos=self.tokenizer.eos_token_id,
            options={"pad_token_id": pad_id(self.tokenizer), **generation_kwargs},
            multiple=pad_to_multiple_of or 1,
            cut=remove_padding,
        )


@torch.no_grad()
def generate_one(
    model: Any, query: Tensor, *, length: LengthFn | None, prompt: bool, options: dict[str, Any]
) -> Tensor:
    """One response int64 [1, n] to a query int64 [P]; with ``prompt`` the query comes first."""
    if query.dim() != 1:
        raise DataError(
            "query_tensor must be one query of shape (length,) or a list of them, got shape "
            f"{tuple(query.shape)}"
        )
    ids = query[None].to(_device(model))
    output: Tensor = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **_normalize_options(options, length)
    )
    return output if prompt or _is_encoder_decoder(model) else output[:, len(query) :]


@torch.no_grad()
def generate_many(
    model: Any,
    queries: Sequence[Tensor],
    *,
    length: LengthFn | None,
    rows: int,
    prompt: bool,
    eos: int | None,
    options: dict[str, Any],
    multiple: int = 1,
    cut: bool = True,
) -> list[Tensor]:
    """One response int64 [n] per query int64 [P_i], without padding, up to its first end token.

    End tokens are ``eos`` and the stop tokens of ``generate``: its ``eos_token_id``, else those
    of the model's generation_config.

    Args:
        model: the model to sample from.
        queries: any lengths.
        length: draws max_new_tokens, once per ``rows`` queries.
        rows: queries to sample together.
        prompt: whether to return each query before its response (not for an encoder-decoder).
        eos: the tokenizer's EOS token. End tokens are kept; those inside a query are ignored.
        options: of transformers' ``generate``.
        multiple: pad queries to a multiple of this length.
        cut: whether to truncate a response after its first end token.
    """
    encodes = _is_encoder_decoder(model)
    pad = options.get("pad_token_id")
    generation_config = getattr(
        getattr(model, "pretrained_model", model), "generation_config", None
    )
    stops = options.get("eos_token_id", getattr(generation_config, "eos_token_id", None))
    ends = torch.tensor([*listed(eos), *listed(stops)], dtype=torch.long, device=_device(model))
    responses: list[Tensor] = []
    for batch in _chunks(list(queries), rows):
        ids, mask = _left_padded(batch, pad=eos or 0 if pad is None else pad, multiple=multiple)
        device = _device(model)
        out = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            **_normalize_options(options, length),
        )
        begin = 1 if encodes else ids.shape[1]  # a decoder's start token may be the end token
        for query, row in zip(batch, out, strict=True):
            new = row[begin:]
            ended = torch.isin(new, ends).nonzero()[:1, 0].tolist() if cut else []
            new = new[: ended[0] + 1] if ended else new
            if encodes:
                responses.append(torch.cat([row[:begin], new]))
            else:
                responses.append(torch.cat([query.to(new), new]) if prompt else new)
    return responses


def _chunks(queries: list[Tensor], rows: int) -> Iterator[list[Tensor]]:
    return (queries[i : i + rows] for i in range(0, len(queries), rows))


def _left_padded(rows: Sequence[Tensor], *, pad: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Ids and mask int64 [b, P]."""
    wrong = next((i for i, x in enumerate(rows) if x.dim() != 1 or not len(x)), None)
    if wrong is not None:
        raise DataError(
            f"query_tensor[{wrong}] must have shape (length,) with at least one token, got shape "
            f"{tuple(rows[wrong].shape)}"
        )
    width = -(-max(map(len, rows)) // multiple) * multiple
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = 1
    return ids, mask


def _normalize_options(options: dict[str, Any], length: LengthFn | None) -> dict[str, Any]:
    """Options normalized for transformers 5: int top_k, min_length of at least 0."""
    normalized = dict(options)
    if isinstance(normalized.get("top_k"), float):
        normalized["top_k"] = int(normalized["top_k"])
    if (normalized.get("min_length") or 0) < 0:
        normalized["min_length"] = 0
    if length is not None:
        normalized["max_new_tokens"] = int(length())
    return normalized


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device
