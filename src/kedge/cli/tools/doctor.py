"""``kedge doctor``: diagnoses a run from its log and suggests fixes."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.cli.flags import Flags
from kedge.reporting.doctor import examine, open_question
from kedge.reporting.log import read_log

DESCRIPTION = """\
Prints what is wrong with runs, the numbers that say so, and what to try.  The exit code is 1 if
anything was found."""


def main(argv: Sequence[str]) -> int:
    """Examine every run; return 1 if there are findings."""
    flags = Flags("kedge doctor", DESCRIPTION)
    text = "output_dir of a run, finished or not, or its metrics.jsonl"
    flags.add_argument("runs", nargs="+", metavar="RUN", help=text)
    count = 0
    for place in flags.parse_args(list(argv)).runs:
        log = read_log(place)
        findings = examine(log)
        count += len(findings)
        iteration = log.rows[-1].get("step", len(log.rows))
        read = f"{len(log.rows)} rows of metrics up to iteration {iteration:.0f}"
        print(f"{place}: {read}{'' if findings else ', nothing found'}")
        if not findings:
            print(f"  {open_question(log)}")
        for finding in findings:
            print(f"  {finding.rule}: {finding.seen}\n      try: {finding.advice}")
    return int(count > 0)
