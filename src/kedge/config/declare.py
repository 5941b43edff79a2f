"""Declares options: default, help text and range; the type comes from the annotation.

``option`` declares a field, and ``check_fields`` checks all fields of a config against their
annotations and ranges.  Ranges of fields of ``transformers.TrainingArguments`` are in
``kedge.config.option_status``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from kedge.config.values import Kind, Mismatch, Range, kinds_of, shown, take_first
from kedge.errors import ConfigError

_FLATTENED = {"True or False": ("True", "False")}  # in a list of several kinds
_SECRET = ("hub_token", "push_to_hub_token")


class _Metadata(dict[str, Any]):
    """Metadata of a field: ``help`` for argument parsers, plus entries that only Kedge reads.

    ``HfArgumentParser`` passes every listed entry to argparse, so ``limits`` and ``accepts`` can be
    looked up but are not listed.
    """

    def __init__(self, text: str, limits: Range | None, accepts: Any) -> None:
        super().__init__(help=text)
        self._hidden = {"limits": limits, "accepts": accepts}

    def __missing__(self, key: str) -> Any:
        return self._hidden[key]


def option(
    default: Any,
    text: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    accepts: Any = None,
) -> Any:
    """A dataclass field with the help text that the command line and the docs show.

    Args:
        default: value if the option is not given.
        text: one sentence of help, with the unit; empty if the class's docstring has it.
        ge: lowest value of the number, or of each number of a list.  A field without bounds
            inherits those of the field that it overrides.
        gt: exclusive lower bound.
        le: highest value; infinity is allowed only if it is the bound.
        lt: exclusive upper bound.
        accepts: type of the values that Python code may give, if wider than the annotation, which
            argument parsers read.
    """
    bounds = (ge, gt, le, lt)
    limits = None if bounds == (None,) * 4 else Range(ge=ge, gt=gt, le=le, lt=lt)
    return field(default=default, metadata=_Metadata(text, limits, accepts))


def default_of(field: Field[Any]) -> Any:
    """Default value of a dataclass field."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


@dataclass(frozen=True, slots=True)
class _Declared:
    """Default and accepted kinds of one field."""

    name: str
    default: Any
    kinds: tuple[Kind, ...]

    def check(self, value: Any) -> Any:
        """The value, with tuples as lists, paths as str and numbers as Python numbers.

        Raises:
            ConfigError: the field accepts no such value.
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
    """Check the type and range of every field that acts; first step of every ``__post_init__``.

    Raises:
        ConfigError: naming the field, its value and the accepted values.
    """
    for declared in _declared(type(config)):  # type: ignore[arg-type]
        value = getattr(config, declared.name)
        if value is not declared.default:
            checked = declared.check(value)
            if checked is not value:
                setattr(config, declared.name, checked)


@functools.cache
def _declared(cls: type) -> tuple[_Declared, ...]:
    hints = get_type_hints(cls)
    support: Mapping[str, Any] | None = getattr(cls, "SUPPORT", None)
    declared = []
    for f in fields(cls):
        status = None if support is None else support.get(f.name)
        if support is not None and not getattr(status, "typed", status is not None):
            continue  # refused, whatever its value
        limits, accepts = _constraints(cls, f.name)
        default = default_of(f)
        hint = accepts or _hint(hints[f.name], f.metadata.get("choices"))
        kinds = kinds_of(f.name, hint, limits or Range(), empty=default == "")
        declared.append(_Declared(f.name, default, tuple(kinds)))
    return tuple(declared)


def _hint(hint: Any, choices: Iterable[str] | None) -> Any:
    """The annotation, narrowed to the choices that argument parsers are given."""
    if choices is None:
        return hint
    named = Literal[tuple(choices)]  # type: ignore[valid-type]
    return named | None if type(None) in get_args(hint) else named


def _constraints(cls: type, name: str) -> tuple[Range | None, Any]:
    """Range and accepted type of a field, each from the nearest class that declares it."""
    metadata = [
        f.metadata
        for base in cls.__mro__
        if (f := base.__dict__.get("__dataclass_fields__", {}).get(name)) is not None
    ]
    support: Any = getattr(cls, "SUPPORT", {}).get(name)
    limits: Range | None = _first(metadata, "limits") or getattr(support, "limits", None)
    if limits is None and hasattr(support, "to"):
        limits = _constraints(cls, support.to)[0]
    return limits, _first(metadata, "accepts") or getattr(support, "accepts", None)


def _first(metadata: Iterable[Mapping[str, Any]], key: str) -> Any:
    values = (_lookup(entries, key) for entries in metadata)
    return next((value for value in values if value is not None), None)


def _lookup(metadata: Mapping[str, Any], key: str) -> Any:
    try:
        return metadata[key]
    except KeyError:  # the field was not declared with ``option``
        return None
