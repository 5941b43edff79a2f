"""Verifiable instruction following: the 25 instruction types of IFEval."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from kedge.records.errors import ConfigError, RewardError, install_command
from kedge.verifiers.base import Verifier, read_column, read_record

EXAMPLE = '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'
MIN_CONFIDENCE = 0.5  # below this, a text is too short or too mixed to identify its language
MAX_LETTERS = 20_000  # characters read to detect the language of a text
_CODES = (
    "ar bg bn cs da de el en es fa fi fr gu he hi hu hy id it ja ka kn ko ml mr ne nl no pa pl pt"
    " ro ru sv sw ta te th tr uk ur vi zh"
)
KNOWN = frozenset(_CODES.split())  # fewer candidates raise the certainty for short texts
RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "more than": operator.gt,
    "exactly": operator.eq,
}
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD = re.compile(r"\w+")
_SPELLED = re.compile(r"[^\W_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}-][^\W_]+)*")
_END = re.compile(r"[.!?\N{DEVANAGARI DANDA}\N{IDEOGRAPHIC FULL STOP}\uff01\uff1f\u061f\u06d4]+")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|cf|e\.g|i\.e|[A-Z])\Z")
_CLOSING = "\"')*_]\N{RIGHT SINGLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_BULLET = re.compile(r"^[ \t]*[*+-][ \t]+\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?=[^\s*])[^*\n]*(?<=[^\s*])\1(?!\*)")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
_TITLE = re.compile(r"<<[^\n<>]*[^\s<>][^\n<>]*>>")
_STARS = re.compile(r"(?<!\*)\*{6,}")
_DIVIDER = re.compile(r"(?<!\*)\*\*\*(?!\*)")
_COMMA = re.compile("[,\uff0c\u060c]")
_QUOTES = '"\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}'


class ConstraintVerifier(Verifier):
    """A verifier of the instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911).

    A row holds ``instruction_id_list`` and ``kwargs`` (one mapping per instruction) in two columns,
    as in the dataset, or both as a mapping or JSON object in the ground-truth column.  Text before
    ``</think>`` and ``<answer>`` tags are ignored.  A blank response follows no instruction.
    Instructions about the language of a response need ``pip install 'kedge-rl[ifeval]'``.

    Args:
        score: ``"mean"``, the share of instructions followed, or ``"all"``, 1 only if all are.
        column: dataset column with the ground truth.
        name: name of the verifier.

    Raises:
        ConfigError: an option is invalid.
    """

    def __init__(
        self,
        *,
        score: Literal["mean", "all"] = "mean",
        column: str = "ground_truth",
        name: str = "ifeval",
    ) -> None:
        if score not in ("mean", "all"):
            raise ConfigError(f"score={score!r} must be 'mean' or 'all'")
        check = partial(_check, every=score == "all")
        super().__init__(check, name=name, column=column, prepare=load_identifier)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score all rows.

        Raises:
            RewardError: an instruction is unknown, or its arguments are missing or invalid.
            ConfigError: an instruction about languages needs py3langid, which is not installed.
        """
        assert self.column is not None
        if self.column not in columns:
            rows = len(completions)
            ids = read_column(columns, "instruction_id_list", rows, self.__name__)
            kwargs = read_column(columns, "kwargs", rows, self.__name__)
            columns[self.column] = [
                None if one is None else {"instruction_id_list": one, "kwargs": two}
                for one, two in zip(ids, kwargs, strict=True)
            ]
        return super().__call__(completions, **columns)


def _check(text: str, truth: Any, *, every: bool) -> float:
    record = read_record(truth, EXAMPLE)
    ids, kwargs = record.get("instruction_id_list"), record.get("kwargs")
    if not isinstance(ids, list) or not ids:
        raise RewardError(f"the ground truth must list instructions, for example {EXAMPLE}")
    kwargs = [{}] * len(ids) if kwargs is None else kwargs
    if not isinstance(kwargs, list) or len(kwargs) != len(ids):
        raise RewardError(f"kwargs must be a list of {len(ids)} mappings, one for each of {ids}")
    results = [follows(text, *pair) for pair in zip(ids, kwargs, strict=True)]
    return float(all(results)) if every else sum(results) / len(results)


def follows(response: str, instruction: str, arguments: dict[str, Any] | None) -> bool:
    """Whether a response follows one instruction; arguments that are None count as missing."""
    check = CHECKS.get(instruction)
    if check is None:
        raise RewardError(f"unknown instruction {instruction!r}; known: {', '.join(CHECKS)}")
    known = {key: value for key, value in (arguments or {}).items() if value is not None}
    text = response.rpartition("</think>")[2].replace("<answer>", "").replace("</answer>", "")
    try:
        return bool(text.strip()) and check(text, **known)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardError(f"invalid arguments {known} for {instruction!r}: {error}") from error


@functools.cache
def load_identifier() -> Any:
    """The language identifier; raises ConfigError if py3langid is not installed."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ConfigError(
            f"checking the language of a response needs py3langid; run {install_command('ifeval')}"
        ) from error
    identifier = LanguageIdentifier.from_model_file(
        MODEL_FILE, norm_probs=True, min_confidence=MIN_CONFIDENCE
    )
    identifier.set_languages([*KNOWN, "zxx"])  # zxx: text that is not language
    return identifier


def detect_language(text: str) -> str | None:
    """The two-letter code of the language, or None if the text is too short or mixed."""
    code, _ = load_identifier().classify(text[:MAX_LETTERS])
    return code if code in KNOWN else None


def count_sentences(text: str) -> int:
    """Number of sentences; the end of a paragraph also ends a sentence."""
    count = 0
    for paragraph in _BLANK_LINE.split(text):
        start = 0
        for mark in _END.finditer(paragraph):
            if _ends_sentence(paragraph, mark):
                count += bool(_WORD.search(paragraph, start, mark.start()))
                start = mark.end()
        count += bool(_WORD.search(paragraph, start))
    return count


def _ends_sentence(paragraph: str, mark: re.Match[str]) -> bool:
    """Whether a punctuation mark ends a sentence (not in 3.14, example.com or Dr. No)."""
    after = paragraph[mark.end() : mark.end() + 1]
    if mark[0].isascii() and after and not (after.isspace() or after in _CLOSING):
        return False
    before = paragraph[max(0, mark.start() - 6) : mark.start()]
    return not (mark[0] == "." and _ABBREVIATION.search(before))


# Each check takes the text and arguments named as in the dataset. Invalid arguments raise
# ValueError or TypeError; no text raises.


def _compare(count: int, relation: str, number: float) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f"relation={relation!r} must be one of {', '.join(RELATIONS)}")
    return RELATIONS[relation](count, number)


def _words(words: list[str]) -> list[str]:
    """The words of a text, in lower case."""
    if isinstance(words, str) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"expected a list of words, got {words!r}")
    return [word.casefold() for word in words]


def _split(text: str, divider: re.Pattern[str]) -> list[str]:
    """The parts between dividers; leading and trailing dividers are ignored."""
    parts = [part.strip() for part in divider.split(text)]
    return parts[not parts[0] : len(parts) - (not parts[-1])]


def _includes(text: str, *, keywords: list[str]) -> bool:
    folded = text.casefold()
    return all(word in folded for word in _words(keywords))


def _avoids(text: str, *, forbidden_words: list[str]) -> bool:
    words = "|".join(map(re.escape, _words(forbidden_words)))
    return re.search(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE) is None


def _letters(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    if len(letter) != 1:
        raise ValueError(f"letter={letter!r} must be one character")
    return _compare(text.casefold().count(letter.casefold()), let_relation, let_frequency)


def _in_language(text: str, *, language: str) -> bool:
    if language not in KNOWN:
        raise ValueError(f"language={language!r} is not among {', '.join(sorted(KNOWN))}")
    return detect_language(text) == language


def _paragraphs(text: str, *, num_paragraphs: int) -> bool:
    parts = _split(text, _DIVIDER)
    return len(parts) == num_paragraphs and all(parts)


def _first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    if not 1 <= nth_paragraph <= num_paragraphs:
        raise ValueError(
            f"nth_paragraph={nth_paragraph} must be between 1 and num_paragraphs={num_paragraphs}"
        )
    parts = [part for part in _BLANK_LINE.split(text) if part.strip()]
    if len(parts) != num_paragraphs:
        return False
    word = _SPELLED.search(parts[nth_paragraph - 1])
    return word is not None and word[0].casefold() == first_word.strip().casefold()


def _postscript(text: str, *, postscript_marker: str) -> bool:
    letters = re.findall(r"[A-Za-z]", postscript_marker)
    if not letters:
        raise ValueError(f"postscript_marker={postscript_marker!r} has no letters")
    marker = r"\.[^\S\n]?".join(letters)
    return re.search(rf"(?<!\w)(?<!\w\.){marker}\b\.?[^\w\n]*\w", text, re.IGNORECASE) is not None


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    if not section_spliter.strip():
        raise ValueError("section_spliter is empty")
    word = re.escape(section_spliter.strip())
    headings = re.findall(rf"(?<!\w){word}[^\S\n]?(?:[0-9]+|[IVXLC]+)\b", text)
    return len(headings) >= num_sections


def _is_json(text: str) -> bool:
    body = text.strip()
    if body.startswith("```") and body.endswith("```") and "\n" in body:
        body = body[:-3].partition("\n")[2]
    try:
        return isinstance(json.loads(body), (dict, list))
    except (ValueError, RecursionError):
        return False


def _two_responses(text: str) -> bool:
    parts = _split(text, _STARS)
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeats(text: str, *, prompt_to_repeat: str) -> bool:
    (request,) = _words([" ".join(prompt_to_repeat.split())])
    return " ".join(text.casefold().split()).startswith(request)


def _ends_with(text: str, *, end_phrase: str) -> bool:
    end = text.strip().strip(_QUOTES).strip().casefold()
    return end.endswith(end_phrase.strip().strip('"').casefold())


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 2 and text[0] in _QUOTES and text[-1] in _QUOTES


CHECKS: dict[str, Callable[..., bool]] = {
    # ignores case; keywords also count inside words, forbidden words do not
    "keywords:existence": _includes,
    "keywords:forbidden_words": _avoids,
    "keywords:frequency": lambda text, *, keyword, frequency, relation: _compare(
        text.casefold().count(*_words([keyword])), relation, frequency
    ),
    "keywords:letter_frequency": _letters,
    "language:response_language": _in_language,
    "length_constraints:number_sentences": lambda text, *, num_sentences, relation: _compare(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,  # exact number, separated by ***
    # runs of letters, digits and underscores
    "length_constraints:number_words": lambda text, *, num_words, relation: _compare(
        len(_WORD.findall(text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,  # separated by blank lines
    # minimum number, such as [address]
    "detectable_content:number_placeholders": lambda text, *, num_placeholders: (
        len(_PLACEHOLDER.findall(text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,  # the marker and following words
    "detectable_format:number_bullet_lists": lambda text, *, num_bullets: (
        len(_BULLET.findall(text)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: sum(a in text for a in ANSWERS) == 1,
    # minimum number, such as *this* or **this**
    "detectable_format:number_highlighted_sections": lambda text, *, num_highlights: (
        len(_HIGHLIGHT.findall(text)) >= num_highlights
    ),
    "detectable_format:multiple_sections": _sections,  # minimum number: a word and a number
    "detectable_format:json_format": _is_json,  # an object or list, optionally in a ``` fence
    "detectable_format:title": lambda text: _TITLE.search(text) is not None,
    "combination:two_responses": _two_responses,  # two different ones, separated by ******
    "combination:repeat_prompt": _repeats,  # starts with the request, word for word
    "startend:end_checker": _ends_with,
    "startend:quotation": _is_quoted,
    "change_case:english_capital": lambda text: (
        text.isupper() and detect_language(text) in ("en", None)
    ),
    "change_case:english_lowercase": lambda text: (
        text.islower() and detect_language(text) in ("en", None)
    ),
    # counts words in capitals
    "change_case:capital_word_frequency": lambda text, *, capital_frequency, capital_relation: (
        _compare(
            sum(word[0].isupper() for word in _SPELLED.finditer(text)),
            capital_relation,
            capital_frequency,
        )
    ),
    "punctuation:no_comma": lambda text: _COMMA.search(text) is None,
}

ifeval = ConstraintVerifier()
