"""``python -m kedge.compat run SCRIPT``: run a program that was written for TRL."""

from __future__ import annotations

import argparse
import logging
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kedge.ext.trl.compat import APIS, install
from kedge.records.errors import OptionError

logger = logging.getLogger(__name__)
_OLDER_MARKS = ("rloo_k", "ref_policy=")
_STEP_MARKS = ("WithValueHead", "trl.core", "PPOv2", ".rloo_trainer")


def detect_api(script: Path) -> str:
    """The API that a script uses, by the names in it."""
    text = script.read_text(encoding="utf-8", errors="replace")
    if "trl.experimental" not in text and any(x in text for x in _STEP_MARKS):
        return "trl-0.11"
    return "trl-0.21" if any(x in text for x in _OLDER_MARKS) else "trl-1.12"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; ``argv`` None: the arguments of the process."""
    parser = argparse.ArgumentParser(prog="python -m kedge.compat", description=__doc__)
    run = parser.add_subparsers(required=True).add_parser("run", help="run a script or module")
    run.add_argument("--api", choices=["auto", *APIS], default="auto", help="auto: by the script")
    run.add_argument("--replace", action="store_true", help="replace names of the installed TRL")
    run.add_argument("--report-version", help="version of TRL that the program sees")
    run.add_argument(
        "--transformers-4",
        dest="transformers4",
        action="store_true",
        help="apply_chat_template returns token ids",
    )
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT names a module")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(argv)
    api = options.api
    if api == "auto":
        if options.module:
            run.error(f"-m needs --api, one of {', '.join(APIS)}")
        api = detect_api(Path(options.script))
    if not options.replace and find_spec("trl") is not None:
        logger.warning(
            "kedge.compat: the installed TRL keeps its own names; add --replace if the program"
            " needs those of %s",
            api,
        )
    install(
        api,
        replace=options.replace,
        report_version=options.report_version,
        transformers4=options.transformers4,
    )
    sys.argv = [options.script, *options.arguments]
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.script).resolve().parent)
            runpy.run_path(options.script, run_name="__main__")
    except OptionError:
        if options.api == "auto":
            logger.error(
                "kedge.compat: took the program for one of %s; if it was written for another"
                " release of TRL, run it with --api trl-0.11 (generate and step, TRL 0.4 to 0.11)"
                " or --api trl-1.12 (train, TRL 0.12 to 1.12)",
                api,
            )
        raise


if __name__ == "__main__":
    main()
