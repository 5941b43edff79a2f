"""What attaches to Kedge by entry points: engines, environments, rewards, commands and others.

A package attaches by a table in its ``pyproject.toml``, as Kedge's own extensions do::

    [project.entry-points."kedge.rewards"]
    politeness = "my_package.rewards:politeness"
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

from kedge.records.errors import DISTRIBUTION, ConfigError


@cache
def find(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; the first of a name counts."""
    found = {entry.name: entry for entry in reversed(tuple(entry_points(group=group)))}
    return {**found, **{entry.name: entry for entry in _of_sources() if entry.group == group}}


def load(group: str, name: str) -> Any:
    """The object that an entry point names; None if there is none, or its extension was deleted.

    Raises:
        ConfigError: the entry point cannot be imported.
    """
    entry = find(group).get(name)
    if entry is None:
        return None
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        folder = ".".join(entry.module.split(".")[:3])  # kedge.ext.vllm
        if folder.startswith("kedge.ext.") and error.name in ("kedge.ext", folder):
            return None
        raise ConfigError(_broken(entry, error)) from error
    except (ImportError, AttributeError) as error:
        raise ConfigError(_broken(entry, error)) from error


def _broken(entry: EntryPoint, error: Exception) -> str:
    package = entry.dist.name if entry.dist else "a package"
    return (
        f"{entry.group} {entry.name!r} of {package} is {entry.value}, which cannot be imported:"
        f" {error}; reinstall or remove {package}"
    )


@cache
def _of_sources() -> tuple[EntryPoint, ...]:
    """Our own entry points where the sources run without being installed (PYTHONPATH)."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    try:
        distribution(DISTRIBUTION)
        return ()
    except PackageNotFoundError:
        if not project.is_file():
            return ()
        if sys.version_info < (3, 11):
            raise ConfigError(
                f"Kedge at {project.parent} is not installed, and Python 3.10 cannot read its"
                " pyproject.toml; install it (pip install -e .)"
            ) from None
    import tomllib

    groups = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]
    return tuple(
        EntryPoint(name, value, group)
        for group, entries in groups.items()
        for name, value in entries.items()
    )


def load_module(where: str, prefix: str) -> Any:
    """Import a module by its dotted name, or a Python file as ``prefix_stem``, with its folder."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"file not found: {path}")
    sys.path += {str(path.parent)} - {*sys.path}  # it may import its neighbors, as a script may
    name = f"{prefix}_{path.stem}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that pickle finds its definitions
    spec.loader.exec_module(module)
    return module
