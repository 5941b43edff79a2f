"""``kedge report``: writes an HTML report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kedge.cli.flags import Flags
from kedge.errors import ConfigError
from kedge.reporting.log import log_file
from kedge.reporting.report import gather, page

EPILOG = """\
RUN is the output_dir of a run, finished or not.  The page is self-contained: open it from disk or
send it.
example: kedge report runs/one --output one.html"""


def main(argv: Sequence[str]) -> None:
    """Write the report."""
    description = "One HTML page of a run: overview, curves, completions, tokens."
    flags = Flags("kedge report", description, EPILOG)
    flags.add_argument("run", metavar="RUN")
    flags.add_argument("--output", help="default: report.html in the run's folder")
    flags.add_argument(
        "--responses", type=int, default=5000, help="maximum responses of each kind on the page"
    )
    chosen = flags.parse_args(list(argv))
    if chosen.responses < 1:
        raise ConfigError(f"--responses {chosen.responses} must be 1 or more")
    from kedge.loop.metrics import NAMES, PREFIXES  # imported here, since it imports torch

    place = log_file(chosen.run).parent
    data = gather(chosen.run, meanings=NAMES, prefixes=PREFIXES, most=chosen.responses)
    file = Path(chosen.output) if chosen.output else place / "report.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(data), encoding="utf-8")
    print(f"kedge: the report is in {file} ({file.stat().st_size / 2**20:.1f} MiB)")
