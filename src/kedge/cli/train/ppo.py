"""``kedge ppo``: builds a trainer from flags and runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from kedge.cli.arguments import ModelArguments, Options, parse, parser
from kedge.cli.data import load_prompts, note
from kedge.cli.rewards import build_sources, check_rewards, scores_without_model
from kedge.cli.train.resume import how_to_resume, resume_point
from kedge.config.declare import format_value
from kedge.errors import ConfigError
from kedge.trainers import find_trainer, load_trainer
from kedge.trl_scripts import get_peft_config, get_quantization_config


def main(argv: Sequence[str], *, command: str = "ppo") -> None:
    """Train with the given flags; ``command`` is a name in ``kedge.trainers.TRAINERS``."""
    prog, config = f"kedge {command}", load_trainer(command).SPEC.command_config
    if parser(prog, config).show_help(argv):
        return
    train(parse(argv, prog=prog, config=config))


def train(options: Options, **given: Any) -> Any:
    """Build the trainer, train, save, and show some completions.

    Args:
        options: what ``parse`` returned.
        given: keyword arguments of ``build``.

    Returns:
        The trainer.

    Raises:
        KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, once a checkpoint is written.
    """
    from kedge.trainers.run.files import check_targets, claimed

    config = options.config
    check_targets(config)
    if "do_eval" in options.given and config.do_eval and not config.do_train:
        trainer = build(options, **given)
        trainer.evaluate()
        return trainer
    with claimed(config):  # before minutes of loading, not after
        return _train(options, given)


def _train(options: Options, given: Mapping[str, Any]) -> Any:
    config, resume = options.config, resume_point(options.config.resume_from_checkpoint)
    evaluates = "do_eval" in options.given and config.do_eval
    trainer = build(options, starts=not resume, **given)
    learn(trainer, resume)
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


def learn(trainer: Any, resume: str | bool | None) -> None:
    """Train; after Ctrl-C or SIGTERM, finish the iteration, save a checkpoint and stop."""
    from kedge.loop.shutdown import GracefulShutdown
    from kedge.ray.context import get_context
    from kedge.trainers.run.hf_callbacks import Stopping

    if get_context() is not None:  # the driver of the launch handles signals
        trainer.train(resume_from_checkpoint=resume)
        return
    shutdown = GracefulShutdown()
    trainer.add_callback(Stopping(shutdown))
    with shutdown.install():
        trainer.train(resume_from_checkpoint=resume)
    if shutdown.requested:
        note(how_to_resume(trainer))
    shutdown.reraise()


def build(
    options: Options,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    tokenizer: Any = None,
    value_model: Any = None,
    starts: bool = False,
) -> Any:
    """The trainer that the flags describe, with everything loaded.

    Args:
        options: what ``parse`` returned.
        train_dataset: prompts to use instead of ``dataset_name``.
        eval_dataset: prompts to evaluate on, with ``train_dataset``.
        tokenizer: instead of the one next to the model.
        value_model: instead of ``value_model_path``.
        starts: this is a new run, so ``output_dir`` must not hold checkpoints of another.

    Raises:
        ConfigError: a value model for an algorithm without one, or whatever the trainer refuses.
    """
    names, script = model_names(options), options.script
    algorithm = load_algorithm(script.algorithm, script.algorithm_kwargs)
    if starts and options.config.output_dir:  # before minutes of loading, not after
        from kedge.trainers.run.files import earlier_run

        earlier_run(Path(options.config.output_dir), overwrite=options.config.overwrite_output_dir)
    if train_dataset is None:
        train_dataset, eval_dataset = load_prompts(options)
    model = options.model
    reward, reward_tokenizer = reward_model(names.reward, model, dummy=script.dummy_reward)
    sources = build_sources(options, model=reward is not None)
    shared: dict[str, Any] = {
        "args": options.config,
        "processing_class": tokenizer or load_tokenizer(names.tokenizer, model),
        "model": load_policy(names.policy, model, more=_loading_overrides(options)),
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "peft_config": get_peft_config(model),
        "algorithm": algorithm,
        "reward_weights": sources.weights,
    }
    trainer = find_trainer(options.config)
    if not trainer.SPEC.value_model:
        rewards = [*([] if reward is None else [reward]), *sources.functions]
        return trainer(reward_funcs=rewards, reward_processing_classes=reward_tokenizer, **shared)
    return trainer(
        reward_model=reward,
        reward_processing_class=reward_tokenizer,
        value_model=value_model or script.value_model_path,
        reward_funcs=sources.functions or None,
        **shared,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Folders or hub names; ``reward`` is None if only reward functions score."""

    policy: str
    tokenizer: str
    reward: str | None


def model_names(options: Options) -> Names:
    """Which folder or hub name is the policy, the tokenizer and the reward model.

    The policy is ``sft_model_path`` if given, else ``model_name_or_path``.  With ``dummy_reward``
    and no reward, a randomly initialized reward head on the policy stands in, to try a run.

    Raises:
        ConfigError: no model or no reward is given, or a folder does not exist.
    """
    given, config, main_name = options.given, options.config, options.model.model_name_or_path
    no_values = not find_trainer(config).SPEC.value_model
    if no_values and options.script.algorithm == "ppo":
        raise ConfigError("--algorithm ppo needs a value model; use the command kedge ppo")
    if no_values and options.script.value_model_path:
        raise ConfigError(
            f"--value_model_path {options.script.value_model_path}: this algorithm has no value "
            "model; remove the flag, or use kedge ppo"
        )
    policy = config.sft_model_path if "sft_model_path" in given else main_name
    if policy is None:
        raise ConfigError("--model_name_or_path is required: a folder or a hub name")
    tokenizer = main_name or policy
    if "base_model" in given:
        tokenizer = config.base_model
    check_rewards(options)
    reward = config.reward_model_path if "reward_model_path" in given else None
    if options.script.reward_model_multiplier == 0:
        reward = None
    elif reward is None and not scores_without_model(options):
        if not options.script.dummy_reward:
            raise ConfigError(
                "no reward is given: add --reward_model_path, --reward_funcs file.py:function, or"
                " --dummy_reward to try a run with a random one"
            )
        reward = policy
        note(
            "no --reward_model_path or --reward_funcs given: using a dummy reward, a randomly"
            f" initialized head on {policy}"
        )
    for name in (policy, tokenizer, reward, options.script.value_model_path):
        _check_place(name)
    return Names(policy=policy, tokenizer=tokenizer, reward=reward)


def _check_place(name: str | None) -> None:
    """Check that a name is an existing folder or may be on the hub (at most one slash)."""
    if name is None or Path(name).expanduser().is_dir():
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"cannot load the model {name!r}: the folder does not exist")


def load_tokenizer(name: str, options: ModelArguments, revision: str | None = None) -> Any:
    """The tokenizer saved with a model; ``revision`` replaces that of the model.

    Raises:
        ConfigError: it is missing or cannot be read.
    """
    from kedge.models import load

    revision = revision or options.model_revision
    return load.load_tokenizer(name, revision=revision, trust_remote_code=options.trust_remote_code)


def load_policy(
    name: str, options: ModelArguments, *, more: Mapping[str, Any] | None = None
) -> Any:
    """The policy; ``more`` are arguments of ``from_pretrained`` that override the flags.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from kedge.models import load
    from kedge.trainers.assembly.setup import split

    return load.load_policy(name, **split(_flags(options) | dict(more or {})))


def _flags(options: ModelArguments) -> dict[str, Any]:
    return {
        "dtype": options.dtype or "float32",
        "revision": options.model_revision,
        "attn_implementation": options.attn_implementation,
        "trust_remote_code": options.trust_remote_code,
        "quantization_config": get_quantization_config(
            replace(options, dtype=options.dtype or "bfloat16")
        ),
    }


def _loading_overrides(options: Options) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that override the flags.

    They are ``model_init_kwargs``, removed from the config since the trainer gets a loaded model,
    and the dtype of a frozen base in a bf16 run.
    """
    from kedge.trainers.assembly.setup import init_kwargs

    config, kwargs = options.config, init_kwargs(options.config)
    if kwargs:
        config.model_init_kwargs = None
    if config.bf16 and options.model.use_peft and "dtype" not in options.given:
        kwargs.setdefault("dtype", "bfloat16")
    return kwargs


def loading(options: ModelArguments) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained``."""
    flags = _flags(options) | {"use_safetensors": True}
    return {name: value for name, value in flags.items() if value is not None}


def reward_model(
    name: str | None, options: ModelArguments, *, dummy: bool = False
) -> tuple[Any, Any]:
    """The reward model and its tokenizer; ``dummy``: a missing score head is random."""
    trust = options.trust_remote_code
    if name is None or not (trust or dummy):
        return name, None
    from kedge.rewards.build import find_tokenizer, load_model

    model = load_model(name, trust_remote_code=trust, new_head=dummy)
    return model, find_tokenizer(name, trust_remote_code=trust)


def load_algorithm(spec: str | None, options: str | None = None) -> Any:
    """The algorithm called ``spec``, or None for the default algorithm of the command.

    Args:
        spec: a built-in name, ``file.py:name`` or ``module:name``.
        options: keyword arguments of its factory function, as a JSON object.

    Raises:
        ConfigError: it does not exist, is not an algorithm, or does not accept an option.
    """
    from kedge import Algorithm

    kwargs = _parse_kwargs(options)
    if spec in (None, "ppo"):
        if kwargs:
            raise ConfigError(
                f"--algorithm_kwargs {options} needs --algorithm; the command's default algorithm"
                " is configured by flags"
            )
        return None
    target = _find_algorithm(str(spec))
    try:
        algorithm = target(**kwargs) if callable(target) else target
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--algorithm {spec} with {kwargs or 'no options'}: {error}") from error
    if kwargs and not callable(target):
        raise ConfigError(
            f"--algorithm_kwargs {options}: {spec} is not a function that takes options"
        )
    if not isinstance(algorithm, Algorithm):
        name = str(spec).rpartition(":")[2]
        raise ConfigError(
            f"--algorithm {spec}: {name!r} must be a kedge.Algorithm or a function that returns "
            f"one, got {type(algorithm).__name__}"
        )
    return algorithm


def _find_algorithm(spec: str) -> Any:
    """The object called ``spec``: a built-in name, ``file.py:name`` or ``module:name``."""
    from kedge.algorithms import reinforce_pp, remax
    from kedge.rewards.build import load_module

    builtin: dict[str, Callable[..., Any]] = {
        "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": partial(reinforce_pp, baseline=True),
        "remax": remax,
    }
    if spec in builtin:
        return builtin[spec]
    where, _, name = spec.rpartition(":")
    choices = f"{', '.join(builtin)}, file.py:name or module:name"
    if not where or not name:
        near = get_close_matches(spec, builtin, n=1)
        suggestion = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--algorithm {spec} must be one of {choices}{suggestion}")
    try:
        module = load_module(where, "kedge_algorithm")
    except Exception as error:  # whatever the user's file raises
        raise ConfigError(
            f"--algorithm {spec}: cannot import {where!r}"
            f" ({type(error).__name__}: {error}); use {choices}"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f"--algorithm {spec}: {where!r} does not define {name!r}")
    return getattr(module, name)


def _parse_kwargs(options: str | None) -> dict[str, Any]:
    try:
        kwargs = json.loads(options or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--algorithm_kwargs {format_value(options)} must be JSON: {error}"
        ) from error
    if not isinstance(kwargs, dict):
        raise ConfigError(
            f'--algorithm_kwargs {options} must be a JSON object, such as {{"beta": 0.1}}'
        )
    return {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
