"""Other names of options: a dialect is a config of ours that has another library's names, too."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_type_hints

from kedge.config.declare import NoEffect, format_value, same
from kedge.records.errors import ConfigError


@dataclass(slots=True)
class Alias:
    """Another name of the option ``target``: a descriptor that reads and sets it.

    Args:
        target: the option.
        convert: from a value under this name to one of the option; None: they are the same.
        default: value at which the name counts as not set.
    """

    target: str
    convert: Callable[[Any], Any] | None = None
    default: Any = None
    name: str = ""
    unset: Any = None  # default of the option

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        if config is None or self.convert is not None:
            return self.default
        return getattr(config, self.target)

    def __set__(self, config: Any, value: Any) -> None:
        if same(value, self.default):
            return
        value = value if self.convert is None else self.convert(value)
        present = getattr(config, self.target)
        built = "distributed_state" in vars(config)  # then an assignment replaces the one before
        if not built and present not in (self.unset, value):
            raise ConfigError(
                f"{self.name}={format_value(value)} is another name of {self.target}, but"
                f" {self.target}={format_value(present)} is set; set only {self.target}"
                " (dataclasses.replace passes on the name that is not changed: change both)"
            )
        setattr(config, self.target, value)


class Dialect:
    """Base of a config with the names of another library, each of which becomes a field.

        @dataclass(repr=False)
        class TheirConfig(Dialect, kedge.GRPOConfig):
            NAMES = {"num_iterations": Alias("num_ppo_epochs"), "workers": NoEffect("none", 0)}
            learning_rate: float = 3e-6  # their default

    The class is complete before ``@dataclass`` reads it, so argument parsers have the flags.
    """

    NAMES: ClassVar[Mapping[str, Any]] = {}
    STATUS: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        annotations = cls.__annotations__
        for name, entry in [*cls.STATUS.items()]:
            if isinstance(entry, Alias) and name in vars(cls):  # another default of an option
                setattr(cls, entry.target, vars(cls)[name])
                annotations[entry.target] = annotations.pop(name)
                delattr(cls, name)
        table = vars(cls).get("NAMES", {})
        cls.STATUS = {**cls.STATUS, **table}
        hints = get_type_hints(cls) if table else {}
        for name, entry in table.items():
            kind: Any = str if entry.default is None else type(entry.default)
            value = entry
            if isinstance(entry, NoEffect):
                hidden = {"help": argparse.SUPPRESS}
                value = field(default=entry.default, metadata=hidden)
                if isinstance(entry.default, list):
                    kind = list[str]
                    value = field(default_factory=entry.default.copy, metadata=hidden)
            elif isinstance(entry, Alias):
                unset = getattr(cls, entry.target)
                unset = getattr(unset, "default", unset)
                value = Alias(entry.target, entry.convert, entry.default, name, unset)
                kind = hints[entry.target] if entry.convert is None else kind
            annotations[name] = kind if entry.default is not None else kind | None
            setattr(cls, name, value)
