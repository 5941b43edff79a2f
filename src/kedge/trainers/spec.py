"""What distinguishes one trainer from another, and how options reach functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kedge.algorithms import Algorithm
from kedge.config.base import OnPolicyConfig
from kedge.config.options import refuse_unread
from kedge.engine.loop import Engine
from kedge.errors import ConfigError

MetricNames = Callable[[Mapping[str, float]], dict[str, float]]
_ALGORITHM, _VALUE = "algorithm: ", "value model"  # readers of options in the support tables


def shared_kwargs(config: OnPolicyConfig, function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a config that a function takes: those that its signature names."""
    names = inspect.signature(function).parameters
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _no_names(args: Any, engine: Engine) -> MetricNames:
    return lambda row: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """A trainer: its config, its algorithm, and other names of its metrics.

    Args:
        name: of the algorithm, for model cards.
        config: class of its ``args``.
        algorithm: makes the algorithm from the options that its signature names, and from
            ``reference``: whether there is a reference model.
        metric_names: returns the function that adds metrics under other libraries' names to the
            metrics of an iteration or an evaluation.
    """

    name: str
    config: type[OnPolicyConfig]
    algorithm: Callable[..., Algorithm]
    metric_names: Callable[[Any, Engine], MetricNames] = _no_names

    def checked_args(self, args: Any) -> OnPolicyConfig:
        """A checked copy of the config, or of the default one for None.

        Raises:
            ConfigError: it has another type, or a value that cannot work.
        """
        args = self.config() if args is None else args
        if not isinstance(args, self.config):
            raise ConfigError(
                f"args must be a kedge.{self.config.__name__}, got a {type(args).__name__}; pass"
                " models by keyword: model=, ref_model="
            )
        return args.checked()

    def build_algorithm(
        self,
        args: OnPolicyConfig,
        custom: Any = None,
        *,
        ref_model: Any = None,
        value_model: Any = None,
    ) -> Algorithm:
        """The trainer's algorithm with the options of the config, or a custom one.

        Raises:
            ConfigError: ``custom`` is not an algorithm, or would ignore an option that is set.
        """
        if custom is not None:
            _check_custom(args, custom, value_model)
            return custom
        reference = ref_model is not None or args.kl_coef > 0 or args.loss_kl_coef > 0
        try:
            return self.algorithm(**shared_kwargs(args, self.algorithm), reference=reference)
        except ValueError as error:  # options that do not go together
            raise ConfigError(str(error)) from error


def _check_custom(args: OnPolicyConfig, algorithm: Any, value_model: Any) -> None:
    """Reject trainer options that a custom algorithm would silently ignore."""
    if not isinstance(algorithm, Algorithm):
        suggestion = "; call the function" if callable(algorithm) else ""
        raise ConfigError(
            f"algorithm={algorithm!r} must be a kedge.Algorithm{suggestion}, for example"
            " algorithm=kedge.algorithms.reinforce_pp()"
        )
    refuse_unread(args, [_ALGORITHM], algorithm.name)
    if algorithm.needs_values:
        return
    if value_model is not None:
        raise ConfigError(
            f"value_model is given, but algorithm={algorithm.name} uses none; leave it out"
        )
    refuse_unread(args, [_VALUE], algorithm.name)
