"""Sampling responses to one query or a list of queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.backends.hf.end_tokens import listed
from kedge.classic.inputs import pad_id, padded
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
        if isinstance(query_tensor, Tensor) and query_tensor.dim() != 1:
            raise DataError(
                "query_tensor must be one query of shape (length,) or a list of them, got shape "
                f"{tuple(query_tensor.shape)}"
            )

        def sample(model: Any) -> Any:
            if isinstance(query_tensor, list):
                return self._generate_batched(
                    model,
                    query_tensor,
                    length_sampler,
                    batch_size,
                    return_prompt,
                    **generation_kwargs,
                )
            model.eval()
            ids, mask = query_tensor[None], torch.ones_like(query_tensor)[None]
            output = _run(model, ids, mask, length_sampler, generation_kwargs)
            skip = 0 if return_prompt or self.is_encoder_decoder else len(query_tensor)
            return output[:, skip:]

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
        """``generate`` for a list of queries int64 [P_i], from one model.

        Queries are padded on the left to a multiple of ``pad_to_multiple_of``; with
        ``remove_padding`` a response is cut after its first end token.
        """
        model.eval()
        options = {"pad_token_id": pad_id(self.tokenizer), **generation_kwargs}
        model_config = getattr(getattr(model, "pretrained_model", model), "generation_config", None)
        stops = options.get("eos_token_id", getattr(model_config, "eos_token_id", None))
        device = next(model.parameters()).device
        ends = torch.tensor([*listed(self.tokenizer.eos_token_id), *listed(stops)], device=device)
        multiple, responses = pad_to_multiple_of or 1, []
        for i in range(0, len(query_tensors), batch_size):
            queries = query_tensors[i : i + batch_size]
            ids, mask = _left_padded(queries, pad=options["pad_token_id"] or 0, multiple=multiple)
            rows = _run(model, ids, mask, length_sampler, options)
            begin = 1 if self.is_encoder_decoder else ids.shape[1]  # a start token may be the EOS
            for query, row in zip(queries, rows, strict=True):
                new = row[begin:]
                ended = torch.isin(new, ends.long()).nonzero()[:1, 0].tolist()
                if ended and remove_padding:
                    new = new[: ended[0] + 1]
                if self.is_encoder_decoder:
                    new = torch.cat([row[:begin], new])
                elif return_prompt:
                    new = torch.cat([query.to(new), new])
                responses.append(new)
        return responses


@torch.no_grad()
def _run(
    model: Any, ids: Tensor, mask: Tensor, length: LengthFn | None, options: dict[str, Any]
) -> Tensor:
    """``generate`` with options normalized for transformers 5: int top_k, min_length >= 0."""
    options = dict(options)
    if isinstance(options.get("top_k"), float):
        options["top_k"] = int(options["top_k"])
    if (options.get("min_length") or 0) < 0:
        options["min_length"] = 0
    if length is not None:
        options["max_new_tokens"] = int(length())
    device = next(model.parameters()).device
    rows: Tensor = model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), **options
    )
    return rows


def _left_padded(rows: Sequence[Tensor], *, pad: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Ids and mask int64 [b, P]; P is a multiple of ``multiple``."""
    wrong = next((i for i, x in enumerate(rows) if x.dim() != 1 or not len(x)), None)
    if wrong is not None:
        raise DataError(
            f"query_tensor[{wrong}] must have shape (length,) with at least one token, got shape "
            f"{tuple(rows[wrong].shape)}"
        )
    ids, mask = padded(rows, pad, left=True), padded([torch.ones_like(x) for x in rows], left=True)
    extra = -ids.shape[1] % multiple
    return F.pad(ids, (extra, 0), value=pad), F.pad(mask, (extra, 0))
