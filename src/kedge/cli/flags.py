"""Flags, help and tables of small commands, without the imports of a training command."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from kedge.records.errors import ConfigError

SHORT = 60  # characters; help omits longer lists of choices


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


def print_table(title: str, rows: Iterable[Sequence[str]], head: Sequence[Any] = ()) -> None:
    """Print rows of cells; ``head`` are names of columns, or rich's ``Column``."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, title=title, title_justify="left", show_header=bool(head))
    for row in rows:
        table.add_row(*row)
    Console().print(table)
