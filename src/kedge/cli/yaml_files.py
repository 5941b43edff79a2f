"""Reads the YAML files of ``--config``."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from kedge.records.errors import ConfigError

MOST_YAML_VALUES = 100_000


def read_yaml(name: str) -> dict[str, Any]:
    """Read the mapping in a YAML file that ``--config`` names."""
    import yaml

    file = Path(name).expanduser()
    if not file.is_file():
        raise ConfigError(f"--config {name}: there is no such file")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        # Not UTF-8, a date of month 13, !!int abc, 5,000 brackets, 6,000 digits.
        raise ConfigError(f"--config {name} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {name} must map names to values, got {type(values).__name__}")
    left = [MOST_YAML_VALUES]
    try:
        return {
            key: _plain(value, f"--config {name}: {key}", left) for key, value in values.items()
        }
    except RecursionError as error:
        raise ConfigError(f"--config {name} has an alias within what it stands for") from error


def _plain(value: Any, where: str, left: list[int]) -> Any:
    """Copy text, numbers, lists and mappings; ``left`` values may follow.

    Aliases can nest, so that a few lines stand for millions of values, or for endlessly many.
    """
    left[0] -= 1
    if left[0] < 0:
        raise ConfigError(f"{where} has more than {MOST_YAML_VALUES} values; are there aliases?")
    if isinstance(value, dict):
        return {key: _plain(x, f"{where}.{key}", left) for key, x in value.items()}
    if isinstance(value, list):
        return [_plain(x, where, left) for x in value]
    if isinstance(value, date):
        return str(value)
    if not (value is None or isinstance(value, str | int | float)):
        kind = type(value).__name__
        raise ConfigError(f"{where} must be text, a number, a list or a mapping, got a {kind}")
    return value
