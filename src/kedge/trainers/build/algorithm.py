"""A algorithm that a user gives in place of a trainer's own."""

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

_RULE, _VALUE = "algorithm: ", "value model"  # what reads an option, in the tables of support


def check_unread(args: OnPolicyConfig, algorithm: Algorithm, *, value_model: Any = None) -> None:
    """Refuse what nothing would read beside the user's own rule.

    Raises:
        ConfigError: it is no rule, an option of the trainer's rule is set, or one of a value model
            that the user's rule does not have.
    """
    if not isinstance(algorithm, Algorithm):
        called = "; call it" if callable(algorithm) else ""
        raise ConfigError(
            f"algorithm={algorithm!r} is no kedge.Algorithm{called}; pass for example"
            " algorithm=kedge.algorithms.reinforce_pp()"
        )
    refuse_unread(args, [_RULE], algorithm.name)
    if algorithm.needs_values:
        return
    if value_model is not None:
        raise ConfigError(
            f"value_model is given, and algorithm={algorithm.name} has no value model; leave it out"
        )
    refuse_unread(args, [_VALUE], algorithm.name)


def kl_controller(settings: RunSettings) -> KLController:
    """The coefficient of the KL penalty."""
    options = settings.kl
    if options.adaptive:
        return AdaptiveKL(value=options.coef, target=options.target, horizon=options.horizon)
    return FixedKL(value=options.coef)


def value_warmup(settings: RunSettings, algorithm: Algorithm, plan: BatchSizes) -> int:
    """Updates at the start that train the value alone."""
    steps = settings.value.warmup_steps if algorithm.needs_values else 0
    if steps >= plan.updates:
        logger.warning(
            "value_warmup_steps=%d covers all %d updates: the value trains and the policy never",
            steps,
            plan.updates,
        )
    return steps
