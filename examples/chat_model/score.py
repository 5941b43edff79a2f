"""A table of completions of the chat example, by number of instructions and by instruction.

python examples/chat_model/score.py before.jsonl after.jsonl

The files are written by ``kedge generate`` from ``held_out.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kedge.verifiers import ConstraintVerifier, string_contains

followed = ConstraintVerifier(score="all")
named = string_contains.on("answer")


def judge(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, each with whether instruction and answer are right."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for one in rows:
        columns = {name: [one[name]] for name in ("instruction_id_list", "kwargs", "answer")}
        texts = [one["completion"]]
        one["followed"] = not one["instruction_id_list"] or followed(texts, **columns) == [1.0]
        one["named"] = named(texts, **columns) == [1.0]
    return rows


def share(rows: list[dict[str, Any]], test: Callable[[dict[str, Any]], Any]) -> str:
    """A percentage with the number of rows."""
    return f"{100 * sum(bool(test(one)) for one in rows) / len(rows):.1f}%" if rows else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("completions", type=Path, nargs="+", help="files of kedge generate")
    files = parser.parse_args().completions
    everything = [judge(path) for path in files]
    table = Table("", "prompts", *(path.stem for path in files))

    def add(
        title: str, test: Callable[[dict[str, Any]], Any], keep: Callable[[dict[str, Any]], Any]
    ) -> None:
        chosen = [[one for one in rows if keep(one)] for rows in everything]
        table.add_row(title, str(len(chosen[0])), *(share(rows, test) for rows in chosen))

    for number, words in ((1, "one instruction"), (2, "two instructions"), (0, "no instruction")):

        def here(one: dict[str, Any], number: int = number) -> bool:
            return len(one["instruction_id_list"]) == number

        if number:
            add(f"{words}: followed", lambda one: one["followed"], here)
        add(f"{words}: answer right", lambda one: one["named"], here)
        if number:
            add(f"{words}: both", lambda one: one["followed"] and one["named"], here)
    add("ended by itself", lambda one: one["finished"], lambda one: True)
    for name in sorted(
        {
            one["instruction_id_list"][0]
            for one in everything[0]
            if len(one["instruction_id_list"]) == 1
        }
    ):
        add(
            f"followed: {name.split(':')[1]}",
            lambda one: one["followed"],
            lambda one, name=name: one["instruction_id_list"] == [name],
        )
    words_per_answer = [
        sum(len(one["completion"].split()) for one in rows) / len(rows) for rows in everything
    ]
    table.add_row(
        "words per answer", str(len(everything[0])), *(f"{mean:.1f}" for mean in words_per_answer)
    )
    Console().print(table)


if __name__ == "__main__":
    main()
