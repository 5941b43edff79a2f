"""A pytest plugin that writes the outcome of every test at once, so that a run can go on later.

KEDGE_COMPAT_RECORD: the file, a line of JSON for each test.  Tests that it has as passed or skipped
are not run again.  KEDGE_COMPAT_WHOLE: set if the tests of all files run; their number is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

RECORD, WHOLE = "KEDGE_COMPAT_RECORD", "KEDGE_COMPAT_WHOLE"
DONE = ("passed", "skipped")


def read_record(file: Path) -> dict[str, str]:
    """The last outcome of each test, and the number of all under the name "total"."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else ()
    return {test: outcome for line in lines for test, outcome in json.loads(line).items()}


def _append(**outcome: str) -> None:
    with Path(os.environ[RECORD]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what has run."""
    if WHOLE in os.environ and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        _append(total=str(len(items)))
    outcomes = read_record(Path(os.environ[RECORD]))
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
