"""Help and wrong flags of the training commands, answered before torch is imported.

``TrainingArguments`` alone takes seven seconds to import.  ``flags.json`` (written by
``docs/generate.py``) holds what the parsers of the commands say with one release of transformers;
with another the parsers themselves answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kedge.cli.flags import Flags
from kedge.cli.yaml_files import read_yaml
from kedge.records.errors import ConfigError
from kedge.suggestions import hint

FILE = Path(__file__).with_name("flags.json")
TYPES: dict[str, type] = {"int": int, "float": float}


def answer(command: str, argv: Sequence[str]) -> bool:
    """Print the help if ``argv`` asks for it, and say whether it did.

    Raises:
        ConfigError: a flag, an option of a ``--config`` file or the type of a value is wrong.
    """
    found = json.loads(FILE.read_text(encoding="utf-8"))
    if found["transformers"] != version("transformers"):
        return False
    help_texts = found["help"][command]
    if {"-h", "--help", "--help_all", "--help-all"} & set(argv):
        print(help_texts["all" if {"all", "--help_all", "--help-all"} & set(argv) else "first"])
        return True
    parser = Flags(f"kedge {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    for names, spec in found["flags"][command]:
        parser.add_argument(*names, **_arguments(spec))
    known = {spec["dest"] for _, spec in found["flags"][command]}
    parsed, extra = parser.parse_known_args(list(argv))
    if extra:
        raise ConfigError(unknown_flag(extra[0], known))
    for file in parsed.config:
        check_options(file, read_yaml(file), known)
    return False


def check_options(file: str, options: Collection[str], known: Collection[str]) -> None:
    """Refuse options of a file that are not ``known``, and name the commands that have them all."""
    unknown = [str(key) for key in options if key not in known]
    if not unknown:
        return
    every = json.loads(FILE.read_text(encoding="utf-8"))["options"]
    commands = [f"kedge {name}" for name, names in every.items() if {*options} <= {*names}]
    alias = hint(unknown[0], known)
    if not commands:
        raise ConfigError(f"{file}: unknown option {unknown[0]}{alias}")
    several, more = len(unknown) > 1, f" and {len(unknown) - 3} more" * (len(unknown) > 3)
    raise ConfigError(
        f"{file}: {', '.join(unknown[:3])}{more} belong{'s' * (not several)} to"
        f" {' and '.join(commands)}: run {commands[0]} --config {file}"
        + alias
        * ("called" in alias and not several)
    )


def unknown_flag(word: str, known: set[str]) -> str:
    """What is said of a word that is no flag; ``known`` are the names of options."""
    if not word.startswith("-"):
        return f"{word!r} does not belong to a flag; flags look like --learning_rate 1e-5"
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    return f"unknown flag --{name}{hint(name, known, dashes='--')}"


def describe(parser: argparse.ArgumentParser, nullable: Collection[str]) -> list[Any]:
    """The flags of a parser, as JSON holds them; those of ``nullable`` take ``none``, too."""
    flags = []
    for action in parser._actions:
        if action.dest == "help":
            continue
        spec: dict[str, Any] = {"dest": action.dest}
        if action.nargs is not None:
            spec["nargs"] = action.nargs
        if action.choices is not None:
            none = ["none", "null", "None"] if action.dest in nullable else []
            spec["choices"] = [*(str(x) for x in action.choices), *none]
        elif action.dest not in nullable:
            spec |= {"type": x} if (x := getattr(action.type, "__name__", "")) in TYPES else {}
        flags.append([action.option_strings, spec])
    return flags


def _arguments(spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("nargs") == 0:
        return {"dest": spec["dest"], "action": "store_true"}
    return {**spec, "type": TYPES.get(spec.get("type", ""), str)}
