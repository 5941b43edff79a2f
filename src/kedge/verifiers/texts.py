"""Rewards from the text of a response: comparison, format, regular expressions, and its length."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kedge.records.errors import ConfigError, RewardError
from kedge.verifiers.base import Unanswered, Verifier, conclusion, marked_answer, read_column

LengthReward = Callable[..., list[float | None]]
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STRICT = re.compile(r"<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_LOOSE = re.compile(r"</think>\s*<answer>")
_MODES = ("search", "match", "fullmatch")


def normalize(text: str) -> str:
    """Fold case, apply NFKC, and drop punctuation, articles and extra whitespace.

    Source: the normalization of SQuAD (Rajpurkar et al. 2016), after Unicode NFKC.
    """
    text = unicodedata.normalize("NFKC", text).casefold().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def f1(response: str, truth: str) -> float:
    """Harmonic mean of precision and recall of the common words, as multisets.

        F1 = 2 * common / (words in the response + words in the truth)

    1 if neither text has words.
    """
    answer, expected = normalize(response).split(), normalize(truth).split()
    if not answer or not expected:
        return float(answer == expected)
    common = sum((Counter(answer) & Counter(expected)).values())
    return 2 * common / (len(answer) + len(expected))


def _best(response: str, truth: Any, *, score: Callable[[str, str], float]) -> float:
    """The best score over a ground truth's accepted texts, given as one text or a list."""
    texts = list(truth) if isinstance(truth, (list, tuple)) else [truth]
    texts = [str(text) if isinstance(text, (int, float)) else text for text in texts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RewardError(
            "the ground truth must be a text or a non-empty list of accepted texts, got"
            f" {str(truth)[:80]!r}"
        )
    return max(float(score(response, text)) for text in texts)


def _read_answer(response: str) -> str:
    """The marked answer of a response, or all of it, after the reasoning."""
    response = conclusion(response)
    marked = marked_answer(response)
    return response if marked is None else marked


def _equal(response: str, text: str) -> bool:
    return normalize(_read_answer(response)) == normalize(text)


def _identical(response: str, text: str) -> bool:
    return response.strip() == text.strip()


def _contains(response: str, text: str) -> bool:
    phrase = normalize(text)
    return bool(phrase) and f" {phrase} " in f" {normalize(response)} "


def _answer_f1(response: str, text: str) -> float:
    return f1(_read_answer(response), text)


def _text_verifier(name: str, score: Callable[[str, str], float]) -> Verifier:
    return Verifier(partial(_best, score=score), name=name)


string_match = _text_verifier("string_match", _equal)
exact_match = _text_verifier("exact_match", _identical)
string_contains = _text_verifier("string_contains", _contains)
string_f1 = _text_verifier("string_f1", _answer_f1)


def format_reward(*, strict: bool = True, opened: bool = False, name: str = "format") -> Verifier:
    """A reward of 1 for responses of the form ``<think>...</think> <answer>...</answer>``, else 0.

    Args:
        strict: exactly ``<think>thought</think> <answer>answer</answer>``, each tag once, neither
            part blank.  Otherwise: ``</think>``, optional whitespace, ``<answer>``, and later
            ``</answer>`` anywhere in the response.
        opened: whether the prompt ends in ``<think>``, so the response starts inside the thought.
        name: of the reward.
    """
    check = partial(has_think_answer, strict=strict, opened=opened)
    return Verifier(check, name=name, column=None)


def has_think_answer(
    text: str, _: Any = None, *, strict: bool = True, opened: bool = False
) -> bool:
    """Whether a response has a thinking part followed by an answer; see ``format_reward``."""
    if not strict:
        return _LOOSE.search(text[: max(text.rfind("</answer>"), 0)]) is not None
    text = f"<think>{text}" if opened else text.strip()
    match = _STRICT.fullmatch(text)
    once = all(text.count(tag) == 1 for tag in _TAGS)
    return match is not None and once and all(part.strip() for part in match.groups())


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


def regex_reward(
    pattern: str | None = None,
    *,
    column: str = "ground_truth",
    mode: str = "search",
    ignore_case: bool = False,
    timeout: float = 1.0,
    workers: int = 1,
    name: str = "regex",
) -> Verifier:
    """A reward of 1 for responses that a regular expression matches, else 0.

    A match that times out scores 0 and is counted in ``timeouts/<name>``.  ``.`` also matches
    newlines.  The syntax is that of the package ``regex``, which extends Python's ``re``.

    Args:
        pattern: used for all rows; None: read from ``column``.
        column: dataset column with the pattern.
        mode: ``"search"`` (anywhere), ``"match"`` (from the start) or ``"fullmatch"``.
        ignore_case: match case-insensitively.
        timeout: seconds of processor time for one response.
        workers: responses matched concurrently.
        name: of the reward.

    Raises:
        ConfigError: the pattern is not a valid regular expression, or ``mode`` is unknown.
    """
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r} must be one of {', '.join(_MODES)}")
    if timeout <= 0:
        raise ConfigError(f"timeout={timeout} must be greater than 0")
    if pattern is not None:
        _compile(pattern, ignore_case)
    check = partial(_search, pattern, ignore_case=ignore_case, mode=mode, timeout=timeout)
    return Verifier(check, name=name, column=column if pattern is None else None, threads=workers)


def _search(
    pattern: str | None, text: str, truth: Any, *, ignore_case: bool, mode: str, timeout: float
) -> float:
    expression = truth if pattern is None else pattern
    if not isinstance(expression, str):
        raise RewardError(f"the ground truth must be a regular expression, got {expression!r}")
    try:
        search = getattr(_compile(expression, ignore_case), mode)
        return float(search(text, timeout=timeout, concurrent=True) is not None)
    except TimeoutError as error:
        raise Unanswered("timeouts") from error
    except ConfigError as error:
        raise RewardError(str(error)) from error


def _compile(pattern: str, ignore_case: bool) -> Any:
    import regex

    try:
        return regex.compile(pattern, regex.DOTALL | (regex.IGNORECASE if ignore_case else 0))
    except (regex.error, RecursionError) as error:
        raise ConfigError(
            f"pattern={pattern[:80]!r} is not a valid regular expression: {error}"
        ) from error


regex_match = regex_reward()


def soft_overlong_punishment(*, max_length: int, cache: int) -> LengthReward:
    """A penalty that grows over the last tokens before the limit.

        0                                  for |y| <= max_length - cache
        (max_length - cache - |y|) / cache for |y| <= max_length
        -1                                 beyond

    Source: DAPO (arXiv 2503.14476), equation 13.

    Args:
        max_length: longest response, in tokens.
        cache: width of the penalized interval, in tokens.

    Raises:
        ConfigError: ``cache`` is not in 1..``max_length``.
    """
    if not 0 < cache <= max_length:
        raise ConfigError(f"cache={cache} must be at least 1 and at most max_length={max_length}")
    free = max_length - cache

    def soft_overlong(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        return [max(-1.0, min(0.0, (free - len(ids)) / cache)) for ids in completion_ids]

    return soft_overlong


def length_close_to(*, column: str = "ground_truth", slope: float = 1.0) -> LengthReward:
    """1 at the target length, decreasing linearly with the relative distance, never below 0.

        max(0, 1 - slope * | |y| - target | / target)

    Args:
        column: dataset column with the target length in tokens.
        slope: steepness.
    """
    return _length_reward(
        "length_close", column, lambda tokens, n: max(0.0, 1.0 - slope * abs(tokens - n) / n)
    )


def length_at_most(
    *, column: str = "ground_truth", slope: float = 0.01, offset: float = 0.5
) -> LengthReward:
    """Decreases with the number of tokens; between 0 and 1.

        clip(slope * (allowed - |y|) + offset, 0, 1)

    Source: the budget term of LCPO-Max (arXiv 2503.04697), equation 3.

    Args:
        column: dataset column with the allowed length in tokens.
        slope: reward per token.
        offset: reward at exactly the allowed length.
    """
    return _length_reward(
        "length_max", column, lambda tokens, n: min(1.0, max(0.0, slope * (n - tokens) + offset))
    )


def _length_reward(name: str, column: str, score: Callable[[int, float], float]) -> LengthReward:
    """A reward for the number of tokens, given the number in a dataset column."""

    def reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        values = read_column(columns, column, len(completion_ids), name)
        for n in values:
            number = isinstance(n, (int, float)) and not isinstance(n, bool)
            if n is not None and not (number and n > 0):
                raise RewardError(
                    f"{name}: the value {n!r} in column {column!r} must be a positive number of"
                    " tokens"
                )
        rows = zip(completion_ids, values, strict=True)
        return [None if n is None else score(len(ids), n) for ids, n in rows]

    reward.__name__ = name
    return reward
