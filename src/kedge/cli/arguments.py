"""Parses flags and YAML files into dataclasses, with ``HfArgumentParser``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_args, get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from kedge.cli.flags import Help
from kedge.cli.options import ModelArguments, Options, ScriptArguments, read
from kedge.config.algorithms import RECIPES
from kedge.config.base import OnPolicyConfig
from kedge.config.declare import NoEffect, status
from kedge.config.ppo import PPOConfig
from kedge.records.errors import ConfigError

logger = logging.getLogger(__name__)
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
    options = Options(script=script, config=settings, model=model, given=given)
    options.check()
    if model.lora_dropout:
        logger.warning(
            "lora_dropout=%s has no effect: models train without dropout", model.lora_dropout
        )
        model.lora_dropout = 0.0
    return options
