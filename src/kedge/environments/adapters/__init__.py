"""Environments of other libraries.  Each needs its package: ``'kedge-rl[gymnasium]'``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "Gymnasium": "gymnasium",
    "OpenEnv": "openenv",
    "TextArena": "textarena",
    "Verifiers": "verifiers",
}

__all__ = ["Gymnasium", "OpenEnv", "TextArena", "Verifiers"]

if TYPE_CHECKING:
    from kedge.environments.adapters.gymnasium import Gymnasium
    from kedge.environments.adapters.openenv import OpenEnv
    from kedge.environments.adapters.textarena import TextArena
    from kedge.environments.adapters.verifiers import Verifiers


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(
            f"module 'kedge.environments.adapters' has no attribute {name!r}; it has"
            f" {', '.join(__all__)}"
        )
    module = importlib.import_module(f"kedge.environments.adapters.{_WHERE[name]}")
    return getattr(module, name)


def import_package(name: str, extra: str) -> Any:
    """A package of another library.

    Raises:
        ConfigError: it is not installed.
    """
    from kedge.errors import ConfigError, install_command

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this environment needs the package {name}: {install_command(extra)} ({error})"
        ) from error
