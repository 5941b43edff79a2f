"""Rewards for programs: does the code of a response pass its tests?"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from kedge.errors import RewardError
from kedge.verifiers.base import Unanswered, Verifier, read_record
from kedge.verifiers.sandbox.sandbox import Sandbox

MAX_LETTERS = 200_000  # of a program; a longer one scores 0
EXAMPLE = '{"tests": ["assert add(1, 2) == 3"]} or {"inputs": ["1 2"], "outputs": ["3"]}'
_PYTHON = ("", "python", "py", "python3")
_TILDES = re.compile(r"^([ \t]*)~~~", re.MULTILINE)
_DEFINED = re.compile(r"\b(?:def|class)[ \t]+(\w+)")
_NAME = re.compile(r"\b[^\W\d]\w*")


def code_verifier(
    *,
    column: str = "ground_truth",
    sandbox: Sandbox | str | None = None,
    partial_credit: bool = False,
    workers: int | None = None,
    name: str = "code",
) -> Verifier:
    """A verifier of Python programs: 1 if the code of a response passes all its tests, else 0.

    The code is the last fenced block of the response that defines what is under test (without
    ``entry_point``: anything that a test names), else its last Python block, else all of it.  The
    ground truth is a mapping, or JSON of one:

    * ``tests`` (or ``test``): text, or a list of texts, each Python that raises unless the solution
      is right.  They see functions, classes and constants of the solution by name.
    * ``entry_point``: optional; the function or class under test, to which a test may also refer as
      ``candidate``.  If a test defines ``check``, ``check(candidate)`` is called, as in HumanEval.
    * ``prefix`` (or ``prompt``): optional; trusted code in front of the response's.
    * or ``inputs`` and ``outputs``: lists of texts; the program reads one from standard input and
      must print the other.  Blanks at the end of lines do not count.

    Code that takes too long or breaks its process scores 0 and is counted in ``timeouts/<name>`` or
    ``crashes/<name>``.

    Programs run only where the kernel isolates them: with bubblewrap or in user namespaces.
    Elsewhere the first call, and a trainer before it loads a model, raises ConfigError.

    Args:
        column: dataset column with the ground truth.
        sandbox: limits and isolation, or the isolation alone: ``"bubblewrap"``, ``"namespaces"`` or
            ``"audit"``, which does not need the kernel's help and does not stop a program that
            attacks the interpreter.  The default is ``Sandbox()``.
        partial_credit: score the share of tests passed.
        workers: solutions run at the same time; the default is the number of processors.
        name: of the verifier.
    """
    chosen = Sandbox(isolation=sandbox) if isinstance(sandbox, str) else sandbox or Sandbox()
    return Verifier(
        partial(_check, sandbox=chosen, share=partial_credit, name=name),
        name=name,
        column=column,
        threads=workers or os.cpu_count() or 1,
        prepare=chosen.level,
    )


def extract_code(response: str, entry_point: str = "", tests: Sequence[str] = ()) -> str:
    """The program in a response.

    Args:
        response: all of it.
        entry_point: what is under test, if it has a name.
        tests: without one, blocks that define a name in these go before those that do not.
    """
    pieces = _TILDES.sub(r"\1```", response).split("```")
    blocks = []
    for before, block in zip(pieces[::2], pieces[1::2], strict=False):
        language, _, body = block.partition("\n")
        if (language.split() or [""])[0].strip("{}.").lower() not in _PYTHON:
            continue
        indent = before.rpartition("\n")[2]
        if indent and indent.isspace():  # within a list
            body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        blocks.append(body)
    if not blocks:
        return response
    wanted = {entry_point} if entry_point else set(_NAME.findall("\n".join(tests)))
    defining = [block for block in blocks if wanted & set(_DEFINED.findall(block))]
    return (defining or blocks)[-1]


def _check(text: str, truth: Any, *, sandbox: Sandbox, share: bool, name: str) -> float:
    record = read_record(truth, name, EXAMPLE)
    entry_point = str(record.get("entry_point", ""))
    prefix = str(record.get("prefix", record.get("prompt", "")))
    tests = [] if "inputs" in record else _tests(record, entry_point, name)
    code = extract_code(text, entry_point, tests)
    if len(code) > MAX_LETTERS:
        return 0.0
    joint = "\n" if code is not text else ""  # a bare response goes on where the prefix ends
    program = f"{prefix}{joint}{code}".replace("\x00", "")
    if "inputs" in record:
        inputs, outputs = _cases(record, name)
        passed, stopped = _run_cases(program, inputs, outputs, sandbox, stop_early=not share)
    else:
        outcome = sandbox.test(program, tests, entry_point=entry_point, prefix=prefix)
        passed, stopped = list(outcome.passed), outcome.stopped
        if outcome.broken:
            raise RewardError(f"verifier {name}: {outcome.broken}")
    if share:
        return sum(passed) / len(passed)
    if stopped and not all(passed):
        raise Unanswered(stopped)
    return float(all(passed))


def _tests(record: dict[str, Any], entry_point: str, name: str) -> list[str]:
    tests = record.get("tests", record.get("test"))
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise RewardError(
            f"verifier {name}: the ground truth has no tests (keys {sorted(record)}); expected for"
            f" example {EXAMPLE}"
        )
    if entry_point and not entry_point.isidentifier():
        raise RewardError(f"verifier {name}: entry_point={entry_point!r} is no name of a function")
    call = "\ncheck(candidate)" if entry_point else ""
    return [f"{test}{call if 'def check(' in test else ''}" for test in tests]


def _cases(record: dict[str, Any], name: str) -> tuple[list[str], list[str]]:
    inputs, outputs = record["inputs"], record.get("outputs")
    lists = isinstance(inputs, list) and isinstance(outputs, list)
    if not lists or not inputs or len(inputs) != len(outputs or ()):
        raise RewardError(
            f"verifier {name}: inputs and outputs must be lists of texts of equal length; expected"
            f" for example {EXAMPLE}"
        )
    return [str(text) for text in inputs], [str(text) for text in outputs or ()]


def _run_cases(
    program: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    sandbox: Sandbox,
    *,
    stop_early: bool,
) -> tuple[list[bool], str]:
    passed, stopped = [], ""
    for given, wanted in zip(inputs, outputs, strict=True):
        outcome = sandbox.run(program, given)
        right = not outcome.stopped and _lines(outcome.output) == _lines(wanted)
        passed.append(right)
        stopped = stopped or outcome.stopped
        if stop_early and not right:
            break
    return passed, stopped


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


code = code_verifier()
