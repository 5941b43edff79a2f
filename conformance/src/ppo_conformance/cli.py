"""The command ``conformance``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ppo_conformance import cases, mutants, table
from ppo_conformance.cases import Case
from ppo_conformance.compare import differences
from ppo_conformance.families import FAMILIES
from ppo_conformance.runner import Adapter, run
from ppo_conformance.skeleton import skeleton


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name, function, about):
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(command=function)
        return sub

    sub = command("run", _run, "check the functions of an adapter; exit code 1 if one differs")
    sub.add_argument("adapter", help="a Python file; `conformance new` writes one")
    sub.add_argument("--case", default="", help="only cases whose name contains this")
    sub.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    sub.add_argument("--json", action="store_true", help="print a record")
    sub.add_argument("--all", action="store_true", help="list the cases that agree, too")
    sub = command(
        "explain", _explain, "inputs, formula, source, answer and wrong answers of a case"
    )
    sub.add_argument("case", metavar="CASE", help="such as gae/holes")
    sub = command("new", _new, "write a skeleton of an adapter")
    sub.add_argument("adapter", help="a file that does not exist yet")
    command("mutants", _mutants, "the known errors, each with a case that catches it")
    command("cases", _cases, "names of all cases")
    sub = command("table", _table, "a Markdown table of records that `run --json` printed")
    sub.add_argument("records", nargs="+")
    sub.add_argument("--summary", action="store_true", help="a row per library")
    sub = command("test-reward", _test_reward, "look for holes in a reward function")
    sub.add_argument("function", metavar="FILE:FUNCTION")
    sub.add_argument("data", help="JSON lines with a prompt and the columns of the function")
    sub.add_argument("--convention", choices=["trl", "verl", "kedge"], help="default: by signature")
    sub.add_argument("--answer", help="column of the right answer (found by its usual names)")
    sub.add_argument("--rows", type=int, default=8, help="rows to try")
    sub.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(argv)
    try:
        return args.command(args)
    except (OSError, ValueError, ImportError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    adapter = Adapter.load(args.adapter)
    record = run(adapter, args.case, args.dtype)
    wrong = [x for x in record["cases"].values() if x["status"] in {"differs", "fails"}]
    if args.json:
        print(json.dumps(record, indent=1))
        return bool(wrong)
    print(f"{adapter.library} {adapter.version}".rstrip())
    for family in FAMILIES.values():
        found = {n: x for n, x in record["cases"].items() if n.split("/")[0] == family.name}
        if found:
            _print_family(family.title, found, args.all)
    offered = [x for x in record["cases"].values() if x["status"] != "not offered"]
    seconds = time.perf_counter() - start
    print(f"\n{len(offered) - len(wrong)} of {len(offered)} cases agree, {seconds:.1f} s")
    if wrong:
        print("conformance explain CASE shows the inputs, the formula and the answer")
    return bool(wrong)


def _print_family(title: str, found: dict[str, dict[str, Any]], every: bool) -> None:
    counts = {
        s: sum(x["status"] == s for x in found.values()) for s in ("agrees", "differs", "fails")
    }
    offered = sum(counts.values())
    if not offered:
        reasons = sorted({x["message"] for x in found.values() if "message" in x})
        print(f" -       {title}: not offered" + (f" ({'; '.join(reasons)})" if reasons else ""))
        return
    conventions = sorted({x["convention"] for x in found.values() if "convention" in x})
    by = f", by another convention: {', '.join(conventions)}" if conventions else ""
    good = counts["agrees"] == offered
    print(f" {'ok     ' if good else 'differs'} {title}: {counts['agrees']} of {offered}{by}")
    for name, x in found.items():
        if x["status"] in {"differs", "fails"} or (every and x["status"] == "agrees"):
            print(f"       {name}: {x['status']}  {x.get('message', '')}")
            for error in x.get("looks_like", ()):
                print(f"         looks like: {error}")
            if "documented" in x:
                print(f"         documented: {x['documented']}")


def _find(name: str) -> Case:
    found = [case for case in cases.load(name) if name in {case.name, case.name.split("/")[1]}]
    if not found:
        near = (
            ", ".join(case.name for case in cases.load(name.split("/", maxsplit=1)[0]))
            or "conformance cases"
        )
        raise ValueError(f"there is no case {name!r}; see {near}")
    return found[0]


def _explain(args: argparse.Namespace) -> int:
    case = _find(args.case)
    family = case.family
    print(f"{case.name}: {family.title}" + (f" ({case.about})" if case.about else ""))
    print(f"\n{family.signature}\n  {family.formula}\n  source: {family.source}")
    print(f"  tolerance: {case.rtol:g} of the number + {case.atol:g}\n\ninputs")
    for name, value in case.inputs.items():
        about = family.inputs.get(name) or f"(if asked for) {family.optional[name]}"
        print(f"  {name}  {about}\n{_show(value)}")
    print("\nexpected")
    for name, value in case.expected.items():
        where = f"where {family.outputs[name]}" if family.outputs[name] else "everywhere"
        print(f"  {name}, compared {where}\n{_show(value)}")
    for name, answer in case.conventions.items():
        print(f"\nright, too, by another convention: {name}")
        for output, value in answer.items():
            print(f"  {output}\n{_show(value)}")
    for mutant in mutants.of(family.name):
        if mutant.name in case.tells_apart:
            print(f"\nwrong: {mutant.label}")
            for sentence in differences(case, mutant(**case.inputs)):
                print(f"  {sentence}")
    return 0


def _show(value: Any) -> str:
    text = np.array2string(np.asarray(value), precision=6, suppress_small=True, threshold=200)
    return "\n".join("    " + line for line in text.splitlines())


def _new(args: argparse.Namespace) -> int:
    path = Path(args.adapter)
    if path.exists():
        raise ValueError(f"{path} exists; choose another name")
    path.write_text(skeleton(), "utf-8")
    print(f"{path}: fill in what your library has, delete the rest; conformance run {path}")
    return 0


def _mutants(args: argparse.Namespace) -> int:
    print(table.mutant_table())
    return 0


def _cases(args: argparse.Namespace) -> int:
    for case in cases.load():
        print(f"{case.name:45}{case.about}")
    return 0


def _table(args: argparse.Namespace) -> int:
    write = table.summary_table if args.summary else table.conformance_table
    print(write([Path(x) for x in args.records]), end="")
    return 0


def _test_reward(args: argparse.Namespace) -> int:
    from ppo_conformance.rewards import probes

    findings = probes.examine_file(
        args.function, args.data, args.convention, args.answer, args.rows
    )
    if args.json:
        print(json.dumps([f.as_json() for f in findings], indent=1))
    else:
        print(findings)
    return bool(findings)
