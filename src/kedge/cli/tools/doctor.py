"""``kedge doctor``: what the log of a run says is wrong, and what to try."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.errors import ConfigError
from kedge.insight import examine, read_log

USAGE = """\
usage: kedge doctor RUN [RUN ...]

RUN is the output_dir of a run, finished or not, or its metrics.jsonl.  Prints what is wrong with
it, the numbers that say so, and what to try.  The exit code is 1 if anything was found."""


def main(argv: Sequence[str]) -> int:
    """Examine every run; 1 if something was found."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    if not argv or any(word.startswith("-") for word in argv):
        raise ConfigError("name the folder of a run: kedge doctor RUN [RUN ...]")
    found = 0
    for place in argv:
        log = read_log(place)
        findings = examine(log)
        found += len(findings)
        updates = log.rows[-1].get("step", len(log.rows))
        read = f"{len(log.rows)} rows of metrics up to update {updates:.0f}"
        print(f"{place}: {read}{'' if findings else ', nothing found'}")
        for each in findings:
            print(f"  {each.rule}: {each.seen}\n      try: {each.advice}")
    return int(found > 0)
