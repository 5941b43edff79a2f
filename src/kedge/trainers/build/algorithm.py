"""Checks of a custom algorithm, KL controller and value warm-up."""

from __future__ import annotations

import logging
from typing import Any

from kedge.algorithms import Algorithm
from kedge.config.base import OnPolicyConfig
from kedge.config.options import refuse_unread
from kedge.config.resolve import RunSettings
from kedge.engine.batch_sizes import BatchSizes
from kedge.engine.kl_control import AdaptiveKL, FixedKL
from kedge.errors import ConfigError
from kedge.protocols import KLController

logger = logging.getLogger(__name__)

_ALGORITHM, _VALUE = "algorithm: ", "value model"  # readers of options in the support tables


def check_unread(args: OnPolicyConfig, algorithm: Algorithm, *, value_model: Any = None) -> None:
    """Reject trainer options that a custom algorithm would silently ignore.

    Raises:
        ConfigError: it is not an algorithm; an option of the default algorithm is set; or an option
            of the value model is set and the custom algorithm has none.
    """
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


def kl_controller(settings: RunSettings) -> KLController:
    """The controller of the KL coefficient."""
    options = settings.kl
    if options.adaptive:
        return AdaptiveKL(value=options.coef, target=options.target, horizon=options.horizon)
    return FixedKL(value=options.coef)


def value_warmup(settings: RunSettings, algorithm: Algorithm, sizes: BatchSizes) -> int:
    """Iterations at the start that train only the value model."""
    steps = settings.value.warmup_steps if algorithm.needs_values else 0
    if steps >= sizes.updates:
        logger.warning(
            "value_warmup_steps=%d covers all %d iterations: the policy will not be trained",
            steps,
            sizes.updates,
        )
    return steps
