"""``run.json``: options, versions and command of a run, for ``kedge report`` and model cards."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kedge.redaction import redact, redact_words
from kedge.reporting.base import write_whole
from kedge.reporting.model_card import Provenance, versions

FILE = "run.json"


def write_run_info(made_of: Provenance, args: Any, *, device: str) -> None:
    """Write ``run.json`` into ``output_dir`` when training begins.

    Args:
        made_of: algorithm, model, data, rewards.
        args: the config; access tokens are not written.
        device: the training device.
    """
    from kedge.config.declare import status  # imports torch, which `kedge report` can wait for

    values = args.to_dict()
    options = {
        f.name: values[f.name]
        for f in fields(args)
        if f.name in values and isinstance(status(type(args), f.name), str)
    }
    about = {
        "algorithm": made_of.algorithm,
        "model": made_of.base_model,
        "datasets": list(made_of.datasets),
        "rewards": list(made_of.rewards),
        "command": command(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "machine": f"{platform.system()}, Python {platform.python_version()}",
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": dict(versions()),
        "changed": [name for name in options if name in args.given],
        "options": options,
    }
    _write(args.output_dir, about)


def add_links(output_dir: str | Path, links: Mapping[str, str]) -> None:
    """Add links to ``run.json``: tracker or hub -> URL."""
    about = read_run_info(output_dir)
    if about:
        _write(output_dir, about | {"links": dict(links)})


def read_run_info(output_dir: str | Path | None) -> dict[str, Any]:
    """The content of ``run.json``; empty if it is missing or cannot be read."""
    file = Path(output_dir or ".") / FILE
    if not output_dir or not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=str)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(output_dir: str | Path, about: Mapping[str, Any]) -> None:
    text = json.dumps(redact(about), indent=1, default=str)
    write_whole(Path(output_dir) / FILE, text + "\n")


def command() -> str:
    """The command line of this process, without the values of secrets."""
    words = redact_words(sys.argv)
    return shlex.join([Path(words[0]).name, *words[1:]]) if words and words[0] else ""
