"""Rewards for the format of a response: ``<think>...</think> <answer>...</answer>``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kedge.errors import ConfigError
from kedge.verifiers.base import Verifier


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
        return _loose(text)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    text = f"<think>{text}" if opened else text.strip()
    if any(text.count(tag) != 1 for tag in tags):
        return False
    if not text.startswith("<think>") or not text.rstrip().endswith("</answer>"):
        return False
    thought, close, rest = text[len("<think>") :].partition("</think>")
    between, start, answer = rest.partition("<answer>")
    answer, end, _ = answer.partition("</answer>")
    parts = bool(close and start and end)
    return parts and bool(thought.strip()) and bool(answer.strip()) and not between.strip()


def _loose(text: str) -> bool:
    end = text.rfind("</answer>")
    head = text[: max(end, 0)]
    tails = head.split("</think>")[1:]  # each starts right after a </think>
    return any(tail.lstrip()[:8] == "<answer>" for tail in tails)


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


def tag_count_reward(
    tags: Sequence[str] = ("<think>", "</think>", "<answer>", "</answer>"),
) -> Verifier:
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
