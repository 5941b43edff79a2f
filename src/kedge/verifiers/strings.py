"""Text comparison: equality, containment, and word F1."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from typing import Any

from kedge.errors import RewardError
from kedge.verifiers.answers import marked_answer
from kedge.verifiers.base import Verifier

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Case-folded and NFKC-normalized, without punctuation, articles and extra whitespace.

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


def accepted(truth: Any, name: str) -> list[str]:
    """The accepted texts of a ground truth, given as one text or a list."""
    texts = list(truth) if isinstance(truth, (list, tuple)) else [truth]
    texts = [str(text) if isinstance(text, (int, float)) else text for text in texts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RewardError(
            f"verifier {name}: the ground truth must be a text or a non-empty list of accepted"
            f" texts, got {str(truth)[:80]!r}"
        )
    return texts


def extract_answer(response: str) -> str:
    """The marked answer of a response, or the whole response."""
    marked = marked_answer(response)
    return response if marked is None else marked


def _equal(response: str, truth: Any) -> float:
    answer = normalize(extract_answer(response))
    return float(any(answer == normalize(text) for text in accepted(truth, "string_match")))


def _identical(response: str, truth: Any) -> float:
    texts = [text.strip() for text in accepted(truth, "exact_match")]
    return float(response.strip() in texts)


def _contains(response: str, truth: Any) -> float:
    padded = f" {normalize(response)} "
    phrases = [normalize(text) for text in accepted(truth, "string_contains")]
    return float(any(text and f" {text} " in padded for text in phrases))


def _best_f1(response: str, truth: Any) -> float:
    answer = extract_answer(response)
    return max(f1(answer, text) for text in accepted(truth, "string_f1"))


string_match = Verifier(_equal, name="string_match")
exact_match = Verifier(_identical, name="exact_match")
string_contains = Verifier(_contains, name="string_contains")
string_f1 = Verifier(_best_f1, name="string_f1")
