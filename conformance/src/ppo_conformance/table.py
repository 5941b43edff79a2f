"""Tables in Markdown: the known errors, and the libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ppo_conformance import cases, mutants
from ppo_conformance.families import FAMILIES


def mutant_table() -> str:
    """The known errors with the first case that catches each, and the cases that catch none."""
    every = list(cases.load())
    caught: dict[tuple[str, str], list[str]] = {}
    for case in every:
        for name in case.tells_apart:
            caught.setdefault((case.family.name, name), []).append(case.name)
    lines = ["| family | error | seen in | caught by |", "|---|---|---|---|"]
    for m in mutants.MUTANTS:
        found = caught.get((m.family, m.name), [])
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        by = f"{found[0]}{more}" if found else "**no case**"
        lines.append(f"| {m.family} | {m.name} | {m.found} | {by} |")
    idle = [case.name for case in every if not case.tells_apart]
    total = f"{len(mutants.MUTANTS)} errors, {len(every)} cases"
    return "\n".join([*lines, "", f"{total}; cases that catch none: {', '.join(idle) or 'none'}"])


def conformance_table(records: list[Path]) -> str:
    """A row per family, a column per library; then the differences and what cannot be called."""
    runs = [json.loads(path.read_text("utf-8")) for path in records]
    names = [f"{r['library']} {r['version']}".strip() for r in runs]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(runs)]
    for family in FAMILIES.values():
        cells = [_cell(_of(r, family.name)) for r in runs]
        lines.append(f"| {family.title} | " + " | ".join(cells) + " |")
    totals = []
    for r in runs:
        offered = [x for x in r["cases"].values() if x["status"] != "not offered"]
        totals.append(f"**{_agreeing(offered)} of {len(offered)}**")
    lines.append("| all | " + " | ".join(totals) + " |")
    lines += ["", _LEGEND, "", "## Where they differ", ""]
    for name, r in zip(names, runs, strict=True):
        lines += _differences(name, r)
    lines += ["## Agreement by another convention", ""]
    lines += [line for n, r in zip(names, runs, strict=True) for line in _conventions(n, r)]
    lines += ["", "## What cannot be called, and why", ""]
    for name, r in zip(names, runs, strict=True):
        reasons = [f"{FAMILIES[k].title}: {why}" for k, why in r["not_callable"].items()]
        if reasons:
            lines.append(f"- **{name}** " + "; ".join(reasons))
    return "\n".join(lines) + "\n"


def summary_table(records: list[Path]) -> str:
    """A row per library: how many of the cases that it offers agree, and where it differs."""
    lines = ["| library | agree | differs in |", "|---|---|---|"]
    for path in records:
        r = json.loads(path.read_text("utf-8"))
        offered = [x for x in r["cases"].values() if x["status"] != "not offered"]
        titles = []
        for family in FAMILIES.values():
            rest = [x for x in _of(r, family.name) if x["status"] in {"differs", "fails"}]
            if rest:
                mark = " (documented)" if all("documented" in x for x in rest) else ""
                titles.append(family.title + mark)
        name = f"{r['library']} {r['version']}".strip()
        lines.append(
            f"| {name} | {_agreeing(offered)} of {len(offered)} | {', '.join(titles) or '-'} |"
        )
    return "\n".join(lines) + "\n"


_LEGEND = (
    "Cases that agree, of those that the library offers. `-`: not offered, not callable by itself "
    "or not tested yet (the reason is below). `d`: all that differ are documented by the library. "
    "A difference is not the same as a bug; the notes say what limits it."
)


def _of(record: dict[str, Any], family: str) -> list[dict[str, Any]]:
    return [x for name, x in record["cases"].items() if name.split("/")[0] == family]


def _agreeing(found: list[dict[str, Any]]) -> int:
    return sum(x["status"] == "agrees" for x in found)


def _cell(found: list[dict[str, Any]]) -> str:
    offered = [x for x in found if x["status"] != "not offered"]
    if not offered:
        return "-"
    good = _agreeing(offered)
    if good == len(offered):
        return f"{good}"
    rest = [x for x in offered if x["status"] != "agrees"]
    return f"**{good} of {len(offered)}**" + (" d" if all("documented" in x for x in rest) else "")


def _differences(name: str, record: dict[str, Any]) -> list[str]:
    lines = []
    for family in FAMILIES.values():
        found = {
            n.split("/")[1]: x for n, x in record["cases"].items() if _is_wrong(family.name, n, x)
        }
        if found:
            lines.append(_difference(family.title, found))
    notes = record.get("notes", {}).items()
    lines += [f"- Note on {FAMILIES[family].title}: {text}" for family, text in notes]
    return [f"### {name}", "", *lines, ""] if lines else []


def _is_wrong(family: str, case: str, x: dict[str, Any]) -> bool:
    return case.split("/", maxsplit=1)[0] == family and x["status"] in {"differs", "fails"}


def _difference(title: str, found: dict[str, dict[str, Any]]) -> str:
    """One line: which cases, what the first one gave, which known error all of them look like."""
    cases_ = ", ".join(f"`{case}`" for case in found)
    first = next(iter(found.values()))
    text = f"- **{title}** ({cases_}): {first['message'].split('; ')[0]}"
    common = [
        x
        for x in first.get("looks_like", ())
        if all(x in y.get("looks_like", ()) for y in found.values())
    ]
    if common:
        text += f". Looks like: {common[0]}"
    where = {x["documented"] for x in found.values() if "documented" in x}
    return text + (f". Documented: {'; '.join(sorted(where))}" if where else "")


def _conventions(name: str, record: dict[str, Any]) -> list[str]:
    found: dict[str, set[str]] = {}
    for case, x in record["cases"].items():
        if "convention" in x:
            found.setdefault(FAMILIES[case.split("/")[0]].title, set()).add(x["convention"])
    parts = [f"{family}: {', '.join(sorted(c))}" for family, c in found.items()]
    return [f"- **{name}** " + "; ".join(parts)] if parts else []
