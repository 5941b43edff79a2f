"""The rules of the layout: sizes of files and folders, and words that are not used."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "kedge"

MAX_LINES = 400
MIN_LINES = 40
MAX_MODULES = 16
LARGE_FOLDERS = {SRC / "backends" / "hf"}

# Public shells: what users import or call, however short.
SHELLS = {
    "__main__.py",
    "cli/train/rloo.py",  # `kedge rloo`
    "cli/train/grpo.py",  # `kedge grpo`
    "cli/tools/doctor.py",  # `kedge doctor`
    "demo/prefer.py",  # a stage of `kedge demo`
    "trainers/async_ppo.py",  # `kedge.AsyncPPOTrainer`
    "cli/tools/report.py",  # `kedge report`
    # one formula or one record each, where the layout looks for it
    "engine/seeds.py",
    "engine/early_stopping.py",
    "math/rewards.py",
}

COMPARED = "longer|more|less|other|fewer|greater|larger|smaller|better|worse|doubt"
# Words with another word in their place; (word, what is written instead).
BANNED = {
    r"\b[Jj]udgements?\b": "reward output",
    r"\b[Ss]hipments?\b": "weight update",
    rf"(?<!here )\b(?:is|are) no (?!{COMPARED})\w+": "is not a ...; must be a ..., got ...",
    r"\bof (?:its|their|his|her|your|our|my) own\b": "separate, dedicated",
    r"\bgo(?:es)? on(?! the)\b": "resume, continue",
    r"\btold of\b": "logged, reported",
    r"\bmend(?:s|ed)?\b": "fix",
    r"\banew\b": "again",
    r"\bnobody\b": "no one",
    r"\bshall\b": "must, should, is to",
    r"\bbeside(?!s)\b": "next to, in addition to",
    r"\blearning rules?\b": "algorithm",
    r"\b[Oo]ptimis|\b[Hh]onour|\b[Bb]ehaviour|\b[Cc]olour": "American spelling",
    r"\b[Tt]okenis|\b[Nn]ormalis|\b[Ii]nitialis": "American spelling",
}
# Pages whose subject are the words themselves, and other people's words.
WORDS_ALLOWED = {"CHANGELOG.md"}


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def too_long() -> list[str]:
    return [name(p) for p in tracked("*.py", "src/*.js") if code_lines(p) > MAX_LINES]


def too_full() -> list[str]:
    folders: dict[Path, int] = {}
    for path in SRC.rglob("*.py"):
        if path.name != "__init__.py":
            folders[path.parent] = folders.get(path.parent, 0) + 1
    return [
        f"{name(folder)}: {count} modules"
        for folder, count in sorted(folders.items())
        if count > MAX_MODULES and folder not in LARGE_FOLDERS
    ]


def too_short() -> list[str]:
    return [
        f"{name(path)}: {code_lines(path)} lines"
        for path in sorted(SRC.rglob("*.py"))
        if path.name != "__init__.py"
        and str(path.relative_to(SRC)) not in SHELLS
        and code_lines(path) < MIN_LINES
    ]


def prose(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def banned_words(text: str) -> list[tuple[int, str, str]]:
    """Line, word and what to write instead."""
    return [
        (number, match[0], better)
        for pattern, better in BANNED.items()
        for number, line in enumerate(text.split("\n"), 1)
        for match in re.finditer(pattern, line)
    ]


def banned_in_files() -> list[str]:
    files = tracked(
        "src/*.py", "docs/*.md", "docs/*.py", "examples/*.py", "examples/*.md", "README.md"
    )
    return [
        f"{name(path)}:{line}: {word!r}, write: {better}"
        for path in files
        if path.name not in WORDS_ALLOWED
        for line, word, better in banned_words(prose(path))
    ]


def test_files_are_short() -> None:
    assert too_long() == []


def test_folders_are_small() -> None:
    assert too_full() == []


def test_modules_are_worth_a_file() -> None:
    assert too_short() == []


def test_words() -> None:
    assert banned_in_files() == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("model is no path", 1),
        ("it is no longer there", 0),
        ("a process of its own; the run goes on", 2),
        ("besides", 0),
    ],
)
def test_words_are_noticed(text: str, count: int) -> None:
    assert len(banned_words(text)) == count
