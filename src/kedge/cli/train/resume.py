"""Stopping and resuming a run from the command line."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def resume_point(value: str | None) -> str | bool | None:
    """``--resume_from_checkpoint`` alone, or True, is the newest checkpoint; else a folder."""
    words: Mapping[str, bool | None] = {"true": True, "false": None, "": None}
    return value if value is None else words.get(value.lower(), value)


def how_to_resume(trainer: Any) -> str:
    """The message of a stopped run: its progress, and the command that resumes it."""
    state, folder = trainer.state, Path(trainer.args.output_dir)
    saved = folder / f"checkpoint-{state.global_step}"
    stopped = f"stopped after iteration {state.global_step} of {state.max_steps}"
    usable = saved.is_dir() and not trainer.args.save_only_model
    return f"{stopped}; {resume_line(saved if usable else None)}"


def resume_line(checkpoint: Path | None) -> str:
    """How to resume this command from a checkpoint; None: it has none."""
    if checkpoint is None:
        return "no checkpoint was saved to resume from"
    words = command_to_repeat(without="resume_from_checkpoint")
    if words is None:
        return "add this to the same command to resume: --resume_from_checkpoint"
    return f"to resume from {checkpoint}:\n    {words} --resume_from_checkpoint"


def command_to_repeat(*, without: str) -> str | None:
    """The command line of this process, quoted for a shell, without one flag and its value.

    None if it cannot be repeated: a launcher started this process, or it holds a secret.
    """
    from kedge.reporting.run_info import command

    first, *words = sys.argv or [""]
    if "RANK" in os.environ or "..." in command():
        return None
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None and module.origin == first:  # not by its file: its folder would come
        start = ["python", "-m", module.name.removesuffix(".__main__")]  # first in sys.path
    elif first.endswith(".py"):
        start = ["python", first]
    elif Path(first).name == "kedge":
        start = ["kedge"]
    else:
        return None
    kept: list[str] = []
    dropping = False
    for word in words:
        name, equals, _ = word.removeprefix("--").replace("-", "_").partition("=")
        flag = word.startswith("--")
        if flag and name == without:
            dropping = not equals
        elif flag or not dropping:
            kept.append(word)
            dropping = False
    return shlex.join([*start, *kept])
