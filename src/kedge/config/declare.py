"""Declares options: default, help text, where they act and their range; the type is annotated.

``option`` declares a field; ``check_fields`` checks the fields of a config against annotations and
ranges.  Fields inherited from ``transformers.TrainingArguments`` are described by the class's
``INHERITED`` table, names that are not fields by its ``FOREIGN`` table.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from kedge.config.values import Kind, Mismatch, Range, kinds_of, shown, take_first
from kedge.errors import ConfigError

_FLATTENED = {"True or False": ("True", "False")}  # in a list of several kinds
_SECRET = ("hub_token", "push_to_hub_token")
_SAME = ("algorithm", "KL controller", "value model", "learner", "sampling", "rewards", "prompts")
_SAME_ON_RESUME = (*_SAME, "engine", "rollout engine", "every random number generator")


@dataclass(frozen=True, slots=True)
class ActsIn:
    """An inherited field that acts.

    Args:
        where: component that reads it.
        limits: bounds of the number.
        accepts: type of the values that Python code may give, if wider than the annotation.
    """

    where: str
    limits: Range | None = None
    accepts: Any = None


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of the option ``target``.

    Args:
        target: the option that gets the value.
        convert: converts the value; None: it is passed on.
        default: value at which the name counts as not set.
        limits: bounds of the number, if narrower than the target's.
    """

    target: str
    convert: Callable[[Any], Any] | None = None
    default: Any = None
    limits: Range | None = None


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A name that is refused unless it has its default.

    Args:
        reason: why it is not supported.
        way_out: what to do instead.
        default: of a name that is not a field.
        also: values that are equivalent to the default.
    """

    reason: str
    way_out: str
    default: Any = None
    also: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A name that cannot change what is trained: accepted, with a line in the log.

    Args:
        reason: why it has no effect.
        default: of a name that is not a field.
        also: values without a line in the log.
    """

    reason: str
    default: Any = None
    also: tuple[Any, ...] = ()


Inherited = ActsIn | Unsupported | NoEffect
Foreign = Alias | Unsupported | NoEffect
UNKNOWN = Unsupported("this version of Kedge does not know this option", "leave it at its default")


class _Metadata(dict[str, Any]):
    """Metadata of a field: what ``HfArgumentParser`` passes to argparse, and hidden entries.

    The parser passes every listed entry on, so hidden ones can be looked up but are not listed.
    """

    def __init__(self, listed: Mapping[str, Any], **hidden: Any) -> None:
        super().__init__(listed)
        self._hidden = hidden

    def __missing__(self, key: str) -> Any:
        return self._hidden[key]


def option(
    default: Any,
    text: str = "",
    *,
    acts_in: str | None = None,
    alias: str | None = None,
    resume: Literal["same", "may_change"] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    accepts: Any = None,
    alias_action: type[argparse.Action] | None = None,
) -> Any:
    """A dataclass field with all that is known about the option.

    A field that overrides another inherits what is not given here, apart from ``alias``.

    Args:
        default: value if the option is not given.
        text: one sentence of help, with the unit; empty if the class's docstring has it.
        acts_in: component that reads it.
        alias: another name, of another library or release.
        resume: whether a resumed run must have the same value; None: if it affects the numerics,
            judging by ``acts_in``.
        ge: lowest value of the number, or of each number of a list.
        gt: exclusive lower bound.
        le: highest value; infinity is allowed only if it is the bound.
        lt: exclusive upper bound.
        accepts: type of the values that Python code may give, if wider than the annotation, which
            argument parsers read.
        alias_action: stores the value in a ``HfArgumentParser``, given the flag that was used.
    """
    bounds = (ge, gt, le, lt)
    limits = None if bounds == (None,) * 4 else Range(ge=ge, gt=gt, le=le, lt=lt)
    listed: dict[str, Any] = {"help": text}
    if alias is not None:
        listed["aliases"] = flags(alias)
        if alias_action is not None:
            listed["action"] = alias_action
    hidden = {"limits": limits, "accepts": accepts, "acts_in": acts_in, "resume": resume}
    return field(default=default, metadata=_Metadata(listed, alias=alias, **hidden))


def flags(name: str) -> list[str]:
    """The flag of an option, with underscores and with hyphens."""
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def default_of(field: Field[Any]) -> Any:
    """Default value of a dataclass field."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def status(cls: type, name: str) -> str | Unsupported | NoEffect | None:
    """Where a field acts, or why it does not; None: a subclass added it for its own use."""
    where = _metadata(cls, name, "acts_in")
    if where is not None:
        return str(where)
    entry: Inherited | None = getattr(cls, "INHERITED", {}).get(name)
    if entry is None:
        owners = [b for b in cls.__mro__ if name in b.__dict__.get("__dataclass_fields__", {})]
        added = owners and not owners[-1].__module__.startswith("transformers.")
        return None if added else UNKNOWN
    return entry.where if isinstance(entry, ActsIn) else entry


@functools.cache
def aliases(cls: type) -> Mapping[str, Alias]:
    """Other names of a config's own options."""
    own = {alias: f for f in fields(cls) if (alias := _lookup(f.metadata, "alias")) is not None}
    return {
        alias: Alias(f.name, default=False if default_of(f) is False else None)
        for alias, f in own.items()
    }


def resume_values(config: Any) -> dict[str, Any]:
    """The options that a resumed run must share with its checkpoint, by name."""
    cls = type(config)
    values = {}
    for f in fields(config):
        where, resume = status(cls, f.name), _metadata(cls, f.name, "resume")
        if isinstance(where, str) and resume is None:
            resume = "same" if where.startswith(_SAME_ON_RESUME) else "may_change"
        if resume == "same":
            values[f.name] = getattr(config, f.name)
    return values


@dataclass(frozen=True, slots=True)
class _Declared:
    """Default and accepted kinds of one option."""

    name: str
    default: Any
    kinds: tuple[Kind, ...]

    def check(self, value: Any) -> Any:
        """The value, with tuples as lists, paths as str and numbers as Python numbers.

        Raises:
            ConfigError: the option accepts no such value.
        """
        try:
            return take_first(self.kinds, value)
        except Mismatch as error:
            raise ConfigError(
                f"{self.name}={self._shown(value)} must be {self.expected}{error}"
            ) from None

    def _shown(self, value: Any) -> str:
        return f"<{type(value).__name__}>" if self.name in _SECRET else shown(value)

    @property
    def expected(self) -> str:
        """Description of the accepted values."""
        texts = list(dict.fromkeys(kind.text for kind in self.kinds if kind.text != "None"))
        if len(texts) < len(self.kinds):
            texts.append("None")
        if len(texts) == 1:
            return texts[0]
        if texts[0].startswith("one of ") and texts[1:] == ["None"]:
            return ", ".join(texts)
        texts = [part for text in texts for part in _FLATTENED.get(text, (text,))]
        return f"{', '.join(texts[:-1])} or {texts[-1]}"


def check_fields(config: Any) -> None:
    """Check the type and range of every field that acts.

    Raises:
        ConfigError: naming the field, its value and the accepted values.
    """
    for declared in _declared(type(config)).values():  # type: ignore[arg-type]
        value = getattr(config, declared.name)
        if value is not declared.default:
            checked = declared.check(value)
            if checked is not value:
                setattr(config, declared.name, checked)


def check_option(cls: type, name: str, value: Any) -> Any:
    """Check and normalize one value before the config is built.

    Raises:
        ConfigError: naming the option, its value and the accepted values.
    """
    declared = _declared(cls).get(name)
    return value if declared is None or value is declared.default else declared.check(value)


def check_alias(cls: type, name: str, alias: Alias, value: Any) -> Any:
    """Check and normalize the value of another name.

    Raises:
        ConfigError: naming the alias, its value and the accepted values.
    """
    declared = _declared(cls)[alias.target]
    if alias.convert is not None or alias.limits is not None:
        hint = type(alias.default)
        kinds = tuple(kinds_of(name, hint, alias.limits or Range(), empty=False))
        declared = replace(declared, kinds=kinds)
    return replace(declared, name=name).check(value)


@functools.cache
def _declared(cls: type) -> Mapping[str, _Declared]:
    hints = get_type_hints(cls)
    declared = {}
    for f in fields(cls):
        if hasattr(cls, "INHERITED") and not isinstance(status(cls, f.name), str):
            continue  # its value must be the default, or has no effect
        entry = getattr(cls, "INHERITED", {}).get(f.name)
        limits = _metadata(cls, f.name, "limits") or getattr(entry, "limits", None)
        accepts = _metadata(cls, f.name, "accepts") or getattr(entry, "accepts", None)
        default = default_of(f)
        hint = accepts or _hint(hints[f.name], f.metadata.get("choices"))
        kinds = kinds_of(f.name, hint, limits or Range(), empty=default == "")
        declared[f.name] = _Declared(f.name, default, tuple(kinds))
    return declared


def _hint(hint: Any, choices: Iterable[str] | None) -> Any:
    """The annotation, narrowed to the choices that argument parsers are given."""
    if choices is None:
        return hint
    named = Literal[tuple(choices)]  # type: ignore[valid-type]
    return named | None if type(None) in get_args(hint) else named


def _metadata(cls: type, name: str, key: str) -> Any:
    """An entry of a field's metadata, from the nearest class that has one."""
    declarations = (base.__dict__.get("__dataclass_fields__", {}).get(name) for base in cls.__mro__)
    values = (_lookup(f.metadata, key) for f in declarations if f is not None)
    return next((value for value in values if value is not None), None)


def _lookup(metadata: Mapping[str, Any], key: str) -> Any:
    try:
        return metadata[key]
    except KeyError:  # the field was not declared with ``option``
        return None
