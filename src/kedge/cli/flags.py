"""The flags and the help of a command, without the imports of one that trains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from kedge.errors import ConfigError

SHORT = 60  # characters: longer lists of choices are not shown in help
FOLDER = Path(__file__).with_name("help")  # made by docs/generate.py


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows each flag once, with underscores, and with its default."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [n for n in action.option_strings if "-" not in n.strip("-")]
        if not names or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, "X")
        return f"{names[0]} {value if len(value) < SHORT else 'X'}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", getattr(action.default, "value", action.default)
        if default in (None, argparse.SUPPRESS, "", False) or not action.option_strings:
            return text
        return f"{text} (default: {str(default).replace('%', '%%')})"


class Flags(argparse.ArgumentParser):
    """``ArgumentParser`` of a small command: raises a ConfigError instead of exiting."""

    def __init__(self, prog: str, description: str = "", epilog: str = "", **options: Any) -> None:
        super().__init__(
            prog=prog, description=description, epilog=epilog, formatter_class=Help, **options
        )

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError."""
        raise ConfigError(message)


def stored_help(command: str, argv: Sequence[str]) -> str | None:
    """The text of ``kedge COMMAND --help`` if ``argv`` asks for it; None if it must be built.

    The flags of the commands that train are fields of transformers' dataclasses, whose import takes
    seconds.  ``kedge plan ppo --help`` is that of ``kedge ppo``.
    """
    if not {"-h", "--help"} & set(argv) or "all" in argv:
        return None
    prog = command
    if command == "plan" and (FOLDER / f"{argv[0]}.txt").is_file():
        command = argv[0]
        prog = f"plan {command} [--num_processes N]"
    file = FOLDER / f"{command}.txt"
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    return text.replace(f"usage: kedge {command}", f"usage: kedge {prog}", 1)
