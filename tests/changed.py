"""Prints the test files that touch what changed since the last commit on main: `make check`.

A test file is one of them if it changed itself, or imports a module that changed.  Tests that train
whole runs (`tests/e2e`, `tests/on_ray`) are left to `make test`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICK = ("unit", "property", "reference", "architecture")


def changed_files() -> set[str]:
    """Paths that differ from where this branch left main, or from HEAD, and new files."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return run.stdout

    base = git("merge-base", "HEAD", "main").strip() or "HEAD"
    return {
        *git("diff", "--name-only", base).split(),
        *git("ls-files", "-o", "--exclude-standard").split(),
    }


def tests_of(changed: Iterable[str]) -> list[str]:
    """The quick test files that changed, or import a module that did."""
    modules = {
        path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in changed
        if path.startswith("src/kedge/") and path.endswith(".py")
    }
    names = "|".join(re.escape(name) for name in sorted(modules))
    imports = re.compile(rf"^\s*(?:from|import) (?:{names})(?= )", re.MULTILINE) if names else None
    files = (
        path for folder in QUICK for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
    )
    return [
        str(path.relative_to(ROOT))
        for path in files
        if str(path.relative_to(ROOT)) in changed
        or (imports is not None and imports.search(path.read_text(encoding="utf-8")))
    ]


if __name__ == "__main__":
    sys.stdout.write(" ".join(tests_of(changed_files())))
