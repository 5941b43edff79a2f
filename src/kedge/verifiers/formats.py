"""Rewards for the format of a response: ``<think>...</think> <answer>...</answer>``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from kedge.errors import ConfigError
from kedge.verifiers.base import Verifier

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STRICT = re.compile(r"<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_LOOSE = re.compile(r"</think>\s*<answer>")


def has_think_answer(text: str, *, strict: bool = True, opened: bool = False) -> bool:
    """Whether a response has a thinking part followed by an answer.

    Strict: exactly ``<think>thought</think> <answer>answer</answer>``, each tag once, neither part
    blank.  Otherwise: ``</think>``, optional whitespace, ``<answer>``, and later ``</answer>``
    anywhere in the response.

    Args:
        text: the response.
        strict: see above.
        opened: the prompt already ends in ``<think>``, so the response starts inside the thought.
    """
    if not strict:
        return _LOOSE.search(text[: max(text.rfind("</answer>"), 0)]) is not None
    text = f"<think>{text}" if opened else text.strip()
    match = _STRICT.fullmatch(text)
    once = all(text.count(tag) == 1 for tag in _TAGS)
    return match is not None and once and all(part.strip() for part in match.groups())


def format_reward(*, strict: bool = True, opened: bool = False, name: str = "format") -> Verifier:
    """A reward of 1 for responses of the form ``<think>...</think> <answer>...</answer>``, else 0.

    Args:
        strict: see ``has_think_answer``.
        opened: see ``has_think_answer``.
        name: of the reward.
    """
    return Verifier(partial(_check, strict=strict, opened=opened), name=name, column=None)


def _check(text: str, _: Any, *, strict: bool, opened: bool) -> float:
    return float(has_think_answer(text, strict=strict, opened=opened))


def tag_count_reward(tags: Sequence[str] = _TAGS) -> Verifier:
    """A reward for the share of tags that occur exactly once.

    Args:
        tags: the tags to count.

    Raises:
        ConfigError: no tag, or an empty one.
    """
    if not tags or not all(tags):
        raise ConfigError(f"tags={list(tags)} must name at least one tag, none empty")
    return Verifier(partial(_share, tags=tuple(tags)), name="tag_count", column=None)


def _share(text: str, _: Any, *, tags: tuple[str, ...]) -> float:
    return sum(text.count(tag) == 1 for tag in tags) / len(tags)


def _thinks_first(text: str, _: Any) -> float:
    """1 if the text begins with its only ``<think>`` and closes it."""
    rest = text.removeprefix("<think>")
    return float(rest != text and "<think>" not in rest and "</think>" in rest)


think_answer = format_reward()
think_format_reward = Verifier(_thinks_first, name="think_format_reward", column=None)
r1_style_format = format_reward(strict=False, name="r1_style_format")
