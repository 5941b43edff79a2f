"""The record of tests in several environments."""

import json

from tests.compat.record import REMOVED, read_record, stale


def test_tests_that_no_longer_exist_are_removed(tmp_path) -> None:
    recorded = {
        "a.py::kept": "passed",
        "a.py::renamed": "passed",
        "a.py": "failed",  # could not be imported then, and can now
        "b.py": "failed",
    }
    old = stale(recorded, ["a.py::kept", "a.py::new"])
    assert old == {"a.py::renamed", "a.py"}
    lines = [recorded, dict.fromkeys(old, REMOVED)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_record(tmp_path / "x.jsonl") == {"a.py::kept": "passed", "b.py": "failed"}
