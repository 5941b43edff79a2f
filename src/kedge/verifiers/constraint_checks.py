"""One function per IFEval instruction type: does a text follow it?

Every function takes the text and the arguments under the dataset's names.  An invalid argument
raises ValueError or TypeError; no text raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from kedge.verifiers.languages import KNOWN, detect_language

PHRASES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD = re.compile(r"\w+")
_SPELLED = re.compile(r"[^\W_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}-][^\W_]+)*")
_END = re.compile(r"[.!?\N{DEVANAGARI DANDA}\N{IDEOGRAPHIC FULL STOP}\uff01\uff1f\u061f\u06d4]+")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|cf|e\.g|i\.e|[A-Z])\Z")
_CLOSING = "\"')*_]\N{RIGHT SINGLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"
_BULLET = re.compile(r"^[ \t]*[*+-][ \t]+\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?=[^\s*])[^*\n]*(?<=[^\s*])\1(?!\*)")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
_TITLE = re.compile(r"<<[^\n<>]*[^\s<>][^\n<>]*>>")
_STARS = re.compile(r"(?<!\*)\*{6,}")
_DIVIDER = re.compile(r"(?<!\*)\*\*\*(?!\*)")
_QUOTES = ('"', "\N{LEFT DOUBLE QUOTATION MARK}", "\N{RIGHT DOUBLE QUOTATION MARK}")


def related(count: int, relation: str, number: float) -> bool:
    """Whether a relation between ``count`` and ``number`` holds.

    Raises:
        ValueError: the relation is unknown.
    """
    relations: dict[str, bool] = {
        "at least": count >= number,
        "less than": count < number,
        "at most": count <= number,
        "more than": count > number,
        "exactly": count == number,
    }
    if relation not in relations:
        raise ValueError(f"relation={relation!r} must be one of {', '.join(relations)}")
    return relations[relation]


def sentences(text: str) -> int:
    """Number of sentences; the end of a paragraph also ends a sentence."""
    return sum(_count_sentences(paragraph) for paragraph in re.split(r"\n[^\S\n]*\n", text))


def _count_sentences(paragraph: str) -> int:
    count = start = 0
    for end in _END.finditer(paragraph):
        if _ends(paragraph, end):
            count += bool(_WORD.search(paragraph, start, end.start()))
            start = end.end()
    return count + bool(_WORD.search(paragraph, start))


def _ends(paragraph: str, mark: re.Match[str]) -> bool:
    """Whether a punctuation mark ends a sentence (not in 3.14, example.com or Dr. No)."""
    after = paragraph[mark.end() : mark.end() + 1]
    if mark[0].isascii() and after and not (after.isspace() or after in _CLOSING):
        return False
    before = paragraph[max(0, mark.start() - 6) : mark.start()]
    return not (mark[0] == "." and _ABBREVIATION.search(before))


def existence(text: str, *, keywords: Sequence[str]) -> bool:
    """All keywords occur, ignoring case, also inside words."""
    folded = text.casefold()
    return all(word.casefold() in folded for word in _words(keywords))


def forbidden(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs as a whole word, ignoring case."""
    pattern = rf"(?<!\w)(?:{'|'.join(re.escape(word) for word in _words(forbidden_words))})(?!\w)"
    return re.search(pattern, text, re.IGNORECASE) is None


def frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword count satisfies the relation, ignoring case, also inside words."""
    (word,) = _words([keyword])
    return related(text.casefold().count(word.casefold()), relation, frequency)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The count of a character satisfies the relation, ignoring case."""
    if len(letter) != 1:
        raise ValueError(f"letter={letter!r} must be one character")
    return related(text.casefold().count(letter.casefold()), let_relation, let_frequency)


def response_language(text: str, *, language: str) -> bool:
    """The text is in a language, given by its two-letter code."""
    if language not in KNOWN:
        raise ValueError(f"language={language!r} is not among {', '.join(sorted(KNOWN))}")
    return detect_language(text) == language


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    """The number of sentences satisfies the relation."""
    return related(sentences(text), relation, num_sentences)


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    """The number of words (runs of letters, digits, underscores) satisfies the relation."""
    return related(sum(1 for _ in _WORD.finditer(text)), relation, num_words)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Exactly this many non-empty paragraphs, separated by ***."""
    parts = [part.strip() for part in _DIVIDER.split(text)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return len(parts) == num_paragraphs and all(parts)


def nth_paragraph_first_word(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """This many paragraphs, separated by blank lines; the nth begins with a given word."""
    if not 1 <= nth_paragraph <= num_paragraphs:
        raise ValueError(
            f"nth_paragraph={nth_paragraph} must be between 1 and num_paragraphs={num_paragraphs}"
        )
    parts = [part for part in re.split(r"\n[^\S\n]*\n", text) if part.strip()]
    if len(parts) != num_paragraphs:
        return False
    word = _SPELLED.search(parts[nth_paragraph - 1])
    return word is not None and word[0].casefold() == first_word.strip().casefold()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """At least this many placeholders such as [address]."""
    return len(_PLACEHOLDER.findall(text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    """A postscript: the marker followed by words."""
    letters = re.findall(r"[A-Za-z]", postscript_marker)
    if not letters:
        raise ValueError(f"postscript_marker={postscript_marker!r} has no letters")
    marker = r"\.[^\S\n]?".join(letters)
    return re.search(rf"(?<!\w)(?<!\w\.){marker}\b\.?[^\w\n]*\w", text, re.IGNORECASE) is not None


def number_bullets(text: str, *, num_bullets: int) -> bool:
    """Exactly this many bullet points."""
    return len(_BULLET.findall(text)) == num_bullets


def constrained_response(text: str) -> bool:
    """Exactly one of the three answers, yes, no or maybe."""
    return sum(phrase in text for phrase in PHRASES) == 1


def number_highlights(text: str, *, num_highlights: int) -> bool:
    """At least this many highlighted spans, such as *this* or **this**."""
    return sum(1 for _ in _HIGHLIGHT.finditer(text)) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least this many sections, each starting with the word and a number."""
    (word,) = _words([section_spliter.strip()])
    headings = re.findall(rf"(?<!\w){re.escape(word)}[^\S\n]?(?:[0-9]+|[IVXLC]+)\b", text)
    return len(headings) >= num_sections


def json_format(text: str) -> bool:
    """The whole text is a JSON object or list, optionally in a ``` code fence."""
    body = text.strip()
    if body.startswith("```") and body.endswith("```") and "\n" in body:
        body = body[:-3].partition("\n")[2]
    try:
        return isinstance(json.loads(body), (dict, list))
    except (ValueError, RecursionError):
        return False


def title(text: str) -> bool:
    """Contains a title in double angle brackets."""
    return _TITLE.search(text) is not None


def two_responses(text: str) -> bool:
    """Two different responses, separated by ******."""
    parts = [part.strip() for part in _STARS.split(text)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Begins with the request, word for word."""
    request = " ".join(prompt_to_repeat.casefold().split())
    if not request:
        raise ValueError("prompt_to_repeat is empty")
    return " ".join(text.casefold().split()).startswith(request)


def end_checker(text: str, *, end_phrase: str) -> bool:
    """Ends with a phrase."""
    end = text.strip().strip("".join(_QUOTES)).strip().casefold()
    return end.endswith(end_phrase.strip().strip('"').casefold())


def quotation(text: str) -> bool:
    """The whole text is in double quotation marks."""
    text = text.strip()
    return len(text) > 2 and text[0] in _QUOTES and text[-1] in _QUOTES


def capital(text: str) -> bool:
    """English, all uppercase."""
    return text.isupper() and detect_language(text) in ("en", None)


def lowercase(text: str) -> bool:
    """English, all lowercase."""
    return text.islower() and detect_language(text) in ("en", None)


def capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """The number of all-uppercase words satisfies the relation."""
    count = sum(word[0].isupper() for word in _SPELLED.finditer(text))
    return related(count, capital_relation, capital_frequency)


def no_comma(text: str) -> bool:
    """No comma in any script."""
    return not any(comma in text for comma in (",", "\uff0c", "\u060c"))


def _words(words: Sequence[str]) -> list[str]:
    if isinstance(words, str) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"expected a list of words, got {words!r}")
    return list(words)


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:forbidden_words": forbidden,
    "keywords:frequency": frequency,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullets,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlights,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:english_capital": capital,
    "change_case:english_lowercase": lowercase,
    "change_case:capital_word_frequency": capital_words,
    "punctuation:no_comma": no_comma,
}
