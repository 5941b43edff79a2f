"""Comparison of texts: equality, containment, and the F1 of words."""

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
    """Lower case, one form per character, without punctuation, articles and extra blanks.

    Source: the normalization of SQuAD (Rajpurkar et al. 2016), after Unicode NFKC.
    """
    text = unicodedata.normalize("NFKC", text).casefold().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def f1(response: str, truth: str) -> float:
    """Harmonic mean of precision and recall of the words in common, counted with repetition.

        F1 = 2 * common / (words of the response + words of the truth)

    Two texts without words are equal (1).
    """
    found, want = normalize(response).split(), normalize(truth).split()
    if not found or not want:
        return float(found == want)
    common = sum((Counter(found) & Counter(want)).values())
    return 2 * common / (len(found) + len(want))


def accepted(truth: Any, name: str) -> list[str]:
    """The acceptable texts of a ground truth: one, or a list of them.

    Raises:
        RewardError: there is none, or it is no text.
    """
    texts = list(truth) if isinstance(truth, (list, tuple)) else [truth]
    texts = [str(text) if isinstance(text, (int, float)) else text for text in texts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RewardError(
            f"verifier {name}: the ground truth {str(truth)[:80]!r} must be a text or a list of"
            " acceptable texts"
        )
    return texts


def extract_answer(response: str) -> str:
    """The marked answer of a response, or all of it."""
    marked = marked_answer(response)
    return response if marked is None else marked


def _equal(response: str, truth: Any) -> float:
    found = normalize(extract_answer(response))
    return float(any(found == normalize(text) for text in accepted(truth, "string_match")))


def _identical(response: str, truth: Any) -> float:
    texts = [text.strip() for text in accepted(truth, "exact_match")]
    return float(response.strip() in texts)


def _contains(response: str, truth: Any) -> float:
    found = f" {normalize(response)} "
    wanted = [normalize(text) for text in accepted(truth, "string_contains")]
    return float(any(text and f" {text} " in found for text in wanted))


def _best_f1(response: str, truth: Any) -> float:
    found = extract_answer(response)
    return max(f1(found, text) for text in accepted(truth, "string_f1"))


string_match = Verifier(_equal, name="string_match")
exact_match = Verifier(_identical, name="exact_match")
string_contains = Verifier(_contains, name="string_contains")
string_f1 = Verifier(_best_f1, name="string_f1")
