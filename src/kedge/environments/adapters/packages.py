"""Packages of other libraries, imported when an adapter is made."""

from __future__ import annotations

import importlib
from typing import Any

from kedge.errors import ConfigError, install_command


def import_package(name: str, extra: str) -> Any:
    """A package of another library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this environment needs the package {name}: {install_command(extra)} ({error})"
        ) from error
