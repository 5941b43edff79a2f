"""``kedge async-ppo``: PPO whose engines sample while the learners train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kedge.cli import ppo
from kedge.cli.arguments import Options, parse, parser
from kedge.cli.async_data import dressed, load_mixed
from kedge.cli.data import note
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.errors import ConfigError

_AI2 = (
    *("try_launch_beaker_eval_jobs", "try_launch_beaker_eval_jobs_on_weka"),
    *("try_auto_save_to_beaker", "gs_bucket_path", "oe_eval_tasks", "oe_eval_max_length"),
    "eval_priority",
)


def main(argv: Sequence[str], *, prog: str = "kedge async-ppo") -> None:
    """Train as the flags say."""
    if {"-h", "--help"} & set(argv):
        parser(prog, AsyncPPOConfig).print_help()
        return
    start(options_of(argv, prog=prog))


def options_of(argv: Sequence[str], *, prog: str = "kedge async-ppo") -> Options:
    """What the flags say, the reward model's double role settled.

    Raises:
        ConfigError: unknown flags, or values that cannot work.
    """
    options = parse(argv, prog=prog, config=AsyncPPOConfig)
    script, given = options.script, options.given
    ignored = sorted(set(_AI2) & given)
    if ignored:
        note(f"{', '.join(ignored)}: of Ai2's own cluster, ignored")
    # The value model starts from the reward model even where that scores nothing.
    unscored = script.reward_model_multiplier == 0 and "reward_model_path" in given
    if unscored and script.value_model_path is None:
        script = replace(script, value_model_path=options.config.reward_model_path)
    return replace(options, script=script)


def start(options: Options) -> Any:
    """Train where the options say: in this process, or in learners on Ray."""
    config = options.config
    assert isinstance(config, AsyncPPOConfig)
    if config.cache_dataset_only:
        train, test = load_mixed(options)
        note(f"{len(train)} prompts to train on, {0 if test is None else len(test)} to evaluate on")
        return None
    return learn(options)


def learn(options: Options) -> Any:
    """Build the trainer of this process, and train."""
    config = options.config
    assert isinstance(config, AsyncPPOConfig)
    if "wandb" in (config.report_to or []):
        os.environ.setdefault("WANDB_PROJECT", config.wandb_project_name)
        if config.wandb_entity is not None:
            os.environ.setdefault("WANDB_ENTITY", config.wandb_entity)
    names = ppo.model_names(options)
    tokenizer = ppo.load_tokenizer(config.tokenizer_name_or_path or names.tokenizer, options.model)
    train, test = load_mixed(options)
    return ppo.train(
        options,
        train_dataset=train,
        eval_dataset=test,
        tokenizer=dressed(tokenizer, config),
        value_model=_fresh_value(options) if config.init_value_from_scratch else None,
    )


def _fresh_value(options: Options) -> Any:
    """A value model of the reward model's shape with weights of its own."""
    from transformers import AutoModelForSequenceClassification, set_seed

    from kedge.cli.memory import read_config

    script, trust = options.script, options.model.trust_remote_code
    name = script.value_model_path or options.config.reward_model_path
    if "reward_model_path" not in options.given and script.value_model_path is None:
        raise ConfigError(
            "--init_value_from_scratch needs --reward_model_path or --value_model_path, whose shape"
            " the value model takes"
        )
    shape = read_config(name, trust_remote_code=trust)
    shape.num_labels = 1
    set_seed(options.config.seed)
    return AutoModelForSequenceClassification.from_config(shape, trust_remote_code=trust)
