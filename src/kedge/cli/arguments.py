"""Parses flags and YAML files into dataclasses, with ``HfArgumentParser``."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Literal, NoReturn, get_args, get_type_hints

from annotated_types import Interval
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from kedge.cli.flags import Flags, Help
from kedge.cli.model_arguments import ModelConfig
from kedge.cli.quick import check_options, unknown_flag
from kedge.cli.yaml_files import read_yaml
from kedge.config.base import OnPolicyConfig
from kedge.config.declare import NoEffect, check_fields, option, status
from kedge.config.ppo import RECIPES, PPOConfig, find_recipe
from kedge.records.errors import ConfigError

logger = logging.getLogger(__name__)
_LIBRARIES_DROPOUT = 0.05  # default lora_dropout in TRL and open-instruct


@dataclass
class ScriptArguments:
    """Datasets, reward sources and algorithm, by name."""

    dataset_name: str | None = option(
        None, "The prompts: a json, jsonl, csv, parquet or txt file, a folder, or a hub name."
    )
    eval_dataset_name: str | None = option(
        None, "The prompts of evaluations, if they are elsewhere: a file, a folder or a hub name."
    )
    dataset_mixer_list: list[str] | None = option(
        None, "A mixture in place of dataset_name, such as a.jsonl 0.5 b.jsonl 400."
    )
    dataset_config: str | None = option(None, "The configuration of a hub dataset, if several.")
    dataset_train_split: str = option("train", "The split that has the training prompts.")
    dataset_test_split: str = option("test", "The split that has the evaluation prompts.")
    prompt_column: str | None = option(
        None, "Which column has the prompts, if it is not called prompt, query or input_ids."
    )
    reward_funcs: list[str] | None = option(
        None, "One or more reward functions, each as file.py:function or module:function."
    )
    dummy_reward: bool = option(
        False, "Score with an untrained random head, to try a run without a reward or a score head."
    )
    reward_model_multiplier: float = option(1.0, "The weight of the reward model; at 0 none loads.")
    apply_verifiable_reward: bool = option(
        False, "Score each row by the verifier that its column dataset names, against ground_truth."
    )
    verification_reward: float = option(10.0, "The weight of apply_verifiable_reward.")
    add_r1_style_format_reward: bool = option(
        False, "Reward responses of the form ...</think> <answer>...</answer>."
    )
    r1_style_format_reward: float = option(1.0, "The weight of add_r1_style_format_reward.")
    value_model_path: str | None = option(None, "The folder or hub name of the value model.")
    algorithm: str | None = option(
        None,
        "What replaces the algorithm of the command: reinforce_pp, reinforce_pp_baseline, "
        "remax, or a kedge.Algorithm as file.py:name or module:name.",
    )
    algorithm_kwargs: str | None = option(
        None, 'The options of algorithm as JSON, such as {"baseline": true}.'
    )

    recipe: Literal["sao", "agent"] | None = option(
        None, "Use defaults for PPO that were published together; docs/recipes.md lists them."
    )
    base_model: str | None = option(None, "The folder or hub name of another tokenizer.")
    sanity_check: bool = option(False, "Use only the first 100 rows of the dataset.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class ModelArguments(ModelConfig):
    """Options for loading the policy and its adapter."""

    model_name_or_path: str | None = option(
        None, "The folder or hub name of the policy, unless sft_model_path is given."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = option(
        None, "The type of the policy's weights. If unset, float32, with autocast under bf16."
    )
    lora_dropout: Annotated[float, Interval(ge=0, lt=1)] = option(
        0.0, "The dropout of the adapter. It must be 0, since PPO trains without dropout."
    )
    trust_remote_code: bool = field(default=False, init=False)  # the config has the option

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Parsed options of a command that trains."""

    script: ScriptArguments
    config: Any
    model: ModelArguments
    given: frozenset[str]  # names that were set on the command line or in the file


# Flags shown by ``--help``; ``--help all`` shows the others, too.
_FIRST = """
    model_name_or_path dataset_name eval_dataset_name reward_model_path reward_funcs output_dir
    total_episodes num_train_epochs learning_rate per_device_train_batch_size
    gradient_accumulation_steps num_mini_batches num_ppo_epochs num_generations response_length
    max_length missing_eos_penalty kl_coef beta loss_type use_peft rollout_engine max_lag report_to
    resume_from_checkpoint"""
FIRST = _FIRST.split()


class Parser(HfArgumentParser):
    """An ``HfArgumentParser`` without abbreviations, with model loading, that raises ConfigErrors.

    ``none`` as the value of a flag in ``nullable`` means None.
    """

    def __init__(self, kinds: tuple[Any, Any], **options: Any) -> None:
        every: list[Any] = [*kinds, ModelArguments]
        super().__init__(every, allow_abbrev=False, formatter_class=Help, **options)
        self.nullable = nullable(every)
        idle = {
            f.name
            for kind in every
            if hasattr(kind, "STATUS")
            for f in fields(kind)
            if isinstance(status(kind, f.name), NoEffect)
        }
        for name in sorted(switches(every)):  # the others have it from HfArgumentParser
            no = (f"--no_{name}", f"--no-{name.replace('_', '-')}")
            default, text = argparse.SUPPRESS, argparse.SUPPRESS
            self.add_argument(*no, dest=name, action="store_false", default=default, help=text)
        for action in self._actions:
            if action.dest in ("sft_model_path", "reward_model_path"):
                action.default = None  # absent unless the flag is set
            if action.type is string_to_bool and action.nargs is None:
                action.nargs, action.const = "?", True  # --tf32 alone means True
            if action.dest == "resume_from_checkpoint":
                action.nargs, action.const = "?", "True"  # the flag alone: the newest checkpoint
            if action.dest in idle:  # accepted, but not listed
                action.help = argparse.SUPPRESS

    def show_help(self, argv: Sequence[str]) -> bool:
        """Print the help if ``argv`` asks for it: the most useful flags, or all of them."""
        if not {"-h", "--help", "--help_all", "--help-all"} & set(argv):
            return False
        if not {"all", "--help_all", "--help-all"} & set(argv):
            listed = [a for a in self._actions if a.help is not argparse.SUPPRESS]
            for action in listed:
                if action.dest not in FIRST:
                    action.help = argparse.SUPPRESS
            for group in self._action_groups:
                group._group_actions.sort(
                    key=lambda a: FIRST.index(a.dest) if a.dest in FIRST else 99
                )
            self.epilog = f"--help all shows all {len({a.dest for a in listed})} flags."
        self.print_help()
        return True

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError instead of exiting."""
        raise ConfigError(message)


def switches(kinds: Iterable[Any]) -> set[str]:
    """Fields of True or False, unless they are True by default."""
    names = set()
    for kind in kinds:
        hints, flags = get_type_hints(kind), (bool, bool | None)
        own = (f for f in fields(kind) if f.init and f.default is not True)
        names |= {f.name for f in own if hints[f.name] in flags}
    return names


def nullable(kinds: Iterable[Any]) -> frozenset[str]:
    """Fields that accept None, where that is not the default, or not that of a recipe.

    Strings are excluded: ``none`` may be meant as text.
    """
    names, in_recipes = set(), {name for recipe in RECIPES.values() for name in recipe}
    for kind in kinds:
        hints = get_type_hints(kind)
        for f in fields(kind):
            types = set(get_args(hints[f.name]))
            optional = type(None) in types and not types & {bool, str}
            if optional and (f.default not in (None, MISSING) or f.name in in_recipes):
                names.add(f.name)
    return frozenset(names)


def parser(prog: str, config: type[OnPolicyConfig] = PPOConfig) -> Parser:
    """The parser of a command that trains."""
    return Parser(
        (ScriptArguments, config),
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [--flag value ...]",
        description="Train a language model.  --config FILE.yaml reads flags from a file;\n"
        "flags on the command line override it.",
    )


def parse(
    argv: Sequence[str],
    *,
    prog: str,
    defaults: Mapping[str, Any] | None = None,
    config: type[OnPolicyConfig] = PPOConfig,
) -> Options:
    """Parse flags and the files given by ``--config``; ``defaults`` hold for names not set."""
    (script, settings, model), given = read(parser(prog, config), argv, defaults)
    _check(model)
    return Options(script=script, config=settings, model=model, given=given)


def read(
    parser: Parser, argv: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], frozenset[str]]:
    """Parse flags and files into the parser's dataclasses; also return the names that were set."""
    known = {action.dest for action in parser._actions if action.dest != "help"}
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # keeps unset flags out of the namespace

    def values(tokens: Sequence[str]) -> dict[str, Any]:
        none, words = _take_none(tokens, parser.nullable)
        namespace, extra = parser.parse_known_args(words)
        if extra:
            raise ConfigError(unknown_flag(extra[0], known))
        return vars(namespace) | none

    files = Flags(parser.prog, add_help=False, allow_abbrev=False)
    files.add_argument("--config", action="append", default=[], metavar="FILE")
    chosen, argv = files.parse_known_args(argv)
    tokens: list[str] = []
    for file in chosen.config:
        content = read_yaml(file)
        check_options(file, content, known)
        tokens += _tokens(content, parser)
    given = values([*tokens, *argv])
    before = values(_tokens(defaults or {}, parser))
    recipe = find_recipe(given["recipe"]) if given.get("recipe") else {}
    if unknown := sorted(recipe.keys() - known):
        raise ConfigError(f"--recipe {given['recipe']} is for PPO: it sets {unknown[0]}")
    script, settings, model = parser.parse_dict({**before, **recipe, **given})
    model.trust_remote_code = settings.trust_remote_code
    return (script, settings, model), frozenset(given)


def _take_none(
    tokens: Sequence[str], nullable: frozenset[str]
) -> tuple[dict[str, None], list[str]]:
    """Flags of ``nullable`` whose value is ``none`` or ``null``, and the other words."""
    none: dict[str, None] = {}
    words: list[str] = []
    waiting = [*tokens]
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in nullable:
            none.pop(name, None)  # the last one counts
            value = value if equals else (waiting or [""])[0]
            if value.lower() in ("none", "null"):
                none[name] = None
                waiting = waiting if equals else waiting[1:]
                continue
        words.append(word)
    return none, words


def _tokens(values: Mapping[str, Any], parser: Parser) -> list[str]:
    """``name: value`` pairs as flags."""
    several = {action.dest for action in parser._actions if action.nargs == "+"}
    tokens: list[str] = []
    for key, value in values.items():
        if value is None:
            tokens += [f"--{key}=none"] if key in parser.nullable else []
        elif key in several:
            listed = value if isinstance(value, list) else [value]
            tokens += [f"--{key}", *map(str, listed)] if listed else []
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            tokens.append(f"--{key}={text}")
    return tokens


def _check(model: ModelArguments) -> None:
    if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        raise ConfigError(
            "load_in_4bit and load_in_8bit freeze the weights and need --use_peft; add it"
        )
    if model.lora_dropout == _LIBRARIES_DROPOUT:
        logger.warning("lora_dropout=0.05 has no effect: models train without dropout")
        model.lora_dropout = 0.0
    if model.lora_dropout:
        raise ConfigError(
            f"lora_dropout={model.lora_dropout} must be 0: with dropout two passes over the same "
            "tokens differ, which distorts the probability ratio"
        )
    adapter = {f.name for f in fields(model) if f.name.startswith(("lora_", "use_rs", "use_do"))}
    unused = sorted(n for n in adapter if getattr(model, n) != getattr(ModelArguments, n))
    if unused and not model.use_peft:
        raise ConfigError(f"{', '.join(unused)} needs --use_peft; add it")
