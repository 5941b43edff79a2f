"""A pytest plugin that writes the outcome of every test at once, so that a run can go on later.

KEDGE_COMPAT_RECORD: the file, a line of JSON for each test.  Tests that it has as passed or skipped
are not run again.  KEDGE_COMPAT_WHOLE: set if the tests of all files run; their number is written,
and tests that no longer exist are removed from the record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

RECORD, WHOLE = "KEDGE_COMPAT_RECORD", "KEDGE_COMPAT_WHOLE"
DONE = ("passed", "skipped")
REMOVED = "removed"  # outcome of a test that was recorded and no longer exists


def read_record(file: Path) -> dict[str, str]:
    """The last outcome of each test, and the number of all under the name "total"."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else ()
    outcomes = {test: outcome for line in lines for test, outcome in json.loads(line).items()}
    return {test: outcome for test, outcome in outcomes.items() if outcome != REMOVED}


def stale(outcomes: Iterable[str], collected: Iterable[str]) -> set[str]:
    """Recorded tests that no longer exist, and files that could not be imported and now can."""
    tests = set(collected)
    files = {test.partition("::")[0] for test in tests}
    return {x for x in outcomes if (x not in tests if "::" in x else x in files)}


def _append(**outcome: str) -> None:
    with Path(os.environ[RECORD]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what has run."""
    outcomes = read_record(Path(os.environ[RECORD]))
    if WHOLE in os.environ and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        old = stale(outcomes, [item.nodeid for item in items])
        _append(total=str(len(items)), **dict.fromkeys(old, REMOVED))
    items[:] = [item for item in items if outcomes.get(item.nodeid) not in DONE]


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of a test, from the process that has those of all workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        _append(**{report.nodeid: report.outcome})


def pytest_collectreport(report: Any) -> None:
    """Write a file that cannot be imported as a failed test."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        _append(**{report.nodeid: "failed"})
