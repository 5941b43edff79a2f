"""What is measured beside the metrics of the learning rule, when the config asks for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kedge.types import Rollout


def tokens_in(rollout: Rollout, include: str) -> int:
    """Tokens of a batch, prompts and responses, on this rank.

    Args:
        rollout: the batch.
        include: ``include_num_input_tokens_seen``: "all" counts padding too, "non_padding" does
            not, "no" is 0.
    """
    if include == "no":
        return 0
    prompts = rollout.prompts
    if include == "all":
        return prompts.ids.numel() + rollout.ids.numel()
    return int(prompts.mask.sum()) + int(rollout.present.sum())


def over_ranks(x: int, total: Callable[[Tensor], Tensor] | None) -> int:
    """Sum over all ranks; ``total`` is None for one process."""
    return x if total is None else round(float(total(torch.tensor(float(x), dtype=torch.float64))))


def peak_memory(device: Any = None) -> dict[str, float]:
    """MiB: the most this process has held, and on a GPU the most its tensors have taken there."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    found = {"memory/peak_cpu": peak}
    if torch.cuda.is_available():
        found["memory/peak_gpu"] = torch.cuda.max_memory_allocated(device) / 2**20
    return found


def summary(seconds: float, updates: int, *, rows: int, loss: float) -> dict[str, float]:
    """The last row of a run, in the names of transformers.

    Args:
        seconds: that this call of ``train`` took.
        updates: that it finished.
        rows: responses of each.
        loss: mean over all updates of the run.
    """
    spent = max(seconds, 1e-9)
    return {
        "train_runtime": seconds,
        "train_samples_per_second": updates * rows / spent,
        "train_steps_per_second": updates / spent,
        "train_loss": loss,
    }
