"""``docs/compatibility.md`` from the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.compat.cases import Case

VERSIONS = (  # a program that prints the versions of the packages in its arguments
    "import json, sys; from importlib.metadata import version, PackageNotFoundError\n"
    "def v(n):\n try: return version(n)\n except PackageNotFoundError: return None\n"
    "print(json.dumps({'python': sys.version.split()[0]} | {n: v(n) for n in sys.argv[1:]}))"
)
_SHOWN = ("llamafactory", "ms_swift", "trl", "transformers", "peft", "torch")


def write_results(file: Path, results: Mapping[str, Any]) -> None:
    """Write one row of the results on each line."""
    rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in results.items()]
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def write_page(
    cases: Sequence[Case], results: Mapping[str, Any], matrix: Mapping[str, Any], file: Path
) -> None:
    """Write the page from the results of the programs and of the fast tests."""
    lines = [_line(case, results[case.name]) for case in cases if case.name in results]
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    tests = [_tests(name, row) for name, row in matrix.items()]
    for place, rows in (("{rows}", lines), ("{tests}", tests)):
        template = template.replace(place, "\n".join(rows))
    file.write_text(template, encoding="utf-8")


def _tests(name: str, row: Mapping[str, Any]) -> str:
    versions = {package: version for package, version in row["versions"].items() if version}
    used = ", ".join(f"{p} {v}" for p, v in versions.items() if p != "python")
    failed = "".join(f"; `{test}`" for test in row["failures"])
    cells = (
        *(name, versions["python"], used, row["tests"], row["passed"]),
        *(f"{len(row['failures'])}{failed}", row["skipped"], row["date"]),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _line(case: Case, row: Mapping[str, Any]) -> str:
    versions = row.get("versions", {})
    used = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if versions.get(name))
    result = {True: "runs", False: "fails", None: "not run"}[row["ok"]]
    path = case.source.split(":")[-1].removeprefix("-m ")
    short = f" {' '.join(case.arguments)}" if 0 < len(case.arguments) < 3 else ""
    options = f"`{' '.join(case.compat)}`" if case.compat else ""
    day = row.get("date", "")
    notes = "; ".join(x for x in (case.note, row["why"]) if x).replace("|", "\\|")
    program = case.program
    if (own := versions.get(case.packages[0])) and not case.program.startswith("TRL"):
        program = f"{case.program} {own}"
    return f"| {program} | `{path}{short}` | {options} | {result} | {used} | {day} | {notes} |"
