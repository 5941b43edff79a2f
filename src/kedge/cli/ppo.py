"""``kedge ppo``, ``rloo`` and ``grpo``: builds a trainer from flags and runs it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kedge.cli.arguments import parse
from kedge.cli.arguments import parser as build_parser
from kedge.cli.data import load_prompts, note
from kedge.cli.model_arguments import get_peft_config, get_quantization_config
from kedge.cli.options import ModelArguments, ModelPaths, Options, algorithm_kwargs, model_names
from kedge.config.declare import read_mapping
from kedge.output import check_targets, lock_output_dir
from kedge.records.errors import ConfigError
from kedge.suggestions import hint
from kedge.trainers import find_trainer, load_trainer


def parser(command: str = "ppo") -> Any:
    """The flags of a name in ``kedge.trainers.TRAINERS``."""
    return build_parser(f"kedge {command}", load_trainer(command).SPEC.config)


def main(argv: Sequence[str], *, command: str = "ppo") -> int:
    """Train with the flags of a command; returns 1 if ``stop_on_finding`` ended the run."""
    if parser(command).show_help(argv):
        return 0
    config = load_trainer(command).SPEC.config
    trainer = train(parse_options(argv, prog=f"kedge {command}", config=config))
    return int(trainer.stopped_by is not None)


parse_options, load_rows = parse, load_prompts


def load_run_tokenizer(options: Options, names: ModelPaths) -> Any:
    """The tokenizer of a run."""
    return load_tokenizer(names.tokenizer, options.model)


def train(options: Options, **given: Any) -> Any:
    """Build the trainer, train, save, and show some completions; returns the trainer.

    ``given`` are keyword arguments of ``build``.
    """
    config = options.config
    check_targets(config)
    evaluates = "do_eval" in options.given and config.do_eval
    if evaluates and not config.do_train:
        trainer = build(options, **given)
        trainer.evaluate()
        return trainer
    resume = resume_point(config.resume_from_checkpoint)
    with lock_output_dir(config):  # fail before loading for minutes, not after
        trainer = build(options, new_run=not resume, **given)
        trainer.resume_hint = resume_line
        trainer.train(resume_from_checkpoint=resume)
        if trainer.stopped_by:
            return trainer
        if evaluates:
            trainer.evaluate()
        trainer.save_model(config.output_dir)
        if config.push_to_hub:
            trainer.push_to_hub(dataset_name=options.script.dataset_name)
        if config.num_sample_generations:
            trainer.generate_completions()
        if trainer.state.is_world_process_zero:
            print(f"kedge: the trained model is in {config.output_dir}")
    return trainer


def build(
    options: Options,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    tokenizer: Any = None,
    value_model: Any = None,
    new_run: bool = False,
) -> Any:
    """The trainer that the flags describe, with everything loaded.

    Datasets, tokenizer and value model replace those that the flags name.  If a new run starts,
    ``output_dir`` must not hold checkpoints.
    """
    from kedge.models.load import check_init_kwargs, tokenizer_beside
    from kedge.rewards.build import load_model
    from kedge.trainers.hooks.checkpoints import earlier_run

    script, config, model = options.script, options.config, options.model
    names = model_names(options)
    names.check()
    if names.reward is not None and "reward_model_path" not in options.given:
        note(
            "no --reward_model_path or --reward_funcs given: using a dummy reward, a randomly"
            f" initialized head on {names.policy}"
        )
    algorithm = load_algorithm(script.algorithm, script.algorithm_kwargs)
    if new_run and config.output_dir:  # fail before loading for minutes, not after
        earlier_run(Path(config.output_dir), overwrite=config.overwrite_output_dir)
    if train_dataset is None:
        train_dataset, eval_dataset = load_prompts(options)
    reward, reward_tokenizer, trust = names.reward, None, model.trust_remote_code
    if reward is not None and (trust or script.dummy_reward):  # the trainer loads others by name
        reward_tokenizer = tokenizer_beside(reward, trust_remote_code=trust)
        reward = load_model(reward, trust_remote_code=trust, new_head=script.dummy_reward)
    functions, weights = build_rewards(options, model=reward is not None)
    kwargs = check_init_kwargs(read_mapping(config.model_init_kwargs))
    if kwargs:
        config.model_init_kwargs = None  # the trainer gets a loaded model
    if config.bf16 and model.use_peft and "dtype" not in options.given:
        kwargs.setdefault("dtype", "bfloat16")  # the base under the adapter is frozen
    shared: dict[str, Any] = {
        "args": config,
        "processing_class": tokenizer or load_tokenizer(names.tokenizer, model),
        "model": load_policy(names.policy, model, more=kwargs),
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "peft_config": get_peft_config(model),
        "algorithm": algorithm,
        "reward_weights": weights,
    }
    trainer = find_trainer(config)
    if not trainer.SPEC.value_model:
        rewards = [*([] if reward is None else [reward]), *functions]
        return trainer(reward_funcs=rewards, reward_processing_classes=reward_tokenizer, **shared)
    return trainer(
        reward_model=reward,
        reward_processing_class=reward_tokenizer,
        value_model=value_model or script.value_model_path,
        reward_funcs=functions or None,
        **shared,
    )


def build_rewards(options: Options, *, model: bool) -> tuple[list[Any], list[float] | None]:
    """Reward functions, and weights of all sources, a model first; None: those of the config."""
    from kedge.verifiers import by_column, r1_style_format

    script = options.script
    functions: list[Any] = [*(script.reward_funcs or [])]
    weights = [script.reward_model_multiplier] * model + [1.0] * len(functions)
    if script.apply_verifiable_reward:
        renamed = getattr(options.config, "remap_verifier", None)
        old, _, new = (renamed or "").partition("=")
        if renamed is not None and not (old and new):
            raise ConfigError(
                f"--remap_verifier must be old=new, two verifier names, got {renamed}"
            )
        functions.append(by_column(rename={} if renamed is None else {old: new}))
        weights.append(script.verification_reward)
    if script.add_r1_style_format_reward:
        functions.append(r1_style_format)
        weights.append(script.r1_style_format_reward)
    return functions, weights if options.reward_amounts() else None


def load_tokenizer(name: str, options: ModelArguments, revision: str | None = None) -> Any:
    """The tokenizer saved with a model; ``revision`` replaces that of the model."""
    from kedge.models import load

    revision = revision or options.model_revision
    return load.load_tokenizer(name, revision=revision, trust_remote_code=options.trust_remote_code)


def load_policy(
    name: str, options: ModelArguments, *, more: Mapping[str, Any] | None = None
) -> Any:
    """The policy; ``more`` are arguments of ``from_pretrained`` that override the flags."""
    from kedge.models import load

    kwargs = load.to_load_kwargs(load_options(options) | dict(more or {}))
    return load.load_policy(name, **kwargs)


def load_options(options: ModelArguments) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained``."""
    kwargs = {
        "dtype": options.dtype or "float32",
        "revision": options.model_revision,
        "trust_remote_code": options.trust_remote_code,
        "attn_implementation": options.attn_implementation,
        "quantization_config": get_quantization_config(
            replace(options, dtype=options.dtype or "bfloat16")
        ),
    }
    return {name: value for name, value in kwargs.items() if value is not None}


# -- an algorithm by name --------------------------------------------------------------------------


def load_algorithm(spec: str | None, options: str | None = None) -> Any:
    """The algorithm called ``spec``, or None for the default algorithm of the command.

    A built-in name, ``file.py:name`` or ``module:name``, whose factory gets the JSON ``options``.
    """
    from kedge import Algorithm
    from kedge.algorithms import reinforce_pp, remax
    from kedge.plugins import load_module

    kwargs = algorithm_kwargs(spec, options)
    if spec in (None, "ppo"):
        return None
    builtin = {
        "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": partial(reinforce_pp, baseline=True),
        "remax": remax,
    }
    target: Any = builtin.get(spec := str(spec))
    if target is None:
        where, _, name = spec.rpartition(":")
        try:
            target = getattr(load_module(where, "kedge_algorithm"), name)
        except Exception as error:  # the user's file may raise anything
            raise ConfigError(
                f"--algorithm {spec} cannot be loaded ({type(error).__name__}: {error}); use"
                f" {', '.join(builtin)}, file.py:name or module:name{hint(spec, builtin)}"
            ) from error
    kwargs = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
    try:
        algorithm = target(**kwargs) if kwargs or callable(target) else target
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--algorithm {spec} with {kwargs or 'no options'}: {error}") from error
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"--algorithm {spec} must be a kedge.Algorithm or a function that returns one, got"
            f" {type(algorithm).__name__}"
        )
    return algorithm


# -- resuming --------------------------------------------------------------------------------------


def resume_point(value: str | None) -> str | bool | None:
    """``--resume_from_checkpoint`` alone, or True, is the newest checkpoint; else a folder."""
    words: Mapping[str, bool | None] = {"true": True, "false": None, "": None}
    return value if value is None else words.get(value.lower(), value)


def resume_line(checkpoint: Path | None) -> str:
    """How to resume this command; ``checkpoint`` is None if none was saved."""
    if checkpoint is None:
        return "no checkpoint was saved to resume from"
    words = command_to_repeat()
    if words is None:
        return "add this to the same command to resume: --resume_from_checkpoint"
    return f"to resume from {checkpoint}:\n    {words} --resume_from_checkpoint"


def command_to_repeat() -> str | None:
    """The command line of this process, quoted for a shell, without ``--resume_from_checkpoint``.

    None if it cannot be repeated: a launcher started this process, or it holds a secret.
    """
    from kedge.reporting.run_info import command

    first, *words = sys.argv or [""]
    if "RANK" in os.environ or "..." in command():
        return None
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None and module.origin == first:  # a file path would put its folder
        start = ["python", "-m", module.name.removesuffix(".__main__")]  # first in sys.path
    elif first.endswith(".py"):
        start = ["python", first]
    elif Path(first).name == "kedge":
        start = ["kedge"]
    else:
        return None
    resumed = r" --resume[-_]from[-_]checkpoint(=\S+| (?!--)\S+)?"
    return re.sub(resumed, "", shlex.join([*start, *words]))
