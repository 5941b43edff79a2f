"""The options of commands that train: reads flags and files, and checks them, without torch."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from kedge.cli.flags import Flags
from kedge.cli.model_arguments import ModelConfig
from kedge.cli.yaml_files import read_yaml
from kedge.config.algorithms import ValueArguments, find_recipe
from kedge.config.declare import check_fields, format_value, option
from kedge.records.errors import ConfigError
from kedge.suggestions import hint

FILE = Path(__file__).with_name("flags.json")
LIBRARIES_DROPOUT = 0.05  # default lora_dropout in TRL and open-instruct


@dataclass
class ScriptArguments:
    """Datasets, reward sources and algorithm, by name."""

    dataset_name: str | None = option(
        None, "Training prompts: a json, jsonl, csv, parquet or txt file, a folder, or a hub name."
    )
    eval_dataset_name: str | None = option(
        None, "Evaluation prompts, if they are elsewhere: a file, a folder or a hub name."
    )
    dataset_mixer_list: list[str] | None = option(
        None, "Mixture of datasets in place of dataset_name, such as a.jsonl 0.5 b.jsonl 400."
    )
    dataset_config: str | None = option(None, "Configuration of a hub dataset that has several.")
    dataset_train_split: str = option("train", "Split with the training prompts.")
    dataset_test_split: str = option("test", "Split with the evaluation prompts.")
    prompt_column: str | None = option(
        None, "Name of the column with the prompts, if it is not prompt, query or input_ids."
    )
    reward_funcs: list[str] | None = option(
        None, "One or more reward functions, each as file.py:function or module:function."
    )
    dummy_reward: bool = option(
        False, "Score with an untrained random head, to try a run without a reward or a score head."
    )
    reward_model_multiplier: float = option(1.0, "Weight of the reward model; with 0, none loads.")
    apply_verifiable_reward: bool = option(
        False, "Score rows against ground_truth with the verifier that column dataset names."
    )
    verification_reward: float = option(10.0, "Weight of apply_verifiable_reward.")
    add_r1_style_format_reward: bool = option(
        False, "Reward responses of the form ...</think> <answer>...</answer>."
    )
    r1_style_format_reward: float = option(1.0, "Weight of add_r1_style_format_reward.")
    value_model_path: str | None = option(None, "Folder or hub name of the value model.")
    algorithm: str | None = option(
        None,
        "Algorithm to use instead of the command's: reinforce_pp, reinforce_pp_baseline, remax, "
        "or a kedge.Algorithm as file.py:name or module:name.",
    )
    algorithm_kwargs: str | None = option(
        None, 'Options of that algorithm as JSON, such as {"baseline": true}.'
    )

    recipe: Literal["sao", "agent"] | None = option(
        None, "Use defaults for PPO that were published together; docs/recipes.md lists them."
    )
    base_model: str | None = option(None, "Folder or hub name of another tokenizer.")
    sanity_check: bool = option(False, "Use only the first 100 rows of the dataset.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class ModelArguments(ModelConfig):
    """Options for loading the policy and its adapter."""

    model_name_or_path: str | None = option(
        None, "Folder or hub name of the policy, unless sft_model_path is set."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = option(
        None, "Data type of the policy's weights. If unset, float32, with autocast under bf16."
    )
    lora_dropout: Annotated[float, Interval(ge=0, lt=1)] = option(
        0.0, "Dropout of the adapter. It must be 0, because PPO trains without dropout."
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

    def check(self) -> None:
        """Refuse options of the adapter that have no effect, or distort training; says nothing."""
        model = self.model
        if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
            raise ConfigError(
                "load_in_4bit and load_in_8bit freeze the weights and need --use_peft; add it"
            )
        if model.lora_dropout not in (0.0, LIBRARIES_DROPOUT):
            raise ConfigError(
                f"lora_dropout={model.lora_dropout} must be 0: with dropout two passes over the"
                " same tokens differ, which distorts the probability ratio"
            )
        prefixes = ("lora_", "use_rs", "use_do")
        adapter = {f.name for f in fields(model) if f.name.startswith(prefixes)} - {"lora_dropout"}
        unused = sorted(n for n in adapter if getattr(model, n) != getattr(ModelArguments, n))
        if unused and not model.use_peft:
            raise ConfigError(f"{', '.join(unused)} needs --use_peft; add it")

    def reward_amounts(self) -> list[str]:
        """The flags that were given of those that set weights of rewards."""
        flags = ("reward_model_multiplier", *_NEEDS, *_NEEDS.values())
        amounts = [flag for flag in flags if flag in self.given]
        if amounts and self.config.reward_weights is not None:
            raise ConfigError(
                f"--reward_weights and --{amounts[0]} both set reward weights; remove"
                " --reward_weights"
            )
        return amounts


def read(
    parser: Any, argv: Sequence[str], defaults: Mapping[str, Any] | None = None
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


def _tokens(values: Mapping[str, Any], parser: Any) -> list[str]:
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


def check_options(file: str, options: Collection[str], known: Collection[str]) -> None:
    """Refuse options of a file that are not ``known``, and name the commands that have them all."""
    unknown = [str(key) for key in options if key not in known]
    if not unknown:
        return
    every = json.loads(FILE.read_text(encoding="utf-8"))["options"]
    commands = [f"kedge {name}" for name, names in every.items() if {*options} <= {*names}]
    alias = hint(unknown[0], known)
    if not commands:
        raise ConfigError(f"{file}: unknown option {unknown[0]}{alias}")
    several, more = len(unknown) > 1, f" and {len(unknown) - 3} more" * (len(unknown) > 3)
    raise ConfigError(
        f"{file}: {', '.join(unknown[:3])}{more} belong{'s' * (not several)} to"
        f" {' and '.join(commands)}: run {commands[0]} --config {file}"
        + alias
        * ("called" in alias and not several)
    )


def unknown_flag(word: str, known: set[str]) -> str:
    """What is said of a word that is no flag; ``known`` are the names of options."""
    if not word.startswith("-"):
        return f"{word!r} does not belong to a flag; flags look like --learning_rate 1e-5"
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    return f"unknown flag --{name}{hint(name, known, dashes='--')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPaths:
    """Folders or hub names; ``reward`` is None if only reward functions score."""

    policy: str
    tokenizer: str
    reward: str | None

    def check(self) -> None:
        """Check that each can be found, before anything is loaded."""
        from kedge.models.load import check_source

        for name in filter(None, (self.policy, self.tokenizer, self.reward)):
            check_source(name, "the model")


def model_names(options: Options) -> ModelPaths:
    """Find the folders or hub names of policy, tokenizer and reward model.

    The policy is ``sft_model_path`` if given, else ``model_name_or_path``.  With ``dummy_reward``
    and no reward, a randomly initialized reward head on the policy stands in, to try a run.
    """
    given, config, script = options.given, options.config, options.script
    main_name, value_name = options.model.model_name_or_path, script.value_model_path
    if not isinstance(config, ValueArguments):
        if script.algorithm == "ppo":
            raise ConfigError("--algorithm ppo needs a value model; use the command kedge ppo")
        if value_name:
            raise ConfigError(
                f"--value_model_path {value_name}: this algorithm has no value model; remove the"
                " flag, or use kedge ppo"
            )
    policy = config.sft_model_path if "sft_model_path" in given else main_name
    if policy is None:
        raise ConfigError("--model_name_or_path is required: a folder or a hub name")
    tokenizer = script.base_model or main_name or policy
    reward = find_reward(options, policy)
    options.reward_amounts()
    return ModelPaths(policy=policy, tokenizer=tokenizer, reward=reward)


# Loss weight -> the flag without which it has no effect.
_NEEDS = {
    "verification_reward": "apply_verifiable_reward",
    "r1_style_format_reward": "add_r1_style_format_reward",
}


def find_reward(options: Options, policy: str) -> str | None:
    """The name of the reward model; None if reward functions or an environment score alone."""
    given, script, config = options.given, options.script, options.config
    for amount, switch in _NEEDS.items():
        if amount in given and not getattr(script, switch):
            raise ConfigError(f"--{amount} needs --{switch}; add it")
    if script.reward_model_multiplier != 1 and "reward_model_path" not in given:
        raise ConfigError("--reward_model_multiplier needs --reward_model_path; add it")
    if "reward_model_path" in given and script.reward_model_multiplier:
        return config.reward_model_path
    others = [script.reward_funcs, *(getattr(script, switch) for switch in _NEEDS.values())]
    if any((*others, config.environment, config.reward_adapter)):
        return None
    if not script.dummy_reward or "reward_model_path" in given:
        model = "reward_model_path" in given
        left_out = " (--reward_model_multiplier 0 leaves out the model)" if model else ""
        raise ConfigError(
            f"no reward is given{left_out}: add --reward_model_path, --reward_funcs"
            " file.py:function, or --dummy_reward to try a run with a random one"
        )
    return policy


def algorithm_kwargs(spec: str | None, text: str | None) -> dict[str, Any]:
    """The options of the algorithm called ``spec``, from JSON."""
    try:
        kwargs = dict(json.loads(text or "{}"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--algorithm_kwargs {format_value(text)} must be a JSON object, such as"
            f' {{"beta": 0.1}}: {error}'
        ) from error
    if kwargs and spec in (None, "ppo"):
        raise ConfigError(
            f"--algorithm_kwargs {text} needs --algorithm; the command's default algorithm"
            " is configured by flags"
        )
    return kwargs
