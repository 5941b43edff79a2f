"""Parses flags into configs, under their own names and those of other libraries."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from kedge.config.base import ConfigType, foreign
from kedge.config.compat import TRANSFORMERS4
from kedge.config.declare import Alias, flags


class ConfigParser(HfArgumentParser):
    """``HfArgumentParser`` that also accepts the names that a config translates.

    The config gets the names as they were given, so it sees which release they belong to.  A name
    that another dataclass declares too belongs to that one; the config keeps its default.
    """

    def __init__(self, kinds: Any, **options: Any) -> None:
        super().__init__(kinds, **options)
        actions = {action.dest: action for action in self._actions}
        for kind in self.dataclass_types:
            for name, entry in foreign(kind).items():
                if name not in actions:
                    target = actions.get(getattr(entry, "target", ""))
                    self.add_argument(
                        *flags(name), **_argument(entry, target, shown=name not in TRANSFORMERS4)
                    )
        for action in list(self._actions):  # every flag --x that takes True or False
            if action.type is not string_to_bool:
                continue
            if action.nargs is None:  # --x alone is True, also where the default is None
                action.nargs, action.const = "?", True
            names = [f for f in flags(f"no_{action.dest}") if f not in self._option_string_actions]
            if names:
                self.add_argument(
                    *names,
                    action="store_false",
                    dest=action.dest,
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )

    @staticmethod
    def _parse_dataclass_field(parser: Any, field: Field[Any]) -> None:
        kinds = getattr(parser, "_container", parser).dataclass_types
        if any(field is own.get(field.name) for own in _ceded_fields(kinds)):
            return
        field = copy.copy(field)
        shown = {k: v for k, v in field.metadata.items() if k not in ("aliases", "action")}
        field.metadata = shown  # type: ignore[assignment]
        HfArgumentParser._parse_dataclass_field(parser, field)

    def parse_args_into_dataclasses(  # type: ignore[override]
        self, args: Any = None, return_remaining_strings: bool = False, **options: Any
    ) -> tuple[Any, ...]:
        """One object per dataclass, followed by unknown flags if requested."""
        if not any(isinstance(kind, ConfigType) for kind in self.dataclass_types):
            return super().parse_args_into_dataclasses(args, return_remaining_strings, **options)
        namespace, rest = self.parse_known_args(args)
        if rest and not return_remaining_strings:
            raise ValueError(
                f"Some specified arguments are not used by the HfArgumentParser: {rest}"
            )
        configs = self.build(vars(namespace))
        return (*configs, rest) if return_remaining_strings else configs

    def parse_dict(self, args: dict[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """One object per dataclass from values by name."""
        unknown = sorted(args.keys() - {action.dest for action in self._actions})
        if unknown and not allow_extra_keys:
            raise ValueError(f"Some keys are not used by the HfArgumentParser: {unknown}")
        return self.build(args)

    def build(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """One object per dataclass from the values of flags by name."""
        configs = []
        given_up = {id(f) for own in _ceded_fields(self.dataclass_types) for f in own.values()}
        for kind in self.dataclass_types:
            names = {f.name for f in fields(kind) if f.init and id(f) not in given_up}
            names |= foreign(kind).keys()
            configs.append(kind(**{name: values[name] for name in values if name in names}))
        return tuple(configs)


def _ceded_fields(kinds: Any) -> list[dict[str, Field[Any]]]:
    """Config fields that another dataclass declares too, except those of transformers."""
    theirs = {f.name for kind in kinds if not isinstance(kind, ConfigType) for f in fields(kind)}
    theirs -= TrainingArguments.__dataclass_fields__.keys()
    return [
        {f.name: f for f in fields(kind) if f.name in theirs}  # type: ignore[arg-type]
        for kind in kinds
        if isinstance(kind, ConfigType)
    ]


def _argument(entry: Any, target: argparse.Action | None, *, shown: bool) -> dict[str, Any]:
    """How argparse reads a name that is not a field."""
    argument: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if isinstance(entry.default, bool):
        return argument | {"type": string_to_bool, "nargs": "?", "const": True}
    if not isinstance(entry, Alias) or entry.convert is not None or target is None:
        if isinstance(entry.default, list):
            return argument | {"type": str, "nargs": "+"}
        kind = str if entry.default is None else type(entry.default)
        return argument | {"type": kind}
    if shown:
        argument["help"] = f"Another name of {entry.target}."
    return argument | {"type": target.type, "nargs": target.nargs, "choices": target.choices}
