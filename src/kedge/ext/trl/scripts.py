"""Other names that TRL's example scripts import, with TRL's defaults.

``from kedge import ModelConfig, ScriptArguments, TrlParser, get_peft_config, ...``
"""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from transformers import BitsAndBytesConfig, HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from kedge.config.declare import Count, option
from kedge.records.errors import ConfigError, install_command

MOST_YAML_VALUES = 100_000


@dataclass
class ScriptArguments:
    """Dataset options of a script."""

    dataset_name: str | None = option(None, "Folder or hub name of the dataset.")
    dataset_config: str | None = option(None, "Configuration of the dataset.")
    dataset_train_split: str = option("train", "Split with the training prompts.")
    dataset_test_split: str = option("test", "Split with the evaluation prompts.")
    dataset_streaming: bool = option(False, "Load the dataset as a stream.")
    ignore_bias_buffers: bool = option(
        False, "Ignore bool buffers of old models under DistributedDataParallel."
    )


@dataclass
class ModelConfig:
    """Model and adapter options of a script.

    ``torch_dtype`` is the name of ``dtype`` in TRL 0.12 to 0.22.  ``trust_remote_code`` is readable
    for scripts of older versions, but is not a flag: it is now an option of the configs.

    Raises:
        ConfigError: both 8 and 4 bits are requested, or two data types.
    """

    model_name_or_path: str | None = option(None, "Folder or hub name of the model.")
    model_revision: str = option("main", "Branch, tag or commit of a hub model.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = option(
        "float32", "Data type of the weights."
    )
    attn_implementation: str | None = option(
        None, "Attention implementation: sdpa, eager, flash_attention_2, ..."
    )
    use_peft: bool = option(False, "Train a LoRA adapter instead of the weights.")
    lora_r: Count = option(16, "Rank of the adapter.")
    lora_alpha: Count = option(32, "LoRA alpha: scale of the adapter.")
    lora_dropout: float = option(0.05, "Dropout of the adapter; Kedge's trainers disable dropout.")
    lora_target_modules: list[str] | None = option(None, "Layers that get an adapter.")
    lora_target_parameters: list[str] | None = option(None, "Parameters that get an adapter.")
    lora_modules_to_save: list[str] | None = option(None, "Layers trained and saved in full.")
    lora_task_type: str = option("CAUSAL_LM", "Task type of the adapter.")
    use_rslora: bool = option(False, "Rank-stabilized LoRA.")
    use_dora: bool = option(False, "Weight-decomposed LoRA.")
    load_in_8bit: bool = option(False, "Base weights in 8 bits; needs bitsandbytes.")
    load_in_4bit: bool = option(False, "Base weights in 4 bits; needs bitsandbytes.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "4-bit number format.")
    use_bnb_nested_quant: bool = option(False, "Also quantize the constants of 4-bit weights.")
    bnb_4bit_quant_storage: str | None = option(None, "Storage type of 4-bit weights.")
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = option(
        None, "Older name of dtype."
    )
    trust_remote_code: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        given = {self.dtype, self.torch_dtype or self.dtype} - {type(self).dtype}
        if len(given) > 1:
            raise ConfigError(
                f"torch_dtype={self.torch_dtype!r} is another name of dtype, but"
                f" dtype={self.dtype!r} is set; set only dtype"
            )
        self.dtype = self.torch_dtype = self.torch_dtype or self.dtype
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_8bit and load_in_4bit are both set; set only one of them")


def get_peft_config(model_args: ModelConfig) -> Any:
    """``peft.LoraConfig`` of the adapter; None without ``use_peft``.

    Raises:
        ConfigError: PEFT is not installed.
    """
    if not model_args.use_peft:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            f"use_peft=True needs PEFT: {install_command('peft')} ({error})"
        ) from error
    targets: Any = model_args.lora_target_modules
    if isinstance(targets, list) and len(targets) == 1:
        targets = targets[0]  # "all-linear", or a regular expression
    settings = {
        "task_type": model_args.lora_task_type,
        "r": model_args.lora_r,
        "lora_alpha": model_args.lora_alpha,
        "lora_dropout": model_args.lora_dropout,
        "target_modules": targets,
        "target_parameters": model_args.lora_target_parameters,
        "modules_to_save": model_args.lora_modules_to_save,
        "use_rslora": model_args.use_rslora,
        "use_dora": model_args.use_dora,
    }
    return LoraConfig(**{name: x for name, x in settings.items() if x is not None})


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """Quantization of the base weights; None without 8 or 4 bits."""
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not model_args.load_in_4bit:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=None if model_args.dtype == "auto" else model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
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
