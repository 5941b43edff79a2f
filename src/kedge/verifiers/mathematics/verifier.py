"""Equality of mathematical answers (MATH and similar)."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache, partial
from typing import Any

from kedge.errors import ConfigError, RewardError, install_command
from kedge.verifiers.answers import marked_answer, stated_answer
from kedge.verifiers.base import Unanswered, Verifier
from kedge.verifiers.mathematics.arithmetic import same_number
from kedge.verifiers.mathematics.latex import (
    MAX_LETTERS,
    ROW,
    bare,
    flat,
    group,
    prefix,
    squeezed,
    tidy,
)
from kedge.verifiers.mathematics.numbers import one_number
from kedge.verifiers.worker import TaskError, WorkerPool

MAX_PARTS = 24  # of a set or matrix
MAX_DEPTH = 20  # of brackets in a formula
SHORT = 100  # characters of a response that counts as an answer without a mark
_MATH = re.compile(r"\$\$(.{1,1000}?)\$\$|\$([^$]{1,1000})\$|\\\((.{1,1000}?)\\\)", re.DOTALL)
_OPENING = {"}": "{", ")": "(", "]": "["}
_WORDS = re.compile(r"\(?[A-Za-z]+(?:[ '-][A-Za-z]+)*\)?")
_MODULO = re.compile(r"\\[bp]?mod(?![a-z])")
_SENTENCE = re.compile(r"\.(?:\s|\Z)")


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
        name: of the verifier.
    """
    checker = SymbolicChecker(timeout, workers) if symbolic else None

    check = partial(_check, checker=checker, name=name)
    return Verifier(check, name=name, column=column, threads=workers if symbolic else 1)


def _check(text: str, truth: Any, *, checker: SymbolicChecker | None, name: str) -> float:
    want = _truth(truth, name)
    answer = final_answer(text)
    return float(answer is not None and equal(answer, want, checker))


def final_answer(text: str) -> str | None:
    """The final answer of a response as written, or None."""
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
    answer, want = bare(answer), bare(want)
    (variable, left), (wanted, right) = prefix(answer), prefix(want)
    if variable and wanted and variable != wanted:
        left, right = answer, want
    left, right = bare(left), bare(right)
    if squeezed(left) == squeezed(right):
        return True
    one, other = one_number(flat(left)), one_number(flat(right))
    if one is not None and other is not None:
        return same_number(one, other)
    if _WORDS.fullmatch(right) and len(right) > 1:
        return _word(left) == _word(right)
    if _contradict(left, right):
        return False
    parts, wanted_parts = group(left), group(right)
    if (parts is None) != (wanted_parts is None) and (one is not None or other is not None):
        left, right, parts, wanted_parts = flat(left), flat(right), None, None  # 1,000 is a number
    if parts is not None or wanted_parts is not None:
        if parts is None or wanted_parts is None or parts.kind != wanted_parts.kind:
            return False
        return _all_equal(parts.parts, wanted_parts.parts, parts.ordered, checker)
    if checker is None or not (_well_formed(left) and _well_formed(right)):
        return False
    whole = "=" in answer and "=" in want
    return checker.equal(answer, want) if whole else checker.equal(left, right)


def _contradict(left: str, right: str) -> bool:
    """Whether an answer differs from what is wanted in a way that math-verify overlooks."""
    if "_" in right or bool(_MODULO.search(left)) != bool(_MODULO.search(right)):
        return True  # a number in another base, or a remainder
    want = one_number(flat(right))
    if want is None:
        return False
    sides = [one_number(flat(side)) for side in left.split("=")[:-1]]  # 3 = 4
    differ = any(side is not None and not same_number(side, want) for side in sides)
    return differ or (left.startswith("[") and "," in left)  # an interval


def _all_equal(
    answer: tuple[str, ...], want: tuple[str, ...], ordered: bool, checker: SymbolicChecker | None
) -> bool:
    if len(answer) != len(want) or len(want) > MAX_PARTS:
        return False
    if ordered:
        return all(_equal(a, b, checker) for a, b in zip(answer, want, strict=True))
    rest = list(answer)
    for part in want:
        match = next((i for i, one in enumerate(rest) if _equal(one, part, None)), None)
        if match is None:
            match = next((i for i, one in enumerate(rest) if _equal(one, part, checker)), None)
        if match is None:
            return False
        del rest[match]
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


def _word(text: str) -> str:
    return "".join(text.casefold().split()).strip("()")


def _inner(formula: re.Match[str]) -> str | None:
    return next((g.strip() for g in formula.groups() if g and g.strip()), None)


def _truth(truth: Any, name: str) -> str:
    if isinstance(truth, (int, float)) and not isinstance(truth, bool):
        return format(truth, ".12g")
    if not isinstance(truth, str) or not truth.strip():
        raise RewardError(
            f"verifier {name}: the ground truth must be a number or non-empty text, got {truth!r}"
        )
    boxed = marked_answer(truth)
    return boxed or truth


class SymbolicChecker:
    """Compares formulas with math-verify in helper processes, with a time limit for each pair."""

    def __init__(self, timeout: float = 5.0, workers: int = 2) -> None:
        self._pool = WorkerPool(
            "kedge.verifiers.mathematics.verifier:same_formula",
            timeout=timeout,
            size=workers,
            memory_mb=3072,
        )
        self._ask = lru_cache(maxsize=4096)(self._pool.call)  # responses of a group repeat answers

    def __reduce__(self) -> Any:
        return SymbolicChecker, (self._pool.timeout, self._pool.size)

    def equal(self, answer: str, want: str) -> bool:
        """Whether math-verify proves the formulas equal."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                f"comparing formulas needs math-verify; run {install_command('math')}, or use"
                " math_verifier(symbolic=False)"
            )
        try:
            return bool(self._ask(answer.replace(ROW, r"\\"), want.replace(ROW, r"\\")))
        except TaskError as error:
            raise Unanswered("crashes", str(error)) from error


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


def _prepare() -> None:
    same_formula("x + 1", "1 + x")  # imports and compiles everything in advance


same_formula.prepare = _prepare  # type: ignore[attr-defined]
math = math_verifier()
accuracy_reward = math_verifier(column="solution", name="accuracy_reward")
