"""Equality of mathematical answers (MATH and similar)."""

from __future__ import annotations

import importlib.util
import re
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

from kedge.records.errors import ConfigError, RewardError, install_command
from kedge.verifiers.base import Verifier, conclusion, marked_answer, stated_answer
from kedge.verifiers.numbers import one_number, same_number
from kedge.verifiers.worker import WorkerPool

MAX_PARTS = 24  # maximum elements of a set or matrix
MAX_DEPTH = 20  # maximum nesting of brackets in a formula
SHORT = 100  # characters; a shorter response counts as an answer even if unmarked
_MATH = re.compile(r"\$\$(.{1,1000}?)\$\$|\$([^$]{1,1000})\$|\\\((.{1,1000}?)\\\)", re.DOTALL)
_OPENING = {"}": "{", ")": "(", "]": "["}
_WORDS = re.compile(r"\(?[A-Za-z]+(?:[ '-][A-Za-z]+)*\)?")
_MODULO = re.compile(r"\\[bp]?mod(?![a-z])")
_SENTENCE = re.compile(r"\.(?:\s|\Z)")
MAX_LETTERS = 1000  # longer texts are not answers

ROW = "\N{SYMBOL FOR NEWLINE}"  # placeholder for a matrix row break
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_NAMES = (
    (r"\cfrac", r"\frac"), (r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\leq", r"\le"),
    (r"\geq", r"\ge"), (r"\neq", r"\ne"), (r"\lbrace", r"\{"), (r"\rbrace", r"\}"),
    ("bmatrix", "pmatrix"), ("Bmatrix", "pmatrix"), ("\\ ", " "), ("~", " "), ("**", "^"),
    (r"\%", "%"), ("{,}", ","), ("{:}", ":"), (r"\varnothing", r"\emptyset"),
    (",\\! ", ","), (",\\!", ","),
    ("\N{INFINITY}", r"\infty"), ("\N{GREEK SMALL LETTER PI}", r"\pi"),
    ("\N{SQUARE ROOT}", r"\sqrt"), ("\N{MULTIPLICATION SIGN}", r"\times"),
    ("\N{MIDDLE DOT}", r"\cdot"), ("\N{UNION}", r"\cup"), ("\N{ELEMENT OF}", r"\in"),
    ("\N{PLUS-MINUS SIGN}", r"\pm"), ("\N{SUPERSCRIPT TWO}", "^2"),
    ("\N{SUPERSCRIPT THREE}", "^3"), ("\N{MINUS SIGN}", "-"), ("\N{EN DASH}", "-"),
)  # fmt: skip
_DROP = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|q?quad)(?![a-zA-Z])"
    r"|\\[,!;:]|\\?\$|(?:\^\s?\{\s?\\circ\s?\}|\^\s?\\circ|\\degree)(?![a-zA-Z])|\N{DEGREE SIGN}"
)
_TEXT = re.compile(
    r"\\(?:text|mbox|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|operatorname)"
    r"\s?\{([^{}]*)\}"
)
_POWER = r"(?:\s?\^\s?(?:\{[0-9]\}|[0-9]))?"
_NO_UNIT = r"(?!(?:or|and|is|are|was|not|if|to|than|but)\b)"  # words that belong to a sentence
_TEXT_UNIT = re.compile(rf"(?<=[^\s,(\[{{=])\s?{_TEXT.pattern}{_POWER}\s?\Z")
_WORD_UNIT = re.compile(
    r"\A([-+]?[0-9][0-9.,/]*)\s(?!(?:pi|sqrt)\b)"
    rf"(?:{_NO_UNIT}[A-Za-z]{{2,}}\.?{_POWER}\s?){{1,4}}\Z"
)
_SUBSTITUTIONS = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\frac\s?([0-9a-zA-Z])\s?([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s?([0-9a-zA-Z])\s?\{", r"\\frac{\1}{"),
        (r"\\frac\s?(\{[^{}]*\})\s?([0-9a-zA-Z])", r"\\frac\1{\2}"),
        (r"\\sqrt\s?([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])\\?sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![0-9])\.(?=[0-9])", "0."),
    )
)
SEPARATORS = (",", ";", " and ", " or ")
_REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot)\s?(?:\{\s?([0-9]{1,20})\s?\}|([0-9]))"
)
_TOKEN = re.compile(r"\\[{}]|\\cup(?![a-zA-Z])| and | or |[()\[\]{},;]")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_FLAT = re.compile(r"\\frac\{\s?(-?)\s?([0-9]+|[a-zA-Z]|\\[a-z]+)\s?\}\{\s?([0-9]+)\s?\}")
_PREFIX = re.compile(r"([a-zA-Z](?:\([a-zA-Z]\))?)\s?(?:=|\\in(?![a-zA-Z]))\s?(?=\S)")


def math_verifier(
    *,
    column: str = "ground_truth",
    symbolic: bool = True,
    timeout: float = 5.0,
    workers: int = 2,
    name: str = "math",
) -> Verifier:
    r"""A verifier of mathematical answers: 1 if the final answer equals the ground truth, else 0.

    The final answer is the last ``\boxed{}``, ``<answer>`` or ``####``, else what follows the last
    "the answer is", else the last formula between dollar signs, else the whole of a short response.
    Words, numbers, tuples, intervals, sets, unions and matrices are compared part by part here;
    formulas that still differ are compared by math-verify in a helper process.  Comparisons that
    exceed ``timeout`` score 0 and are counted in ``timeouts/<name>``.  Units, degree signs and a
    leading ``x =`` are ignored.

    Args:
        column: dataset column with the ground truth, in LaTeX; in a full solution, the last
            ``\boxed{}``.
        symbolic: whether to use math-verify (``pip install 'kedge-rl[math]'``); without it,
            formulas must be equal after normalization.
        timeout: seconds for one comparison of formulas.
        workers: helper processes.
        name: name of the verifier.
    """
    check = partial(_check, checker=SymbolicChecker(timeout, workers) if symbolic else None)
    return Verifier(check, name=name, column=column, threads=workers if symbolic else 1)


def _check(text: str, truth: Any, *, checker: SymbolicChecker | None) -> float:
    if isinstance(truth, (int, float)) and not isinstance(truth, bool):
        want = format(truth, ".12g")
    elif isinstance(truth, str) and truth.strip():
        want = marked_answer(truth) or truth
    else:
        raise RewardError(f"the ground truth must be a number or non-empty text, got {truth!r}")
    answer = final_answer(text)
    return float(answer is not None and equal(answer, want, checker))


def final_answer(text: str) -> str | None:
    """The final answer of a response as written, after its reasoning, or None."""
    text = conclusion(text)
    marked = marked_answer(text)
    if marked is not None:
        return marked or None
    stated = stated_answer(text)
    if stated is not None:
        formula = _MATH.search(stated[:MAX_LETTERS])
        return _inner(formula) if formula else _SENTENCE.split(stated, 1)[0] or None
    formulas = list(_MATH.finditer(text))
    if formulas:
        return _inner(formulas[-1])
    return text.strip() if 0 < len(text.strip()) <= SHORT else None


def equal(answer: str, want: str, checker: SymbolicChecker | None = None) -> bool:
    """Whether two answers are equivalent; without ``checker``, formulas must be equal as text."""
    if len(answer) > MAX_LETTERS:
        return False
    return _equal(tidy(answer), tidy(want), checker)


def _equal(answer: str, want: str, checker: SymbolicChecker | None) -> bool:
    answer, want = strip_parentheses(answer), strip_parentheses(want)
    (variable, left), (wanted, right) = split_prefix(answer), split_prefix(want)
    if variable and wanted and variable != wanted:
        left, right = answer, want
    left, right = strip_parentheses(left), strip_parentheses(right)
    if squeeze(left) == squeeze(right):
        return True
    one, other = one_number(flatten(left)), one_number(flatten(right))
    if one is not None and other is not None:
        return same_number(one, other)
    if _WORDS.fullmatch(right) and len(right) > 1:
        left, right = ("".join(x.casefold().split()).strip("()") for x in (left, right))
        return left == right
    if _contradict(left, right):
        return False
    parts, wanted_parts = split_group(left), split_group(right)
    if (parts is None) != (wanted_parts is None) and (one is not None or other is not None):
        left, right, parts, wanted_parts = flatten(left), flatten(right), None, None  # 1,000
    if parts and wanted_parts:
        same_kind = parts[0] == wanted_parts[0]
        return same_kind and _all_equal(*parts, wanted_parts[1], checker)
    if parts or wanted_parts:
        return False
    if checker is None or not (_well_formed(left) and _well_formed(right)):
        return False
    whole = "=" in answer and "=" in want
    return checker.equal(answer, want) if whole else checker.equal(left, right)


def _contradict(left: str, right: str) -> bool:
    """Whether an answer differs from the ground truth in a way that math-verify misses."""
    if "_" in right or bool(_MODULO.search(left)) != bool(_MODULO.search(right)):
        return True  # numbers in other bases, or remainders
    want = one_number(flatten(right))
    if want is None:
        return False
    sides = [one_number(flatten(side)) for side in left.split("=")[:-1]]  # for example 3 = 4
    differ = any(side is not None and not same_number(side, want) for side in sides)
    return differ or (left.startswith("[") and "," in left)  # or intervals


def _all_equal(
    kind: str, answer: list[str], want: list[str], checker: SymbolicChecker | None
) -> bool:
    if len(answer) != len(want) or len(want) > MAX_PARTS:
        return False
    if kind not in ("set", "union"):
        return all(_equal(a, b, checker) for a, b in zip(answer, want, strict=True))
    rest = list(answer)
    for part in want:  # equal texts first, since comparing formulas is slow
        equals = (one for how in (None, checker) for one in rest if _equal(one, part, how))
        match = next(equals, None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _well_formed(formula: str) -> bool:
    """Whether brackets match and are not nested too deeply to parse."""
    depths = {"{": 0, "(": 0, "[": 0}
    for bracket in re.findall(r"(?<!\\)[{}()\[\]]", formula):
        if bracket in depths:
            depths[bracket] += 1
        else:
            depths[_OPENING[bracket]] -= 1
        if min(depths.values()) < 0 or max(depths.values()) > MAX_DEPTH:
            return False
    return not any(depths.values())


def _inner(formula: re.Match[str]) -> str | None:
    return next((g.strip() for g in formula.groups() if g and g.strip()), None)


class SymbolicChecker:
    """Compares formulas with math-verify in helper processes, with a time limit for each pair."""

    def __init__(self, timeout: float = 5.0, workers: int = 2) -> None:
        self._pool = WorkerPool(
            "kedge.verifiers.mathematics:same_formula",
            timeout=timeout,
            size=workers,
            memory_mb=3072,
        )
        self._ask = lru_cache(maxsize=4096)(self._pool.call)  # groups repeat answers

    def __reduce__(self) -> Any:
        return SymbolicChecker, (self._pool.timeout, self._pool.size)

    def equal(self, answer: str, want: str) -> bool:
        """Whether math-verify proves the formulas equal."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                f"comparing formulas needs math-verify; run {install_command('math')}, or use"
                " math_verifier(symbolic=False)"
            )
        return bool(self._ask(answer.replace(ROW, r"\\"), want.replace(ROW, r"\\")))


def same_formula(answer: str, want: str) -> bool:
    """The worker task: whether math-verify considers the formulas equal."""
    from math_verify import parse, verify

    pair = [
        parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True)
        for text in (want, answer)
    ]
    if not all(pair):
        return False
    return bool(verify(*pair, timeout_seconds=None, raise_on_error=True))


# Warm-up: imports and compiles everything.
same_formula.prepare = partial(same_formula, "x + 1", "1 + x")  # type: ignore[attr-defined]


# -- normal forms of LaTeX, with string operations only --------------------------------------------


def tidy(answer: str) -> str:
    r"""Reduce an answer to plain LaTeX without delimiters, spacing, units, degrees or dollar signs.

    ``\dfrac`` and similar become ``\frac``, and arguments get braces.
    """
    text = " ".join(answer[: 2 * MAX_LETTERS].split())
    for start, end in _DELIMITERS:
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end):
            text = text[len(start) : -len(end)].strip()
    text = text.replace("\\\\", ROW)
    for old, new in _NAMES:
        text = text.replace(old, new)
    text = " ".join(_DROP.sub("", text).split()).rstrip(" .;")
    text = _TEXT.sub(r"\1", _TEXT_UNIT.sub("", text)).strip()
    text = _WORD_UNIT.sub(r"\1", text)
    text = _REPEATING.sub(_repeating, text)
    for pattern, new in _SUBSTITUTIONS:
        text = pattern.sub(new, text)
    return text.strip()


def _repeating(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as a fraction: (all digits - non-repeating digits) / 90."""
    whole, once, again = match[1], match[2], match[3] or match[4]
    value = Fraction(
        int(whole + once + again) - int(whole + once or "0"),
        10 ** len(once) * (10 ** len(again) - 1),
    )
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def flatten(tidied: str) -> str:
    r"""Write simple fractions of a tidied answer as ``a/b``, and drop thousands separators."""
    text = re.sub(r"([_^])\s?\{\s?([0-9a-zA-Z]+)\s?\}", r"\1\2", tidied)
    text = _FLAT.sub(_fraction, text)
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def squeeze(tidied: str) -> str:
    """``flatten``, without whitespace."""
    return "".join(flatten(tidied).split())


def split_prefix(tidied: str) -> tuple[str, str]:
    r"""The variable left of ``=`` or ``\in`` ("" if it is not a single one), and the rest."""
    match = _PREFIX.match(tidied)
    rest = tidied[match.end() :] if match else ""
    if match is None or "=" in rest:
        return "", tidied
    return match[1], rest


def strip_parentheses(tidied: str) -> str:
    """Drop parentheses around a single value in a tidied answer."""
    while (
        tidied.startswith("(")
        and _closes_last(tidied)
        and len(_split(tidied[1:-1], SEPARATORS)) == 1
    ):
        tidied = tidied[1:-1].strip()
    return tidied


def _fraction(match: re.Match[str]) -> str:
    before = match.string[: match.start()].rstrip()[-1:]
    value = f"{match[1]}{match[2]}/{match[3]}"
    return f" {value}" if before.isdigit() else value


def split_group(tidied: str) -> tuple[str, list[str]] | None:
    r"""Kind and parts of a tuple, interval, set, list, union or matrix; None for one value.

    The kind is the opening and closing bracket, ``"set"`` for a list or set, ``"union"``, or
    ``"matrix"`` followed by the shape.
    """
    text = tidied.strip()
    matrix = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    if matrix:
        rows = [row.split("&") for row in matrix[1].split(ROW) if row.strip()]
        shape = "x".join(str(len(row)) for row in rows)
        return f"matrix{shape}", [cell.strip() for row in rows for cell in row]
    union = _split(text, (r"\cup",))
    if len(union) > 1:
        return "union", union
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set", _expand_signs(_split(text[2:-2].strip(), (",",)))
    listed = _expand_signs(_split(text, SEPARATORS))
    if len(listed) > 1:
        return "set", listed
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_last(text):
        inner = _split(text[1:-1], (",",))
        return (text[0] + text[-1], inner) if len(inner) > 1 else None
    return None


def _expand_signs(parts: list[str]) -> list[str]:
    r"""Expand each part that contains one ``\pm`` into two."""
    expanded = []
    for part in parts:
        signs = "+-" if part.count(r"\pm") == 1 else ""
        expanded += [part.replace(r"\pm", sign).strip() for sign in signs] or [part]
    return expanded


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Split at separators outside all brackets."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in ("(", "[", "{", r"\{"):
            depth += 1
        elif token[0] in (")", "]", "}", r"\}"):
            depth -= 1
        elif depth == 0 and token[0] in separators:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    parts.append(text[start:].strip())
    return [piece for piece in parts if piece] or [text]


def _closes_last(text: str) -> bool:
    """Whether the first bracket closes at the very end."""
    depth = 0
    for token in re.finditer(r"[()\[\]]", text):
        depth += 1 if token[0] in "([" else -1
        if depth == 0:
            return token.end() == len(text)
    return False


math = math_verifier()
accuracy_reward = math_verifier(column="solution", name="accuracy_reward")
