"""One declaration per option: default, help and range; the type comes from the annotation.

``option`` declares a field, and ``check_fields`` checks all fields of a config against their
annotations and ranges.  The ranges of ``transformers.TrainingArguments`` are in the table of
``kedge.config.option_status``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from kedge.config.values import Kind, Mismatch, Range, kinds_of, shown, take_first
from kedge.errors import ConfigError

_ALONE = {"True or False": ("True", "False")}  # in a list of more
_SECRET = ("hub_token", "push_to_hub_token")


class _Metadata(dict[str, Any]):
    """Metadata of a field: ``help`` for argument parsers, and what only Kedge reads.

    ``HfArgumentParser`` hands everything that it iterates over to argparse, so the range and the
    further types can be looked up but are not listed.
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
        default: its value when it is not given.
        text: one sentence of help, with the unit; empty where the class's docstring has it.
        ge: the number, or each number of a list, is at least this.  A field that states no bound
            keeps those of the field that it replaces in a subclass.
        gt: it is above this.
        le: it is at most this; infinity is allowed only if it is the bound.
        lt: it is below this.
        accepts: type of the values that Python code may give, where the annotation, which argument
            parsers read, says less.
    """
    bounds = (ge, gt, le, lt)
    limits = None if bounds == (None,) * 4 else Range(ge=ge, gt=gt, le=le, lt=lt)
    return field(default=default, metadata=_Metadata(text, limits, accepts))


def default_of(field: Field[Any]) -> Any:
    """The value that a dataclass field has when it is not given."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


@dataclass(frozen=True, slots=True)
class _Declared:
    """What is known about a field's values."""

    name: str
    default: Any
    kinds: tuple[Kind, ...]

    def check(self, value: Any) -> Any:
        """The value, tuples as lists, paths as text and numbers as Python's own.

        Raises:
            ConfigError: no kind accepts it.
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
        """What the value may be, in words."""
        texts = list(dict.fromkeys(kind.text for kind in self.kinds if kind.text != "None"))
        if len(texts) < len(self.kinds):
            texts.append("None")
        if len(texts) == 1:
            return texts[0]
        if texts[0].startswith("one of ") and texts[1:] == ["None"]:
            return ", ".join(texts)
        texts = [each for text in texts for each in _ALONE.get(text, (text,))]
        return f"{', '.join(texts[:-1])} or {texts[-1]}"


def check_fields(config: Any) -> None:
    """Check the type and the range of every field that acts; the first thing a config does.

    Raises:
        ConfigError: naming the field, its value and what it may be.
    """
    for declared in _declared(type(config)):  # type: ignore[arg-type]
        value = getattr(config, declared.name)
        if value is not declared.default:
            taken = declared.check(value)
            if taken is not value:
                setattr(config, declared.name, taken)


@functools.cache
def _declared(cls: type) -> tuple[_Declared, ...]:
    hints = get_type_hints(cls)
    support: Mapping[str, Any] | None = getattr(cls, "SUPPORT", None)
    found = []
    for f in fields(cls):
        said = None if support is None else support.get(f.name)
        if support is not None and not getattr(said, "typed", said is not None):
            continue  # it is refused, whatever it is set to
        limits, accepts = _stated(cls, f.name)
        default = default_of(f)
        hint = accepts or _hint(hints[f.name], f.metadata.get("choices"))
        kinds = kinds_of(f.name, hint, limits or Range(), empty=default == "")
        found.append(_Declared(f.name, default, tuple(kinds)))
    return tuple(found)


def _hint(hint: Any, choices: Iterable[str] | None) -> Any:
    """The annotation, narrowed to the choices that argument parsers are given."""
    if choices is None:
        return hint
    named = Literal[tuple(choices)]  # type: ignore[valid-type]
    return named | None if type(None) in get_args(hint) else named


def _stated(cls: type, name: str) -> tuple[Range | None, Any]:
    """Range and accepted type of a field: each of the nearest class that states it."""
    stated = [
        f.metadata
        for each in cls.__mro__
        if (f := each.__dict__.get("__dataclass_fields__", {}).get(name)) is not None
    ]
    support: Any = getattr(cls, "SUPPORT", {}).get(name)
    limits: Range | None = _first(stated, "limits") or getattr(support, "limits", None)
    if limits is None and hasattr(support, "to"):
        limits = _stated(cls, support.to)[0]
    return limits, _first(stated, "accepts") or getattr(support, "accepts", None)


def _first(stated: Iterable[Mapping[str, Any]], key: str) -> Any:
    return next((found for each in stated if (found := _looked_up(each, key)) is not None), None)


def _looked_up(metadata: Mapping[str, Any], key: str) -> Any:
    try:
        return metadata[key]
    except KeyError:  # not declared by ``option``
        return None
