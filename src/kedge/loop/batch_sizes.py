"""All batch sizes of a run.

sample        one prompt with one response               prompts = samples / group
micro-batch   samples of one forward and backward pass on one rank
mini-batch    samples of one optimizer step over all ranks
batch         samples of one iteration over all ranks, trained on for ``epochs`` epochs
iteration     one batch: ``epochs x minibatches`` optimizer steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kedge.records.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The batch sizes of a run, built by ``compute_batch_sizes``."""

    world_size: int  # ranks
    micro_rows: int  # most samples per rank in one forward and backward pass
    local_rows: int  # samples per rank in one iteration
    minibatches: int  # optimizer steps per epoch over a batch
    epochs: int  # passes over each batch
    group: int  # responses per prompt
    iterations: int  # in the whole run
    iterations_per_epoch: float | None = None  # to use every prompt once; None: unknown
    max_tokens_per_micro_batch: int | None = None  # replaces ``micro_rows`` as the limit

    @property
    def epoch_length(self) -> float:
        """Iterations of one pass over the prompts, may be a fraction; the run's, if unknown."""
        return self.iterations_per_epoch or self.iterations

    @property
    def batch_size(self) -> int:
        """Samples of one iteration, over all ranks."""
        return self.local_rows * self.world_size

    @property
    def local_mini_rows(self) -> int:
        """Samples per rank in one optimizer step."""
        return self.local_rows // self.minibatches

    @property
    def mini_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.batch_size // self.minibatches

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward and backward pass, over all ranks."""
        return self.micro_rows * self.world_size

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes per rank in one optimizer step, without a token budget."""
        return math.ceil(self.local_mini_rows / self.micro_rows)

    @property
    def local_prompts(self) -> int:
        """Distinct prompts per rank in one iteration."""
        return self.local_rows // self.group

    @property
    def prompts(self) -> int:
        """Distinct prompts of one iteration, over all ranks."""
        return self.batch_size // self.group

    @property
    def optimizer_steps_per_iteration(self) -> int:
        """Optimizer steps in one iteration."""
        return self.epochs * self.minibatches

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in the run."""
        return self.iterations * self.optimizer_steps_per_iteration

    @property
    def episodes(self) -> int:
        """Responses generated in the run."""
        return self.iterations * self.batch_size

    def check_whole_groups(self, option: str, default: str) -> None:
        """Check that ranks have whole groups, which ``option`` needs and ``default`` does not."""
        if self.local_rows % self.group:
            raise ConfigError(
                f"{option} needs whole groups on each rank, but {self.local_rows} responses per"
                f" rank are not a multiple of {self.group}; change per_device_train_batch_size,"
                f" or set {default}"
            )

    def derived(self) -> dict[str, int]:
        """The sizes by their names in PPOConfig."""
        return {
            "world_size": self.world_size,
            "num_total_batches": self.iterations,
            "micro_batch_size": self.micro_batch_size,
            "local_batch_size": self.local_rows,
            "batch_size": self.batch_size,
            "local_mini_batch_size": self.local_mini_rows,
            "mini_batch_size": self.mini_batch_size,
        }


def compute_batch_sizes(
    *,
    per_device_train_batch_size: int,
    gradient_accumulation_steps: int = 1,
    world_size: int = 1,
    num_mini_batches: int = 1,
    num_ppo_epochs: int = 1,
    num_generations: int = 1,
    total_episodes: int | None = None,
    max_steps: int = -1,
    num_train_epochs: float = 1.0,
    dataset_rows: int | None = None,
    min_group: int = 1,
    max_tokens_per_micro_batch: int | None = None,
) -> BatchSizes:
    """Derive all sizes from options of these names; errors name the nearest values that would work.

    The run ends at ``total_episodes`` or ``max_steps`` iterations (no limit if below 1), whichever
    comes first, else after ``num_train_epochs`` passes over the ``dataset_rows`` prompts (None:
    unknown).  The last batch is always full.  The algorithm needs ``min_group`` responses per
    prompt.
    """
    local = per_device_train_batch_size * gradient_accumulation_steps
    if num_generations < min_group:
        raise ConfigError(
            f"num_generations={num_generations} must be at least {min_group}: this algorithm"
            " compares responses to the same prompt"
        )
    where = "" if world_size == 1 else f" on each of the {world_size} ranks"
    made_of = (
        f"{where} (per_device_train_batch_size={per_device_train_batch_size} x "
        f"gradient_accumulation_steps={gradient_accumulation_steps})"
    )
    _check_divides("num_generations", num_generations, local, made_of, at_least=min_group)
    made_of = f"{where} ({local // num_generations} prompts x {num_generations} each)"
    _check_divides("num_mini_batches", num_mini_batches, local, made_of)
    batch = local * world_size
    per_epoch = None if dataset_rows is None else dataset_rows * num_generations / batch
    return BatchSizes(
        world_size=world_size,
        micro_rows=min(per_device_train_batch_size, local // num_mini_batches),
        local_rows=local,
        minibatches=num_mini_batches,
        epochs=num_ppo_epochs,
        group=num_generations,
        iterations=_iterations(batch, total_episodes, max_steps, num_train_epochs, per_epoch),
        iterations_per_epoch=per_epoch,
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
    )


def _iterations(
    batch: int,
    total_episodes: int | None,
    max_steps: int,
    num_train_epochs: float,
    per_epoch: float | None,
) -> int:
    limits = []
    if total_episodes is not None:
        limits.append(math.ceil(total_episodes / batch))
    if max_steps == 0:
        raise ConfigError("max_steps=0 must be at least 1, or -1 for no limit")
    if max_steps > 0:
        limits.append(max_steps)
    if limits:
        return min(limits)
    if per_epoch is None:
        raise ConfigError(
            "the length of the dataset is unknown, so num_train_epochs cannot end the run; "
            "set total_episodes or max_steps"
        )
    if num_train_epochs <= 0:
        raise ConfigError(
            f"num_train_epochs={num_train_epochs} must be above 0; or set total_episodes or "
            "max_steps"
        )
    # Rounding: 0.1 + 0.2 passes over 10 prompts are 3 prompts, not 3.0000000000000004.
    return max(1, math.ceil(round(num_train_epochs * per_epoch, 9)))


def _check_divides(name: str, value: int, total: int, of: str, *, at_least: int = 1) -> None:
    if total % value:
        divisors = [d for d in range(at_least, total + 1) if total % d == 0]
        below, above = ([d for d in divisors if (d > value) is side] for side in (False, True))
        nearest = ", ".join(map(str, below[-1:] + above[:1]))
        raise ConfigError(
            f"{name}={value} does not divide the batch of {total} samples{of}; "
            f"nearest that do: {nearest or 'none; raise per_device_train_batch_size'}"
        )
