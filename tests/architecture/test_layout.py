"""The name under which Kedge is installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# `kedge` on the package index is another project: as a requirement, or as what is installed.
BARE_NAME = re.compile(
    r"(?<![\w/.-])kedge(?:\[|\s*[=<>~!]=|\s+@\s)"
    r"|(?:install|add|--from|uvx|pipx run)(?:\s+-\S+)*\s+\\?[\"']?kedge(?![\w.-])"
)


def test_no_line_installs_the_other_kedge() -> None:
    suffixes = ("py", "md", "ipynb", "toml", "yaml", "yml", "txt", "sh")
    files = tracked("Makefile", "Dockerfile", ".ci/*", *(f"*.{suffix}" for suffix in suffixes))
    assert [
        f"{name(path)}:{number}: {match[0]!r}, write: kedge-rl"
        for path in files
        if path.name not in ("CHANGELOG.md", Path(__file__).name)
        for number, line in enumerate(prose(path).split("\n"), 1)
        for match in BARE_NAME.finditer(line)
    ] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("pip install 'kedge[sft]'", True),
        ('%pip install -q \\"kedge[sft]\\"', True),
        ("pip install kedge", True),
        ('uvx --from "kedge" kedge ppo', True),
        ("kedge>=0.1", True),
        ("pip install -e '.[sft]'  # and the command `kedge`", False),
        ("uvx --from 'kedge-rl[sft] @ git+https://host/kedge' kedge ppo", False),
        ('pip install "/kedge[peft]"', False),
    ],
)
def test_an_install_line_is_noticed(line: str, wrong: bool) -> None:
    assert bool(BARE_NAME.search(line)) == wrong


def test_extras_that_are_named_exist() -> None:
    from kedge.records.errors import DISTRIBUTION

    project = prose(ROOT / "pyproject.toml")
    assert f'\nname = "{DISTRIBUTION}"' in project
    extras = re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1], re.M)
    named = re.compile(r"install_command\('(\w+)'\)|(?:\.|kedge-rl)\[([a-z,]+)\]")
    found = [
        extra
        for path in tracked("src/*.py", "docs/*.md", "README.md", "Makefile", "*.ipynb")
        for match in named.finditer(prose(path))
        for extra in (match[1] or match[2]).split(",")
    ]
    assert len(found) > 25
    assert set(found) <= set(extras)
