"""From what distribution responses are sampled, and where they end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kedge.errors import ConfigError
from kedge.types import Sampling

logger = logging.getLogger(__name__)
_NEED_AN_END = (
    *("missing_eos_penalty", "non_eos_penalty"),
    *("mask_truncated_completions", "overlong_buffer"),
)


def sampling_of(config: Any, eos_token_ids: Sequence[int]) -> Sampling:
    """The distribution responses are drawn from, and where they end.

    Raises:
        ConfigError: nothing can end a response, and an option needs an end.
    """
    check_end(config, has_eos=bool(eos_token_ids))
    stops = [*eos_token_ids] if config.stop_token == "eos" else []
    stops += [] if config.stop_token_id is None else [config.stop_token_id]
    stops += config.stop_token_ids or []
    if config.stop_token == "eos" and not (stops or config.stop_strings):
        logger.warning(
            "neither the tokenizer nor the model's generation_config names an EOS token: every"
            " response has response_length=%d tokens",
            config.response_length,
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
    """Refuse options that tell responses with an end from others where nothing ends a response.

    Args:
        config: the options.
        has_eos: the tokenizer or the model's generation_config names an EOS token.

    Raises:
        ConfigError: naming the option and the way out.
    """
    if config.stop_token_id is not None or config.stop_token_ids or config.stop_strings:
        return
    if config.stop_token is not None and has_eos:
        return
    for name in _NEED_AN_END:
        value = getattr(config, name, None)
        if value:
            why = (
                "stop_token=None and no stop_token_ids or stop_strings are set"
                if config.stop_token is None
                else "neither the tokenizer nor the model's generation_config names an EOS token"
            )
            way = (
                'stop_token="eos"'
                if config.stop_token is None
                else "stop_token_ids or stop_strings"
            )
            raise ConfigError(
                f"{name}={value!r} tells responses that end by themselves from those that are cut"
                f" off, and nothing can end a response here: {why}. Set {way}, or leave {name} out"
            )
