"""Schedule of sample tables and token logs.

Logging, evaluations and checkpoints follow ``transformers.DefaultFlowCallback``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kedge.config.base import OnPolicyConfig

MOST_TOKEN_TABLES = 100  # per run, since they are large


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSchedule:
    """When to show samples and to write token rows, given the finished iterations, from 1.

    Intervals count iterations and may be fractions; None: never.
    """

    iterations: int
    sample_every: float | None
    tokens_every: float | None

    def samples(self, done: int) -> bool:
        """Whether a table of sample completions is shown."""
        return _passes(done, self.sample_every)

    def writes_tokens(self, done: int) -> bool:
        """Whether token rows are written; also true after the first and the last iteration."""
        if self.tokens_every is None:
            return False
        return done in (1, self.iterations) or _passes(done, self.tokens_every)


def _passes(done: int, every: float | None) -> bool:
    """Whether iteration ``done`` reaches a multiple of the interval."""
    if every is None:
        return False
    return math.floor(done / every + 1e-9) > math.floor((done - 1) / every + 1e-9)


def build_schedule(
    config: OnPolicyConfig, *, iterations: int, iterations_per_epoch: float
) -> IntervalSchedule:
    """Build the schedule of sample tables and token logs from the options.

    Args:
        config: the options; ``logging_steps`` below 1 is a fraction of the run.
        iterations: iterations of the whole run.
        iterations_per_epoch: iterations per epoch, for ``logging_strategy="epoch"``.
    """
    tables, steps = config.num_sample_generations, config.logging_steps
    strategy = str(getattr(config.logging_strategy, "value", config.logging_strategy))
    logging = math.ceil(iterations * steps) if steps < 1 else steps
    if strategy != "steps":
        logging = iterations_per_epoch if strategy == "epoch" else 0
    return IntervalSchedule(
        iterations=iterations,
        sample_every=max(1, iterations // tables) if tables else None,
        tokens_every=max(logging, 1, math.ceil(iterations / MOST_TOKEN_TABLES))
        if logging and config.log_token_rows
        else None,
    )
