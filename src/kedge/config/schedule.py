"""When a run logs, evaluates and saves, counted in iterations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kedge.config.base import OnPolicyConfig
from kedge.errors import ConfigError

Every = float | None  # iterations; None: never
MOST_TOKEN_TABLES = 100  # per run, since they are large


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSchedule:
    """When to log, evaluate, save and sample, given the number of finished iterations, from 1."""

    iterations: int
    log_every: Every
    log_first: bool
    eval_every: Every
    eval_delay: float
    eval_on_start: bool
    save_every: Every
    sample_every: Every
    tokens_every: Every = None

    def logs(self, done: int) -> bool:
        """Whether the metrics since the last log row are reported."""
        return (self.log_first and done == 1) or self._due(done, self.log_every, at_end=True)

    def evaluates(self, done: int) -> bool:
        """Whether the evaluation set is scored."""
        return done >= self.eval_delay and self._due(done, self.eval_every, at_end=False)

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is written."""
        return self._due(done, self.save_every, at_end=True)

    def samples(self, done: int) -> bool:
        """Whether a table of sample completions is shown."""
        return self._due(done, self.sample_every, at_end=False)

    def writes_tokens(self, done: int) -> bool:
        """Whether rows are written token by token: after iteration 1 and with log rows."""
        if self.tokens_every is None:
            return False
        return done == 1 or self._due(done, self.tokens_every, at_end=True)

    def _due(self, done: int, every: Every, *, at_end: bool) -> bool:
        if every is None:
            return False
        # The interval may be a fraction ("epoch" of 2.5 iterations): due when a multiple is passed.
        passed = math.floor(done / every + 1e-9) > math.floor((done - 1) / every + 1e-9)
        return passed or (at_end and done == self.iterations)


def warmup_iterations(config: OnPolicyConfig, iterations: int) -> int:
    """Iterations of learning-rate warmup; ``warmup_steps`` below 1 is a fraction of the run."""
    steps = config.warmup_steps
    return int(steps) if steps >= 1 else math.ceil(iterations * steps)


def build_schedule(
    config: OnPolicyConfig, *, iterations: int, iterations_per_epoch: float | None
) -> IntervalSchedule:
    """When to log, evaluate, save and show samples.

    Args:
        config: the options; steps below 1 are fractions of the run.
        iterations: iterations of the whole run.
        iterations_per_epoch: iterations per epoch, for strategy "epoch"; None if the dataset has no
            length.

    Raises:
        ConfigError: strategy "epoch" with a dataset without length.
    """

    def every(name: str, steps: float | None) -> Every:
        strategy = getattr(config, f"{name}_strategy")
        kind = str(getattr(strategy, "value", strategy))
        if kind == "epoch":
            if iterations_per_epoch is None:
                raise ConfigError(
                    f"{name}_strategy='epoch' needs a dataset with a length; set "
                    f"{name}_strategy='steps' and {name}_steps"
                )
            return max(1.0, iterations_per_epoch)
        if kind == "best":
            return every("eval", config.eval_steps)
        if kind != "steps" or not steps:
            return None
        return float(max(1, math.ceil(iterations * steps))) if steps < 1 else float(steps)

    tables = config.num_sample_generations
    logging = every("logging", config.logging_steps)
    return IntervalSchedule(
        iterations=iterations,
        log_every=logging,
        log_first=config.logging_first_step,
        eval_every=every("eval", config.eval_steps or config.logging_steps),
        eval_delay=config.eval_delay,
        eval_on_start=config.eval_on_start,
        save_every=every("save", config.save_steps),
        sample_every=max(1, iterations // tables) if tables else None,
        tokens_every=max(logging, math.ceil(iterations / MOST_TOKEN_TABLES))
        if logging and config.log_token_rows
        else None,
    )
