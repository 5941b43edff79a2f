"""The tables of options in docs/algorithms, made from signatures and docstrings.

python -m kedge.algorithms.reference docs/algorithms      rewrites them in place
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kedge.algorithms import BUILTIN

BEGIN, END = "<!-- options -->", "<!-- end of options -->"


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


def renewed(page: str, rule: Callable[..., Any]) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{options_table(rule)}\n{END}{after}"


def main(folder: str) -> None:
    """Rewrite the tables of every page in ``folder``."""
    for name, rule in BUILTIN.items():
        file = Path(folder) / f"{name}.md"
        file.write_text(renewed(file.read_text(encoding="utf-8"), rule), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
