"""Sampling distribution of responses and where they end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kedge.errors import ConfigError
from kedge.types import Sampling

logger = logging.getLogger(__name__)
_NEED_END = (
    *("missing_eos_penalty", "non_eos_penalty"),
    *("mask_truncated_completions", "overlong_buffer"),
)


def build_sampling(config: Any, eos_token_ids: Sequence[int]) -> Sampling:
    """Sampling distribution of responses and where they end."""
    check_end(config, has_eos=bool(eos_token_ids))
    stops = [*eos_token_ids] if config.stop_token == "eos" else []
    stops += [] if config.stop_token_id is None else [config.stop_token_id]
    stops += config.stop_token_ids or []
    if config.stop_token == "eos" and not (stops or config.stop_strings):
        logger.warning(
            "neither the tokenizer nor the model's generation_config has an EOS token: every"
            " response has response_length=%d tokens",
            config.response_length,
        )
    cut = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if given := [f"{n}={x}" for n, off in cut.items() if (x := getattr(config, n)) != off]:
        logger.warning(
            "%s: training normalizes over the tokens that could be sampled, which are recorded",
            ", ".join(given),
        )
    return Sampling(
        max_new_tokens=config.response_length,
        min_new_tokens=config.min_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        stop_ids=tuple(dict.fromkeys(stops)),
        stop_strings=tuple(config.stop_strings or ()),
    )


def check_end(config: Any, *, has_eos: bool) -> None:
    """Refuse options that treat truncated responses differently if nothing ends a response.

    Args:
        config: the options.
        has_eos: whether the tokenizer or the model's generation_config has an EOS token.
    """
    if config.stop_token_id is not None or config.stop_token_ids or config.stop_strings:
        return
    if config.stop_token is not None and has_eos:
        return
    reason = "neither the tokenizer nor the model's generation_config has an EOS token"
    fix = "stop_token_ids or stop_strings"
    if config.stop_token is None:
        reason = "stop_token=None and no stop_token_ids or stop_strings are set"
        fix = 'stop_token="eos"'
    for name in _NEED_END:
        if value := getattr(config, name, None):
            raise ConfigError(
                f"{name}={value!r} treats truncated responses differently, but nothing can end a"
                f" response: {reason}. Set {fix}, or leave {name} out"
            )
