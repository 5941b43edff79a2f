"""Other names that TRL's example scripts import, with TRL's defaults.

``from kedge import ModelConfig, ScriptArguments, TrlParser, get_peft_config, ...``
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate import PartialState
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from kedge.cli.model_arguments import ModelConfig, get_peft_config, get_quantization_config
from kedge.cli.yaml_files import read_yaml
from kedge.config.declare import option
from kedge.records.errors import ConfigError

__all__ = [
    "ModelConfig",
    "ScriptArguments",
    "ScriptParser",
    "TrlParser",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]


@dataclass
class ScriptArguments:
    """Dataset options of a script."""

    dataset_name: str | None = option(None, "The folder or hub name of the dataset.")
    dataset_config: str | None = option(None, "The configuration of the dataset.")
    dataset_train_split: str = option("train", "Which split has the training prompts.")
    dataset_test_split: str = option("test", "Which split has the evaluation prompts.")
    dataset_streaming: bool = option(False, "Load the dataset as a stream.")
    ignore_bias_buffers: bool = option(
        False, "Ignore bool buffers of old models under DistributedDataParallel."
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Device map that puts the whole model on this process's GPU; None without a GPU."""
    return {"": PartialState().local_process_index} if torch.cuda.is_available() else None


class ScriptParser(HfArgumentParser):
    """``HfArgumentParser`` in which the dataclasses of a program may repeat fields of a config.

    Such a flag belongs to the program's dataclass; the config keeps its default.
    """

    def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
        kinds = dataclass_types if isinstance(dataclass_types, Iterable) else [dataclass_types]
        self.kinds: list[Any] = [kind for kind in kinds if kind is not None]
        own = [kind for kind in self.kinds if not issubclass(kind, TrainingArguments)]
        ceded = {f.name for kind in own for f in fields(kind) if f.init}
        self.ceded = ceded - {f.name for f in fields(TrainingArguments)}
        # The last dataclass that declares a flag decides how it is read.
        order = [*(kind for kind in self.kinds if kind not in own), *own]
        super().__init__(order, conflict_handler="resolve", **options)
        for action in self._actions:
            if action.type is string_to_bool and action.nargs is None:
                action.nargs, action.const = "?", True  # --tf32 alone means True

    def parse_args_into_dataclasses(  # type: ignore[override]
        self, args: Any = None, return_remaining_strings: bool = False, **options: Any
    ) -> tuple[Any, ...]:
        """One object per dataclass, followed by unknown flags if requested."""
        namespace, rest = self.parse_known_args(args)
        if rest and not return_remaining_strings:
            raise ValueError(f"these arguments are not flags of a dataclass: {rest}")
        parsed = self.parse_dict(vars(namespace))
        return (*parsed, rest) if return_remaining_strings else parsed

    def parse_dict(self, args: dict[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """One object per dataclass from values by name."""
        parsed, unknown = [], {*args}
        for kind in self.kinds:
            names = {f.name for f in fields(kind) if f.init}
            names -= self.ceded if issubclass(kind, TrainingArguments) else set()
            parsed.append(kind(**{name: args[name] for name in names if name in args}))
            unknown -= names
        if unknown and not allow_extra_keys:
            raise ValueError(f"these names are not options of a dataclass: {sorted(unknown)}")
        return tuple(parsed)


class TrlParser(ScriptParser):
    """Parses flags, and a YAML file named by ``--config``, into dataclasses.

    Values in the file become the defaults of flags; its ``env`` mapping sets environment variables.
    """

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """One object per dataclass, followed by unknown flags if requested.

        Args:
            args: flags; None: ``sys.argv[1:]``.
            return_remaining_strings: return unknown flags instead of raising.
            fail_with_unknown_args: raise for unknown names in the file.

        Raises:
            ConfigError: the file is missing, not a mapping, or has unknown names.
        """
        flags = list(sys.argv[1:] if args is None else args)
        rest: list[str] = []
        if "--config" in flags:
            place = flags.index("--config")
            if place + 1 == len(flags):
                raise ConfigError("--config must be followed by the name of a YAML file")
            values = read_yaml(flags[place + 1])
            del flags[place : place + 2]
            rest = self._set_defaults(
                values, strict=fail_with_unknown_args and not return_remaining_strings
            )
        parsed = self.parse_args_into_dataclasses(
            flags, return_remaining_strings=return_remaining_strings
        )
        return (*parsed[:-1], rest + parsed[-1]) if return_remaining_strings else tuple(parsed)

    def _set_defaults(self, values: dict[str, Any], *, strict: bool) -> list[str]:
        """Set values as defaults of flags; returns unknown names as flags."""
        env = values.pop("env", None) or {}
        if not isinstance(env, dict):
            raise ConfigError(f"env in the YAML file must map names to values, got {env!r}")
        try:
            os.environ.update({str(name): str(value) for name, value in env.items()})
        except ValueError as error:  # a NUL, or a name with "="
            raise ConfigError(f"env={env!r} in the YAML file: {error}") from error
        known = {action.dest for action in self._actions}
        unknown = [name for name in values if name not in known]
        if unknown and strict:
            raise ConfigError(f"the YAML file has unknown options: {', '.join(unknown)}")
        for action in self._actions:
            if action.dest in values:
                action.default, action.required = values[action.dest], False
        flags: list[str] = []
        for name in unknown:
            value = values[name]
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return flags
