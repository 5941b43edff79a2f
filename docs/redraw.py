"""Compare the figures of the pages with the records that they are drawn from.

    python -m docs.redraw            rewrite the tables that a record holds
    python -m docs.redraw --check    fail where a page and its record differ
    python -m docs.redraw --count    list the blocks of each page that name none

A page names the record of a block (paragraph, list, table) in a comment in it or before it:

    <!-- record: FILE.json tables.NAME -->    the table is this one: {"columns": [], "rows": [[]]}
    <!-- record: FILE.json PATH PATH -->      each figure (a decimal, or a number with a unit) is
                                              a number below one of these paths, rounded; the first
                                              number of a path to one number or text is in the block

`*` in a path stands for every entry.  `<!-- records: FILE.json ... -->` anywhere in a page is the
record of all blocks of the page that name none.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
BLOCK = re.compile(r"<!-- record: (\S+\.json) ?(.*?) -->")
PAGE = re.compile(r"<!-- records: (.*?) -->")
# What looks like a figure and is none: code, links, formulas, comments, papers, versions, sizes.
NOT_MEASURED = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\$[^$]*\$|<!--.*?-->|\barXiv[: ]\S+|https?://\S+"
    r"|\b(?:TRL|PyTorch|torch|transformers|vLLM|Python|Qwen|Llama|GLM|GiGPO|DeepSeek|Gym|LFM|verl)"
    r"[ -]?v?\d[\w.+-]*|\b\d+(?:\.\d+)?[BMk]\b|\b95% (?:intervals?|within)|\(95%:?",
    re.DOTALL,
)
NUMBER = r"(?<![\w.,/])-?\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r" ?%| (?:CPU )?(?:seconds?|minutes?|m?s|[MG]i?B|nats|times (?:as|the)|tokens (?:per|a))\b"
FIGURE = re.compile(rf"({NUMBER})(?![\w-]|\.\d)({UNIT})?")


@functools.cache
def record(name: str) -> Any:
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


def below(value: Any, path: str) -> list[Any]:
    """Everything that a dotted path leads to."""
    places = [value]
    for name in filter(None, path.split(".")):
        found: list[Any] = []
        for place in places:
            if name == "*":
                found += place.values() if isinstance(place, dict) else place
            elif isinstance(place, list):
                found.append(place[int(name)])
            elif name in place:
                found.append(place[name])
        places = found
    if not places:
        raise KeyError(path)
    return places


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for entry in value:
            yield from numbers(entry)
    elif isinstance(value, str):
        yield from (float(x.replace(",", "")) for x in re.findall(NUMBER, value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def figures(text: str, *, every: bool = False) -> list[tuple[float, float, bool]]:
    """Decimals, and numbers with a unit: value, half a unit of the last digit, whether a share."""
    found = []
    for digits, unit in FIGURE.findall(NOT_MEASURED.sub(" ", text)):
        if every or unit or "." in digits:
            places = len(digits.partition(".")[2])
            value = float(digits.replace(",", ""))
            found.append((value, 0.5000001 * 10**-places, "%" in unit))
    return found


def is_drawn(figure: tuple[float, float, bool], known: list[float]) -> bool:
    value, half, share = figure
    scales = (1, 100) if share else (1, 1000, 0.001)  # also seconds of ms, GB of MB
    return any(abs(abs(scale * x) - abs(value)) <= half for x in known for scale in scales)


def table(rows: dict[str, list[Any]]) -> str:
    lines = [rows["columns"], ["---"] * len(rows["columns"]), *rows["rows"]]
    cells = (" | ".join(map(str, line)).strip() for line in lines)
    return "\n".join(f"| {line} |".replace("| |", "| |") for line in cells).replace(
        "| --- ", "|---"
    )


def blocks(text: str) -> list[str]:
    """Parts between blank lines; fenced code is one part."""
    parts: list[str] = []
    fenced = False
    for part in re.split(r"(\n\s*\n)", text):
        if fenced:
            parts[-1] += part
        else:
            parts.append(part)
        fenced ^= bool(part.count("```") % 2)
    return parts


def normal(text: str) -> list[str]:
    """A table's lines without the width of cells."""
    lines = [line for line in text.strip().splitlines() if line.lstrip().startswith("|")]
    return [re.sub(r"\s*\|\s*", "|", line.strip()) for line in lines]


class Page:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.text = file.read_text(encoding="utf-8")
        self.mistakes: list[str] = []
        self.drawn = 0
        self.without: list[str] = []

    def check(self) -> None:
        whole = [name for names in PAGE.findall(self.text) for name in names.split()]
        waiting: list[tuple[str, str]] = []
        for part in blocks(self.text):
            named = BLOCK.findall(part)
            if named and not re.sub(r"<!--.*?-->", "", part, flags=re.DOTALL).strip():
                waiting = named
            elif part.strip():
                self._block(part, named + waiting, whole)
                waiting = []

    def _block(self, part: str, named: list[tuple[str, str]], whole: list[str]) -> None:
        if named:
            known = [x for name, paths in named for x in self._named(part, name, paths)]
        elif part.lstrip("\n").startswith(("```", "    ")):
            return
        elif whole:
            known = [x for name in whole for x in numbers(record(name))]
        else:
            if any(unit for _, unit in FIGURE.findall(NOT_MEASURED.sub(" ", part))):
                self.without.append(part.strip().splitlines()[0][:90])
            return
        self.drawn += bool(figures(part))
        for figure in figures(part):
            if not is_drawn(figure, known):
                self._wrong(part, f"no record has {figure[0]:g}{'%' * figure[2]}")

    def _named(self, part: str, name: str, paths: str) -> Iterator[float]:
        """The numbers below the paths that a block names; what the block should have of them."""
        for path in paths.split() or [""]:
            try:
                found = below(record(name), path)
            except (KeyError, IndexError, ValueError, FileNotFoundError):
                self._wrong(part, f"{name} has no {path}")
                continue
            yield from (x for value in found for x in numbers(value))
            kind = type(found[0]) if len(found) == 1 else list
            if kind is dict and "rows" in found[0] and normal(part) != normal(table(found[0])):
                self._wrong(part, f"differs from {path} of {name}")
                self.text = self.text.replace(part.strip("\n"), table(found[0]))
            first = [] if kind in (dict, list) else [*numbers(found[0])][:1]
            if first and not any(is_drawn(f, first) for f in figures(part, every=True)):
                self._wrong(part, f"does not state {path} of {name}: {found[0]}")

    def _wrong(self, part: str, why: str) -> None:
        first = re.sub(r"<!--.*?-->", "", part, flags=re.DOTALL).strip().splitlines()[0]
        self.mistakes.append(f"{self.file.relative_to(ROOT)}: {why}: {first[:70]}")


def main(words: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="docs.redraw")
    flags.add_argument("--check", action="store_true", help="Change nothing; fail on a difference.")
    flags.add_argument("--count", action="store_true", help="List blocks that name no record.")
    args = flags.parse_args(words)
    pages = [Page(file) for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
    for page in pages:
        page.check()
        if args.count:
            print(f"{page.drawn:4} {len(page.without):4}  {page.file.relative_to(ROOT)}")
            print("".join(f"           {first}\n" for first in page.without), end="")
        elif not args.check:
            page.file.write_text(page.text, encoding="utf-8")
    mistakes = [mistake for page in pages for mistake in page.mistakes]
    sys.stderr.writelines(f"{mistake}\n" for mistake in mistakes)
    return int(bool(mistakes))


if __name__ == "__main__":
    sys.exit(main())
