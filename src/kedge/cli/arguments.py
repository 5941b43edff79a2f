"""Flags and YAML files into dataclasses."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from kedge.config.base import OnPolicyConfig
from kedge.config.declare import check_fields, option
from kedge.config.option_status import FIELD_SUPPORT
from kedge.config.options import Honored, Moved, Support
from kedge.config.ppo import PPOv2Config
from kedge.errors import ConfigError
from kedge.suggestions import hint


@dataclass
class ScriptArguments:
    """Data and rewards by name."""

    dataset_name: str | None = option(
        None, "Prompts: a json, jsonl, csv, parquet or txt file, a folder, or a hub name."
    )
    dataset_mixer_list: list[str] | None = option(
        None, "Instead of dataset_name: names and amounts in turn, such as a.jsonl 0.5 b.jsonl 400."
    )
    dataset_config: str | None = option(None, "Configuration of a hub dataset.")
    dataset_train_split: str = option("train", "Split with the training prompts.")
    dataset_test_split: str = option("test", "Split with the evaluation prompts.")
    dataset_prompt_column: str | None = option(
        None, "Column with the prompts, if it is not prompt, query or input_ids."
    )
    reward_funcs: list[str] | None = option(
        None, "Reward functions: file.py:function or module:function, one or more."
    )
    reward_model_multiplier: float = option(
        1.0, "Weight of the reward model; at 0 it is not loaded."
    )
    apply_verifiable_reward: bool = option(
        False, "Score rows by the verifier that their column dataset names, against ground_truth."
    )
    verification_reward: float = option(10.0, "Weight of the verifiers.")
    add_r1_style_format_reward: bool = option(
        False, "Reward responses with ...</think> <answer>...</answer>."
    )
    r1_style_format_reward: float = option(1.0, "How much.")
    value_model_path: str | None = option(None, "Folder or name of the value model.")
    algorithm: str | None = option(
        None,
        "Another algorithm: reinforce_pp, reinforce_pp_baseline, remax, or file.py:name or "
        "module:name of a kedge.Algorithm.",
    )
    algorithm_kwargs: str | None = option(None, 'Its options as JSON, such as {"baseline": true}.')
    dataset_streaming: bool = option(False, "Not supported: a step must be able to name its rows.")
    ignore_bias_buffers: bool = option(False, "Not supported (older DDP).")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class ModelArguments:
    """How the policy is loaded, and its adapter."""

    model_name_or_path: str | None = option(
        None, "Folder or name of the model; also the policy, unless sft_model_path is given."
    )
    model_revision: str = option("main", "Branch, tag or commit of a hub model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = option(
        None, "Type of the policy's weights; unset: float32, and bf16 is autocast over it."
    )
    attn_implementation: str | None = option(None, "sdpa, eager, flash_attention_2 ...")
    trust_remote_code: bool = option(False, "Run code that comes with a model.")
    use_peft: bool = option(False, "Train a LoRA adapter instead of the weights.")
    lora_r: int = option(16, "Rank of the adapter.", ge=1)
    lora_alpha: int = option(32, "Scale of the adapter.", ge=1)
    lora_dropout: float = option(0.0, "Has to be 0: PPO trains without dropout.", ge=0, lt=1)
    lora_target_modules: list[str] | None = option(None, "Layers with adapter; unset: PEFT's own.")
    lora_target_parameters: list[str] | None = option(None, "Parameters with adapter.")
    lora_modules_to_save: list[str] | None = option(None, "Layers trained and saved whole.")
    lora_task_type: str = option("CAUSAL_LM", "Task of the adapter.")
    use_rslora: bool = option(False, "Rank-stabilized LoRA.")
    use_dora: bool = option(False, "Weight-decomposed LoRA.")
    load_in_8bit: bool = option(False, "Base weights in 8 bit, with use_peft; needs bitsandbytes.")
    load_in_4bit: bool = option(False, "Base weights in 4 bit, with use_peft; needs bitsandbytes.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "Kind of 4-bit number.")
    use_bnb_nested_quant: bool = option(False, "Quantize the constants of 4-bit weights too.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class ModelArgumentsBeside(ModelArguments):
    """The same beside a config that has ``trust_remote_code`` itself."""

    trust_remote_code: bool = field(default=False, init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything a command was told.

    Args:
        script: data and rewards.
        config: the trainer's options.
        model: how the policy is loaded.
        given: names that were set, on the command line or in the file.
    """

    script: ScriptArguments
    config: OnPolicyConfig
    model: ModelArguments
    given: frozenset[str]


SHORT = 60  # letters of a list of choices that help shows


class _Help(argparse.RawDescriptionHelpFormatter):
    """Each flag once, for dashes stand for underscores anywhere, with its default."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [n for n in action.option_strings if "-" not in n.strip("-")]
        if not names or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, "X")
        return f"{names[0]} {value if len(value) < SHORT else 'X'}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", getattr(action.default, "value", action.default)
        if default in (None, argparse.SUPPRESS, "", False) or not action.option_strings:
            return text
        return f"{text} (default: {str(default).replace('%', '%%')})"


class Parser(HfArgumentParser):
    """HfArgumentParser with errors that name the nearest flag, and no abbreviations."""

    def __init__(self, kinds: Any, support: Mapping[str, Support], **options: Any) -> None:
        super().__init__(
            kinds,
            allow_abbrev=False,
            formatter_class=_Help,
            **options,
        )
        self.nullable = nullable(kinds)
        for action in self._actions:
            if action.dest in self.nullable:
                _take_none(action)
            if action.type is string_to_bool and action.nargs is None:
                action.nargs, action.const = "?", True  # --bf16 alone means True
            if action.dest == "resume_from_checkpoint":
                action.nargs, action.const = "?", "True"  # alone: the newest
            said = support.get(action.dest, Honored(""))
            alias = isinstance(said, Moved) and action.dest not in FIELD_SUPPORT
            if not (alias or isinstance(said, Honored)):
                action.help = argparse.SUPPRESS

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving, so that there is one way that errors are shown."""
        raise ConfigError(message)


def nullable(kinds: Iterable[Any]) -> frozenset[str]:
    """Fields for which None means something other than leaving them out.

    Texts are not among them: ``none`` may be the text.
    """
    found = set()
    for kind in kinds:
        hints = get_type_hints(kind)
        for f in fields(kind):
            types = set(get_args(hints[f.name]))
            optional = type(None) in types and not types & {bool, str}
            if optional and f.default not in (None, MISSING):
                found.add(f.name)
    return frozenset(found)


def _take_none(action: argparse.Action) -> None:
    """Let a flag be set to ``none`` (or ``null``)."""
    convert: Any = action.type

    def converted(text: str) -> Any:
        return None if text.lower() in ("none", "null") else convert(text)

    converted.__name__ = getattr(convert, "__name__", "value")  # for error messages
    action.type = converted
    if action.choices is not None:
        action.choices = [*action.choices, None]
        action.metavar = "{" + ",".join(str(c or "none") for c in action.choices) + "}"


def parser(prog: str, config: type[OnPolicyConfig] = PPOv2Config) -> Parser:
    """The parser of a command that trains, and of the scripts."""
    has_trust = "trust_remote_code" in {f.name for f in fields(config)}
    return Parser(
        (ScriptArguments, config, ModelArgumentsBeside if has_trust else ModelArguments),
        config.SUPPORT,
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [--flag value ...]",
        description="Train a language model.  --config FILE.yaml reads flags from a file; the "
        "command line wins.",
    )


def parse(
    argv: Sequence[str],
    *,
    prog: str,
    defaults: Mapping[str, Any] | None = None,
    config: type[OnPolicyConfig] = PPOv2Config,
) -> Options:
    """Read flags, and the file that ``--config`` names.

    Args:
        argv: the flags.
        prog: the command, for help and errors.
        defaults: values that count where neither flags nor file say anything.
        config: the options of the trainer.

    Raises:
        ConfigError: an unknown flag or key (with the nearest known one), or a value that is no
            such thing.
    """
    (script, settings, model), given = read(parser(prog, config), argv, defaults)
    if isinstance(model, ModelArgumentsBeside):
        model.trust_remote_code = settings.trust_remote_code
    settings.given = given
    _check(script, model)
    return Options(script=script, config=settings, model=model, given=given)


def read(
    made: Parser, argv: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], frozenset[str]]:
    """The dataclasses of a parser out of flags and files, and the names that were given.

    Args:
        made: the parser.
        argv: the flags; ``--config FILE.yaml`` reads a file, and flags win.
        defaults: values that count where neither flags nor file say anything.

    Raises:
        ConfigError: an unknown flag or key, or a value that is no such thing.
    """
    known = {action.dest for action in made._actions if action.dest != "help"}
    files, argv = _take_config(list(argv))
    tokens: list[str] = []
    for file in files:
        tokens += _tokens(_read_yaml(file, known), made)
    tokens += argv
    given = _names(tokens, known)
    before = {k: v for k, v in (defaults or {}).items() if k not in given}
    tokens = [*_tokens(before, made), *tokens]
    _, extra = made.parse_known_args(tokens)
    if extra:
        raise ConfigError(_unknown(extra[0], known))
    return made.parse_args_into_dataclasses(tokens, look_for_args_file=False), given


def _take_config(argv: list[str]) -> tuple[list[str], list[str]]:
    files, rest = [], []
    while argv:
        token = argv.pop(0)
        if token == "--config":
            if not argv:
                raise ConfigError("--config needs a file name")
            files.append(argv.pop(0))
        elif token.startswith("--config="):
            files.append(token.removeprefix("--config="))
        else:
            rest.append(token)
    return files, rest


def _read_yaml(file: str, known: Iterable[str]) -> dict[str, Any]:
    import yaml

    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"--config {file}: there is no such file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file} is no YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file} must hold `name: value` lines, not a list or a text")
    for key in values:
        if key not in known:
            raise ConfigError(f"{file}: {_unknown(str(key), known, in_file=True)}")
    return values


def _tokens(values: Mapping[str, Any], made: Parser) -> list[str]:
    """``name: value`` as the flags that say the same."""
    several = {action.dest for action in made._actions if action.nargs == "+"}
    tokens: list[str] = []
    for key, value in values.items():
        if value is None and key in made.nullable:
            tokens.append(f"--{key}=none")
        elif value is None:
            continue
        elif key in several:
            listed = value if isinstance(value, list) else [value]
            tokens += [f"--{key}", *map(str, listed)] if listed else []
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            tokens.append(f"--{key}={text}")
    return tokens


def _names(tokens: Iterable[str], known: set[str]) -> frozenset[str]:
    names = set()
    for token in tokens:
        if token.startswith("--"):
            name = token[2:].partition("=")[0].replace("-", "_")
            names.add(name if name in known else name.removeprefix("no_"))
    return frozenset(names & known)


def _unknown(token: str, known: Iterable[str], *, in_file: bool = False) -> str:
    if token.startswith("-") or in_file:
        name = token.lstrip("-").partition("=")[0].replace("-", "_")
        dashes = "--" if token.startswith("-") else ""
        meant = hint(name, {*known}, dashes=dashes)
        return f"there is no {'flag' if dashes else 'option'} {dashes}{name}{meant}"
    return f"{token!r} belongs to no flag; flags look like --learning_rate 1e-5"


def _check(script: ScriptArguments, model: ModelArguments) -> None:
    if script.dataset_streaming:
        raise ConfigError(
            "dataset_streaming=True is not supported: a resumed run must see the same prompts, and "
            "a stream cannot name its rows; leave it out"
        )
    if script.ignore_bias_buffers:
        raise ConfigError(
            "ignore_bias_buffers=True is for DistributedDataParallel, which is not used; drop it"
        )
    if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        raise ConfigError("load_in_4bit and load_in_8bit freeze the weights; add --use_peft")
    if model.load_in_4bit and model.load_in_8bit:
        raise ConfigError("load_in_4bit and load_in_8bit are both set; set one of them")
    if model.lora_dropout:
        raise ConfigError(
            f"lora_dropout={model.lora_dropout} would make two passes over the same text disagree, "
            "and with them the ratio that PPO clips; leave it 0"
        )
    adapter = {f.name for f in fields(model) if f.name.startswith(("lora_", "use_rs", "use_do"))}
    set_anyway = sorted(n for n in adapter if getattr(model, n) != getattr(ModelArguments, n))
    if set_anyway and not model.use_peft:
        raise ConfigError(f"{', '.join(set_anyway)} set without --use_peft; add it")


class Flags(argparse.ArgumentParser):
    """``ArgumentParser`` that raises instead of leaving: there is one way that errors are shown."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(message)
