"""The specification of a trainer, its constructor arguments, and other names of its metrics."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from typing_extensions import TypedDict

from kedge.algorithms import Algorithm
from kedge.algorithms.transforms import (
    drop_uniform_groups,
    mask_truncated,
    penalize_overlong,
    resample_uniform_groups,
)
from kedge.config.base import OnPolicyConfig
from kedge.config.declare import default_of, format_value, status
from kedge.data.encode import read_table
from kedge.data.stream import is_stream
from kedge.loop.metrics import TRL_NAMES
from kedge.records.errors import ConfigError
from kedge.records.protocols import EngineInfo, RolloutEngine, check_declared
from kedge.rewards.build import as_list

if TYPE_CHECKING:
    from kedge.config.grpo import GRPOConfig
    from kedge.config.ppo import PPOConfig
    from kedge.loop.loop import Engine

MetricNames = Callable[[Mapping[str, float]], dict[str, float]]
_ALGORITHM, _VALUE = "algorithm", "value model"  # sections of options


def filter_responses(algorithm: Algorithm, args: PPOConfig | GRPOConfig) -> Algorithm:
    """The overlong penalty and the filters of responses and groups that the config asks for."""
    if args.overlong_buffer:
        algorithm = penalize_overlong(
            algorithm, buffer=args.overlong_buffer, response_length=args.response_length
        )
    if args.mask_truncated_completions:
        algorithm = mask_truncated(algorithm)
    if args.drop_uniform_groups:
        algorithm = drop_uniform_groups(algorithm)
    if args.dynamic_sampling:
        algorithm = resample_uniform_groups(algorithm, rounds=args.dynamic_sampling)
    return algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """A trainer: its config, its algorithm, and other names of its metrics.

    ``algorithm`` builds the algorithm from the config and the weights of the rewards.
    ``metric_names`` returns the function that adds metrics under other libraries'
    names to the metrics of an iteration or an evaluation.
    """

    name: str  # of the algorithm, for model cards
    config: type[OnPolicyConfig]
    algorithm: Callable[[Any, Sequence[float] | None], Algorithm]
    metric_names: Callable[[Any, Engine], MetricNames] = lambda args, engine: lambda row: {}
    value_model: bool = False  # takes `value_model`, or `reward_model` to start it
    equal_vocabulary: bool = False  # reward models must have the policy's
    # Module of the command, with ``parse_options``, ``load_rows`` and ``load_run_tokenizer``.
    command: str = "kedge.cli.ppo"
    learners: Callable[[Any], int] | None = None  # that the command starts on a cluster


def check_custom(args: OnPolicyConfig, algorithm: Any, value_model: Any = None) -> None:
    """Reject trainer options that a custom algorithm would silently ignore."""
    if not isinstance(algorithm, Algorithm):
        suggestion = "; call the function" if callable(algorithm) else ""
        raise ConfigError(
            f"algorithm={algorithm!r} must be a kedge.Algorithm{suggestion}, for example"
            " algorithm=kedge.algorithms.reinforce_pp()"
        )
    name = algorithm.name
    if value_model is not None and not algorithm.needs_values:
        raise ConfigError(f"value_model is given, but algorithm={name} uses none; leave it out")
    unread = (_ALGORITHM,) if algorithm.needs_values else (_ALGORITHM, _VALUE)
    for f in fields(args):
        where, value, default = status(type(args), f.name), getattr(args, f.name), default_of(f)
        if isinstance(where, str) and where in unread and value != default:
            raise ConfigError(
                f"{f.name}={value!r} is an option of the trainer's built-in algorithm and has no"
                f" effect with algorithm={name}; leave it out, and pass options to {name} itself"
                " (on the command line: --algorithm_kwargs)"
            )


class SharedArguments(TypedDict, total=False):
    """Keyword arguments of every trainer.

    Args:
        compute_metrics: ``f(prompts, completions, scores, **columns) -> dict`` of numbers, called
            once for all responses of an evaluation; logged as ``eval_<name>``.
        reward_weights: weight of each source, models first; overrides the config's.
        rollout_engine: a rollout engine instead of the one that the config names.
        algorithm: a custom algorithm instead of the trainer's.
        environment: a class or function that makes a ``kedge.environments.Environment``, or a dict
            of them chosen by the column ``environment``; instead of the option of that name.
        tools: functions that the policy may call, with type hints and a Google-style docstring.
        environment_factory: makes objects whose methods are tools, with ``reset`` and perhaps
            ``get_reward``; or a dict of such functions chosen by the column ``environment``.
        rollout_func: ``f(prompts, trainer)`` that samples by itself; see
            ``kedge.environments.FunctionRollouts``.
        quantization_config: transformers' configuration for a policy given by name; needs
            ``peft_config``.
    """

    compute_metrics: Callable[..., Mapping[str, Any]] | None
    reward_weights: Sequence[float] | None
    rollout_engine: RolloutEngine | None
    algorithm: Algorithm | None
    environment: Any
    tools: Sequence[Callable[..., Any]] | None
    environment_factory: Any
    rollout_func: Callable[[list[Any], Any], Mapping[str, Any]] | None
    quantization_config: Any


def rename_arguments(arguments: Mapping[str, Any], newer: Mapping[str, str]) -> dict[str, Any]:
    """Rename arguments from older to newer names; both names of one are refused."""
    renamed = {name: value for name, value in arguments.items() if name not in newer}
    for old in newer.keys() & arguments.keys():
        new = newer[old]
        if arguments[old] is not None and renamed.get(new) is not None:
            raise ConfigError(
                f"{old} and {new} are the older and the newer name of the same argument; pass only"
                " one of them"
            )
        renamed[new] = renamed.get(new) if arguments[old] is None else arguments[old]
    return renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInputs:
    """The constructor arguments of a trainer; see ``kedge.PPOTrainer``."""

    spec: TrainerSpec
    args: OnPolicyConfig  # the trainer's checked copy
    processing_class: Any = None
    model: str | nn.Module | None = None
    ref_model: str | nn.Module | None = None
    reward_model: Any = None
    train_dataset: Any = None
    value_model: str | nn.Module | None = None
    data_collator: Any = None
    eval_dataset: Any = None
    optimizers: tuple[Any, Any] = (None, None)
    callbacks: list[Any] | None = None
    peft_config: Any = None
    reward_funcs: Any = None
    compute_metrics: Callable[..., Mapping[str, Any]] | None = None
    reward_weights: Sequence[float] | None = None
    reward_processing_classes: Any = None
    rollout_engine: RolloutEngine | None = None
    algorithm: Any = None
    quantization_config: Any = None
    environment: Any = None
    tools: Sequence[Any] | None = None
    environment_factory: Any = None
    rollout_func: Any = None
    trainer: Any = None  # the trainer that received these arguments

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.algorithm is not None:
            check_custom(self.args, self.algorithm, self.value_model)
        check_verifiers(self)

    @property
    def weights(self) -> Sequence[float] | None:
        """The weight of each reward source, models first; None: 1 each."""
        return self.args.reward_weights if self.reward_weights is None else self.reward_weights

    @property
    def gives_episodes(self) -> bool:
        """Whether something says how episodes are sampled, in one of several ways."""
        ways = (self.tools, self.environment_factory, self.rollout_func)
        named = (self.environment, self.args.environment, self.args.environment_kwargs)
        return any(ways) or any(x is not None for x in named)

    @property
    def own_loop(self) -> bool:
        """Whether the trainer is of a subclass that trains by itself."""
        kinds = type(self.trainer).__mro__
        return any("train" in vars(k) for k in kinds if not k.__module__.startswith("kedge."))


def check_kinds(inputs: TrainerInputs) -> None:
    """Check the type of each argument before anything is loaded."""
    pair = inputs.optimizers
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ConfigError(
            f"optimizers={format_value(pair)} must be a pair (optimizer, scheduler); each may be"
            " None"
        )
    if not isinstance(inputs.callbacks, list | tuple | None):
        raise ConfigError(f"callbacks={format_value(inputs.callbacks)} must be a list of callbacks")
    values = {"optimizers[0]": pair[0], "optimizers[1]": pair[1]}
    for name, (kind, *members) in _KINDS.items():
        value = values[name] if name in values else getattr(inputs, name)
        missing = [member for member in members if not hasattr(value, member)]
        if value is not None and (missing or isinstance(value, type)):
            lacks = f" (missing: {', '.join(missing)})" if missing else ""
            raise ConfigError(f"{name}={format_value(value)} must be {kind}{lacks}")
    names = ("slots", "updates_in_flight", "many_turns", "keep_prefixes", "stage_weights")
    check_declared(inputs.rollout_engine, EngineInfo, *names)
    task = getattr(inputs.peft_config, "task_type", None)
    task = getattr(task, "value", task)
    if task not in (None, "CAUSAL_LM"):
        raise ConfigError(f"peft_config must have task_type='CAUSAL_LM', got {task!r}")


def check_verifiers(inputs: TrainerInputs) -> None:
    """Check that verifiers can run here, and that all verifiers named by dataset rows exist."""
    functions = as_list(inputs.reward_funcs)
    prefix = "kedge.verifiers:"
    by_name = any(isinstance(f, str) and f.startswith(prefix) for f in functions)
    if not by_name and "kedge.verifiers" not in sys.modules:  # otherwise no argument is a verifier
        return
    from kedge import verifiers
    from kedge.verifiers.base import Verifier
    from kedge.verifiers.compose import ByColumn

    for function in functions:
        builtin = isinstance(function, str) and function.startswith(prefix)
        verifier = getattr(verifiers, function[len(prefix) :], None) if builtin else function
        if isinstance(verifier, Verifier):
            verifier.prepare()
        if not isinstance(verifier, ByColumn):
            continue
        for dataset in (inputs.train_dataset, inputs.eval_dataset):
            several = isinstance(dataset, Mapping) and verifier.column not in dataset
            for part in dataset.values() if several else [dataset]:
                table = None if part is None or is_stream(part) else read_table(part)
                if table is not None and verifier.column in table.names:
                    rows = table.take(range(len(table)), [verifier.column])
                    verifier.check(rows[verifier.column])


# Argument -> description of its type, and members that it must have.
_KINDS = {
    "optimizers[0]": ("a torch.optim.Optimizer instance, not its class", "param_groups", "step"),
    "optimizers[1]": ("a torch learning-rate scheduler", "step", "state_dict"),
    "rollout_engine": (
        "a kedge.records.protocols.RolloutEngine: an object with the properties shares_weights and"
        " logprob_kind and the methods generate(prompts, sampling=, seed=) and"
        " load_weights(weights, version);"
        " to choose an engine by name, set it in the config: rollout_engine='vllm'",
        *("shares_weights", "logprob_kind", "generate", "load_weights"),
    ),
    "peft_config": ("a PEFT configuration, such as peft.LoraConfig(...)", "peft_type"),
    "compute_metrics": ("a function that returns a dict of numbers", "__call__"),
    "data_collator": ("a function of a list of {'input_ids', 'attention_mask'}", "__call__"),
}


# -- metrics under the names of other libraries ----------------------------------------------------


def log_trl_names(args: Any, engine: Engine) -> MetricNames:
    """Add TRL's names, in training and evaluation."""
    token_kl = engine.algorithm.name != "rloo"
    rows = engine.batch_sizes.batch_size
    return partial(trl_names, rows=rows, token_kl=token_kl, beta=args.loss_kl_coef)


def trl_names(
    row: Mapping[str, float], *, rows: int, token_kl: bool = True, beta: float = 0.0
) -> dict[str, float]:
    """The metrics of an iteration, or of an evaluation without its prefix, under TRL's names.

    TRL's standard deviations divide by ``rows`` - 1, the responses of a batch.  Its ``kl`` is the
    KL in the loss, or without ``token_kl`` that in the reward, per token.  Its ``policy_loss`` is
    the loss without the entropy bonus; the clip fraction of values, 0 without any, is RLOO's.
    """
    metrics = {theirs: row[ours] for theirs, ours in TRL_NAMES.items() if ours in row}
    for name, value in row.items():
        if name.startswith("rewards/") and not name.endswith("/std"):
            metrics[f"{name}/mean"] = value
        elif name.startswith("log/"):
            metrics.setdefault(name.removeprefix("log/"), value)
    scored = rows - row.get("rollout/dropped_rows", 0.0)
    if "reward_std" in metrics and scored > 1:
        metrics["reward_std"] *= (scored / (scored - 1)) ** 0.5
    length = row.get("completions/mean_length", 0.0)
    if not token_kl and "objective/kl" in row and length:
        metrics["kl"] = row["objective/kl"] / length
    if not token_kl and "loss/policy_avg" in row:
        metrics["val/clipfrac_avg"] = 0.0
    if "entropy_coef" in metrics:
        metrics["policy_loss"] = row["loss/policy_avg"] + beta * row.get("loss/kl_avg", 0.0)
    return {name: value for name, value in metrics.items() if name not in row}
