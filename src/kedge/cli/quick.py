"""Help and refusals of the training commands, answered before torch is imported.

``TrainingArguments`` alone takes seven seconds to import.  ``flags.json`` (written by
``docs/generate.py``) holds what the parsers of the commands say with one release of transformers,
and the fields of ``TrainingArguments``; with another the parsers themselves answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import field, fields, make_dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from kedge.cli.flags import Flags
from kedge.cli.options import (
    FILE,
    ModelArguments,
    Options,
    ScriptArguments,
    algorithm_kwargs,
    model_names,
    read,
)
from kedge.config.algorithms import GRPOArguments, PPOArguments, RLOOArguments
from kedge.config.declare import check_fields
from kedge.redaction import redact

OPTIONS = {"ppo": PPOArguments, "rloo": RLOOArguments, "grpo": GRPOArguments}
TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


def answer(command: str, argv: Sequence[str]) -> bool:
    """Print the help if ``argv`` asks for it, and say whether it did.

    Raises:
        ConfigError: a flag, a value or a combination of options that cannot work.
    """
    found = json.loads(FILE.read_text(encoding="utf-8"))
    if found["transformers"] != version("transformers"):
        return False
    help_texts = found["help"][command]
    if {"-h", "--help", "--help_all", "--help-all"} & set(argv):
        print(help_texts["all" if {"all", "--help_all", "--help-all"} & set(argv) else "first"])
        return True
    (script, config, model), given = read(Parser(command, found), argv)
    options = Options(script=script, config=config, model=model, given=given)
    options.check()
    model_names(options)
    algorithm_kwargs(script.algorithm, script.algorithm_kwargs)
    return False


class Parser(Flags):
    """The flags of a command, as ``flags.json`` describes them."""

    def __init__(self, command: str, found: Mapping[str, Any]) -> None:
        super().__init__(f"kedge {command}", add_help=False, allow_abbrev=False)
        self.nullable = frozenset(found["nullable"][command])
        for names, spec in found["flags"][command]:
            if spec.get("nargs") == 0:  # --no_...
                self.add_argument(*names, dest=spec["dest"], action="store_false")
            else:
                self.add_argument(*names, **spec | {"type": TYPES.get(spec.get("type", ""), str)})
        theirs = [
            (name, object, field(default_factory=partial(copy, x)))
            for name, x in found["inherited"].items()
        ]
        base = make_dataclass("TrainingArguments", theirs)
        self.kinds = ScriptArguments, make_dataclass("Config", (), bases=(OPTIONS[command], base))

    def parse_dict(self, values: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """The checked options, in which a plain class stands in for ``TrainingArguments``."""
        script, config, model = (
            kind(**{f.name: values[f.name] for f in fields(kind) if f.init and f.name in values})
            for kind in (*self.kinds, ModelArguments)
        )
        redact(vars(config))  # registers secrets
        check_fields(config)
        config._fill_defaults()
        config._check()
        return script, config, model


def read_bool(text: str) -> bool:
    """True or False, in the words of ``HfArgumentParser``."""
    if text.lower() not in TRUE + FALSE:
        raise argparse.ArgumentTypeError(
            f"Truthy value expected: got {text} but expected one of yes/no, true/false, t/f, y/n,"
            " 1/0 (case insensitive)."
        )
    return text.lower() in TRUE


TYPES: dict[str, Any] = {"int": int, "float": float, "string_to_bool": read_bool}


def describe(parser: argparse.ArgumentParser) -> list[Any]:
    """The flags of a parser, as JSON holds them."""
    flags = []
    for action in parser._actions:
        if action.dest == "help":
            continue
        spec: dict[str, Any] = {"dest": action.dest}
        if action.nargs is not None:
            spec["nargs"] = action.nargs
        if action.const is not None and action.nargs == "?":
            spec["const"] = action.const
        if action.choices is not None:
            spec["choices"] = [str(x) for x in action.choices]
        elif (kind := getattr(action.type, "__name__", "")) in TYPES:
            spec["type"] = kind
        flags.append([action.option_strings, spec])
    return flags
