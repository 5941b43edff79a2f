"""Functions of ``trl.trainer.utils`` that subclasses of TRL 0.12 to 0.21 import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kedge.records.errors import ConfigError


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set the rate of every dropout layer to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def exact_div(a: int, b: int, custom_error_message: str = "") -> int:
    """``a / b`` if ``b`` divides ``a``, else a ValueError."""
    if a % b:
        raise ValueError(f"{custom_error_message}, {a} is not a multiple of {b}")
    return a // b


def first_true_indices(bools: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """Index of the first True of the last dimension; its size where there is none."""
    size = bools.size(-1)
    index = torch.arange(size, dtype=dtype, device=bools.device)
    return torch.where(bools, index, size).amin(-1)


def truncate_response(stop_token_id: int, pad_token_id: int, responses: Tensor) -> Tensor:
    """Responses [B, R] with padding after the first stop token."""
    ends = first_true_indices(responses == stop_token_id).unsqueeze(-1)
    after = torch.arange(responses.shape[1], device=responses.device) > ends
    return responses.masked_fill(after, pad_token_id)


def forward(model: nn.Module, query_responses: Tensor, pad_token_id: int) -> Any:
    """The model's output with hidden states, for padded rows int64 [B, L]."""
    return model(**_inputs(query_responses, pad_token_id))


def get_reward(
    model: Any, query_responses: Tensor, pad_token_id: int, context_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of padded rows int64 [B, L] whose responses begin at ``context_length``.

    Returns:
        scores of every token [B, L, 1], those of the last tokens [B], and their positions [B].
    """
    backbone = getattr(model, model.base_model_prefix)
    hidden = backbone(**_inputs(query_responses, pad_token_id), use_cache=False).hidden_states[-1]
    scores = model.score(hidden)
    padding = query_responses[:, context_length:] == pad_token_id
    last = first_true_indices(padding) - 1 + context_length
    rows = torch.arange(len(scores), device=scores.device)
    return scores, scores[rows, last].squeeze(-1), last


def _inputs(ids: Tensor, pad_token_id: int) -> dict[str, Any]:
    mask = ids != pad_token_id
    options = {"return_dict": True, "output_hidden_states": True}
    positions = mask.cumsum(1) - mask.long()
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions} | options


def generate(
    lm_backbone: Any, queries: Tensor, pad_token_id: int, generation_config: Any
) -> tuple[Tensor, Tensor]:
    """Queries [B, P] with sampled responses [B, P + R], and the logits [B, R, V]."""
    mask = queries != pad_token_id
    output = lm_backbone.generate(
        input_ids=queries * mask,
        attention_mask=mask,
        generation_config=generation_config,
        return_dict_in_generate=True,
        output_scores=True,
    )
    responses = output.sequences[:, queries.shape[1] :]
    return torch.cat([queries, responses], 1), torch.stack(output.scores, 1)


@torch.no_grad()
def batch_generation(
    model: Any,
    queries: Tensor,
    local_rollout_forward_batch_size: int,
    pad_token_id: int,
    generation_config: Any,
) -> tuple[Tensor, Tensor]:
    """Call ``generate`` for a few rows at a time; shorter responses are padded on the right."""
    parts = [
        generate(model, rows, pad_token_id, generation_config)
        for rows in queries.split(local_rollout_forward_batch_size)
    ]
    ids, logits = ([row for part in column for row in part] for column in zip(*parts, strict=True))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, True, pad_token_id), pad(logits, True, 0)


def print_rich_table(df: Any) -> None:
    """Print a data frame."""
    print(df.to_string(index=False))


def prepare_deepspeed(*_: Any, **__: Any) -> Any:
    """Refused: Kedge shards frozen models itself."""
    raise ConfigError(
        "prepare_deepspeed has no counterpart: the trainer shards reference and reward models"
        " itself; pass the plain model to the trainer"
    )
