"""The tables of options and metrics in docs/algorithms, made from the code.

python -m kedge.engine.rules_page docs/algorithms      rewrites them in place
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kedge.algorithms import BUILTIN
from kedge.engine.metrics import NAMES, OF_ALL_RULES, OF_RULE


def options_table(rule: Callable[..., Any]) -> str:
    """Every option of a rule: name, default, what it does."""
    said = described(rule)
    lines = ["| option | default | |", "|---|---|---|"]
    for name, parameter in inspect.signature(rule).parameters.items():
        lines.append(f"| `{name}` | `{parameter.default!r}` | {said[name]} |")
    return "\n".join(lines)


def described(rule: Callable[..., Any]) -> dict[str, str]:
    """``name -> text`` of the docstring's Args."""
    text = inspect.cleandoc(rule.__doc__ or "")
    _, _, after = text.partition("Args:\n")
    block = re.split(r"\n\s*\n", after, maxsplit=1)[0]
    found: dict[str, str] = {}
    for part in re.split(r"\n {4}(?=\w+: )", "\n" + block.rstrip()):
        name, colon, words = part.strip().partition(": ")
        if colon:
            found[name] = " ".join(words.split()).replace("``", "`")
    return found


def metrics_table(rule: str) -> str:
    """Every metric that a rule logs of an update: name, what it means."""
    names = [*OF_ALL_RULES, *OF_RULE[rule]]
    rows = [
        f"| `{name}` | {NAMES[name].replace('|', chr(92) + '|')} |"
        for name in NAMES
        if name in names
    ]
    return "\n".join(["| metric | |", "|---|---|", *rows])


def renewed(page: str, rule: str) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: it has no place for one of them.
    """
    tables = {"options": options_table(BUILTIN[rule]), "metrics": metrics_table(rule)}
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if not (begin in page and end in page):
            raise ValueError(f"{rule}: the page has no {begin} ... {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


def main(folder: str) -> None:
    """Rewrite the tables of every page in ``folder``."""
    for name in BUILTIN:
        file = Path(folder) / f"{name}.md"
        file.write_text(renewed(file.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
