"""Rewards for code: does the program in a response pass its tests?"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from kedge.ext.sandbox import Sandbox
from kedge.records.errors import RewardError
from kedge.verifiers.base import Unanswered, Verifier, read_record

logger = logging.getLogger(__name__)

MAX_LETTERS = 200_000  # per program; longer ones score 0
EXAMPLE = '{"tests": ["assert add(1, 2) == 3"]} or {"inputs": ["1 2"], "outputs": ["3"]}'
_PYTHON = ("", "python", "py", "python3")
_TILDES = re.compile(r"^([ \t]*)~~~", re.MULTILINE)
_DEFINED = re.compile(r"\b(?:def|class)[ \t]+(\w+)")
_NAME = re.compile(r"\b[^\W\d]\w*")
_warned: list[str] = []  # the first test that could not be run


def code_verifier(
    *,
    column: str = "ground_truth",
    sandbox: Sandbox | str | None = None,
    partial_credit: bool = False,
    workers: int | None = None,
    name: str = "code",
) -> Verifier:
    """A verifier of Python programs: 1 if the code of a response passes all its tests, else 0.

    The code is the last fenced block that defines the code under test (without ``entry_point``: any
    name used in a test), else the last Python block, else the whole response.  The ground truth is
    a mapping or a JSON object:

    * ``tests`` (or ``test``): a string or list of strings of Python that raises unless the solution
      is correct.  Functions, classes and constants of the solution are available by name.
    * ``entry_point``: optional; the function or class under test, also available to tests as
      ``candidate``.  If a test defines ``check``, ``check(candidate)`` is called, as in HumanEval;
      functions ``test_*`` and classes of unittest are called too.
    * ``prefix`` (or ``prompt``): optional; trusted code placed before that of the response.
    * or ``inputs`` and ``outputs``: lists of strings; the program reads one from standard input and
      must print the other.  Trailing whitespace is ignored.

    Code that times out or crashes its process scores 0 and is counted in ``timeouts/<name>`` or
    ``crashes/<name>``.

    Tests that no program could fail are a mistake in the dataset and raise RewardError: they call
    the solution nowhere, or compare without ``assert``.  A test that needs a value that cannot be
    sent from the solution's process to the tests (a function as an argument, ...)
    scores 0 and is counted in ``untestable/<name>``.

    Programs run only in bubblewrap.  Without it, the first call raises ConfigError, and so does a
    trainer before it loads a model.

    Args:
        column: dataset column with the ground truth.
        sandbox: limits and isolation, or only the isolation: ``"bubblewrap"``, or ``"none"``, for
            a container or virtual machine that you can lose.  Default: ``Sandbox()``.
        partial_credit: score the share of tests passed.
        workers: solutions run concurrently; default: the number of CPUs.
        name: name of the verifier.
    """
    chosen = Sandbox(isolation=sandbox) if isinstance(sandbox, str) else sandbox or Sandbox()
    return Verifier(
        partial(_check, sandbox=chosen, share=partial_credit),
        name=name,
        column=column,
        threads=workers or os.cpu_count() or 1,
        prepare=chosen.prepare,
    )


def extract_code(response: str, entry_point: str = "", tests: Sequence[str] = ()) -> str:
    """The program in a response.

    Blocks that define ``entry_point`` are preferred; without it, those that define a name used in
    ``tests``.
    """
    parts = _TILDES.sub(r"\1```", response).split("```")
    blocks = []
    for before, block in zip(parts[::2], parts[1::2], strict=False):
        language, _, body = block.partition("\n")
        if (language.split() or [""])[0].strip("{}.").lower() not in _PYTHON:
            continue
        indent = before.rpartition("\n")[2]
        if indent and indent.isspace():  # a block in a list
            body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        blocks.append(body)
    if not blocks:
        return response
    wanted = {entry_point} if entry_point else set(_NAME.findall("\n".join(tests)))
    defining = [block for block in blocks if wanted & set(_DEFINED.findall(block))]
    return (defining or blocks)[-1]


def _check(text: str, truth: Any, *, sandbox: Sandbox, share: bool) -> float:
    record = read_record(truth, EXAMPLE)
    entry_point = str(record.get("entry_point", ""))
    prefix = str(record.get("prefix", record.get("prompt", "")))
    cases = _read_cases(record) if "inputs" in record else []
    tests = [] if cases else _read_tests(record, entry_point)
    code = extract_code(text, entry_point, tests)
    if len(code) > MAX_LETTERS:
        return 0.0
    joint = "\n" if code is not text else ""  # a bare response continues the prefix directly
    program = f"{prefix}{joint}{code}".replace("\x00", "")
    passed, stopped, error = [], "", ""
    for stdin, expected in cases:
        outcome = sandbox.run(program, stdin)
        passed.append(not outcome.error and _lines(outcome.output) == _lines(expected))
        stopped = stopped or outcome.stopped
        if not passed[-1] and not share:
            break
    if tests:
        outcome = sandbox.test(program, tests, entry_point=entry_point, prefix=prefix)
        passed, stopped, error = list(outcome.passed), outcome.stopped, outcome.error
        if outcome.broken:
            raise RewardError(outcome.broken)
    if share:
        return sum(passed) / len(passed)
    if stopped and not all(passed):
        if stopped == "untestable":
            warn_untestable(error)
        raise Unanswered(stopped)
    return float(all(passed))


def warn_untestable(reason: str) -> None:
    """Warn once; the reason may hold text of the policy."""
    if _warned:
        return
    _warned.append(reason)
    logger.warning(
        "tests cannot be run in the sandbox (the first: %s): their rows score 0 and are counted in"
        " untestable",
        ascii(reason[:200]),
    )


def _read_tests(record: dict[str, Any], entry_point: str) -> list[str]:
    tests = record.get("tests", record.get("test"))
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise RewardError(
            f"the ground truth must have tests, for example {EXAMPLE}; got keys {sorted(record)}"
        )
    if entry_point and not entry_point.isidentifier():
        raise RewardError(f"entry_point must be the name of a function, got {entry_point!r}")
    return tests


def _read_cases(record: dict[str, Any]) -> list[tuple[str, str]]:
    inputs, outputs = record["inputs"], record.get("outputs")
    lists = isinstance(inputs, list) and isinstance(outputs, list)
    if not lists or not inputs or len(inputs) != len(outputs or ()):
        raise RewardError(
            "inputs and outputs must be non-empty lists of strings of equal length, for example"
            f" {EXAMPLE}"
        )
    return [(str(one), str(other)) for one, other in zip(inputs, outputs or (), strict=True)]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


code = code_verifier()
