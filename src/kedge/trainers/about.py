"""``run.json``: what ran, with which options and versions, for ``kedge report`` and the card."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kedge.config.support import Refused, default_of
from kedge.trainers.model_card import versions
from kedge.trainers.publishing import Provenance

FILE = "run.json"


def write_about(made_of: Provenance, args: Any, *, device: str) -> Path:
    """Write ``run.json`` into ``output_dir``, as training begins.

    Args:
        made_of: algorithm, model, data, rewards.
        args: the config; access tokens are not written.
        device: what it trains on.
    """
    shown = args.to_dict()
    options = {
        f.name: shown[f.name]
        for f in fields(args)
        if f.name in shown and not isinstance(args.SUPPORT.get(f.name), Refused)
    }
    changed = [
        f.name for f in fields(args) if f.name in options and getattr(args, f.name) != default_of(f)
    ]
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
        "changed": changed,
        "options": options,
    }
    file = Path(args.output_dir) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(about, indent=1, default=str) + "\n", encoding="utf-8")
    part.replace(file)
    return file


_SECRETS = ("hub_token", "api_key", "auth_token", "password", "secret")


def command() -> str:
    """The command line of this process, values of secrets left out."""
    words, hide = [], False
    for word in sys.argv:
        name, equals, _ = word.partition("=")
        secret = word.startswith("--") and name.lower().endswith(_SECRETS)
        words.append("..." if hide else f"{name}=..." if secret and equals else word)
        hide = secret and not equals
    return shlex.join([Path(words[0]).name, *words[1:]]) if words and words[0] else ""
