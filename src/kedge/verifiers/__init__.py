"""Verifiable rewards: verifiers, format and length rewards, and verifiers by column.

Each is a plain reward function, ``f(completions, **columns) -> one number (or None) per row``, and
goes into ``reward_funcs=[...]`` of any trainer or into ``--reward_funcs kedge.verifiers:gsm8k``.
Importing this package loads only the standard library.
"""

from typing import Any

from kedge import plugins
from kedge.forwards import attribute
from kedge.verifiers.base import Verifier, text_of
from kedge.verifiers.compose import ByColumn, by_column, known_verifiers
from kedge.verifiers.mathematics import accuracy_reward, math, math_verifier
from kedge.verifiers.numbers import gsm8k, number_verifier
from kedge.verifiers.remote import RemoteReward
from kedge.verifiers.texts import (
    exact_match,
    format_reward,
    length_at_most,
    length_close_to,
    r1_style_format,
    regex_match,
    regex_reward,
    soft_overlong_punishment,
    string_contains,
    string_f1,
    string_match,
    tag_count_reward,
    think_answer,
    think_format_reward,
)

__all__ = [
    "ByColumn",
    "ConstraintVerifier",
    "Outcome",
    "RemoteReward",
    "Sandbox",
    "Verifier",
    "accuracy_reward",
    "by_column",
    "code",
    "code_verifier",
    "exact_match",
    "format_reward",
    "gsm8k",
    "ifeval",
    "known_verifiers",
    "length_at_most",
    "length_close_to",
    "math",
    "math_verifier",
    "number_verifier",
    "r1_style_format",
    "regex_match",
    "regex_reward",
    "soft_overlong_punishment",
    "string_contains",
    "string_f1",
    "string_match",
    "tag_count_reward",
    "text_of",
    "think_answer",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    """Verifiers of extensions."""
    found = plugins.load("kedge.rewards", name)
    return attribute("kedge.verifiers", name) if found is None else found
