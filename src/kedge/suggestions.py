"""Did-you-mean suggestions for unknown options and arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from kedge import plugins
from kedge.records.errors import OptionError

# Arguments of the trainers, which might be taken for options of their config.
TRAINER_ARGUMENTS = {
    *("model", "ref_model", "value_model", "reward_model", "processing_class", "peft_config"),
    *("reward_funcs", "reward_processing_class", "reward_processing_classes", "optimizers"),
    *("train_dataset", "eval_dataset", "data_collator", "callbacks", "quantization_config"),
    *("algorithm", "rollout_func", "tools", "environment_factory", "compute_metrics"),
}

Class = TypeVar("Class", bound=type)


def hint(name: str, known: Collection[str], *, dashes: str = "", config: str = "") -> str:
    """A suggestion for an unknown name: its name here, or the closest known one; may be empty.

    ``config`` is the name of a config whose options are ``known``.
    """
    group: Collection[str] = ()
    theirs = ""
    for dialect in plugins.find("kedge.dialects"):
        suggest = plugins.load("kedge.dialects", dialect)
        if suggest is not None and not (group or theirs):
            group, theirs = suggest(config, name)
    ours = [alias for alias in group if alias in known]
    if ours or theirs:
        return f"; it is called {dashes}{ours[0]} here{theirs}" if ours else theirs
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; the nearest is {dashes}{close[0]}" if close else ""


def suggest_names(
    kind: str, *, config: type | None = None, also: Collection[str] = ()
) -> Callable[[Class], Class]:
    """Class decorator: unknown keywords raise an OptionError with a suggestion.

    The class calls its keywords ``kind``, "option" or "argument"; ``config`` holds the options that
    arguments may be mistaken for, and ``also`` are accepted in addition to the signature.
    """
    options = frozenset(inspect.signature(config).parameters) if config is not None else frozenset()

    def decorate(cls: Class) -> Class:
        init: Callable[..., None] = cls.__init__  # type: ignore[misc]
        parameters = inspect.signature(init).parameters.values()
        known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"} | {*also}

        @functools.wraps(init)
        def checked(self: Any, /, *args: Any, **kwargs: Any) -> None:
            for name in kwargs.keys() - known:
                in_config = "; it is an option of the config" if name in options else ""
                problem = in_config or hint(name, known)
                raise OptionError(f"{type(self).__name__} has no {kind} {name!r}{problem}")
            init(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate
