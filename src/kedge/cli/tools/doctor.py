"""``kedge doctor``: diagnoses a run from its log and suggests fixes."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.errors import ConfigError
from kedge.reporting.doctor import examine, unseen
from kedge.reporting.log import read_log

USAGE = """\
usage: kedge doctor RUN [RUN ...]

RUN is the output_dir of a run, finished or not, or its metrics.jsonl.  Prints what is wrong with
it, the numbers that say so, and what to try.  The exit code is 1 if anything was found."""


def main(argv: Sequence[str]) -> int:
    """Examine every run; return 1 if there are findings."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    if not argv or any(word.startswith("-") for word in argv):
        raise ConfigError("give the folder of a run: kedge doctor RUN [RUN ...]")
    count = 0
    for place in argv:
        log = read_log(place)
        findings = examine(log)
        count += len(findings)
        iteration = log.rows[-1].get("step", len(log.rows))
        read = f"{len(log.rows)} rows of metrics up to iteration {iteration:.0f}"
        print(f"{place}: {read}{'' if findings else ', nothing found'}")
        if not findings:
            print(f"  {unseen(log)}")
        for finding in findings:
            print(f"  {finding.rule}: {finding.seen}\n      try: {finding.advice}")
    return int(count > 0)
