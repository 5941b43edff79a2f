"""Statistics for trackers, model cards, and uploads to the hub."""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from kedge.ext.trl.classic.config import PPOConfig
from kedge.records.errors import DataError
from kedge.reporting import run_info
from kedge.reporting.hub import Hub

TABLE = "game_log"


def log_batch(
    accelerator: Accelerator,
    stats: Mapping[str, Any],
    batch: Mapping[str, Any],
    rewards: list[Tensor] | Tensor,
    columns: list[str],
    *,
    step: int,
) -> None:
    """See ``PPOTrainer.log_stats``.  Every process must call it; the main one logs."""
    reward_sums = torch.stack([torch.as_tensor(x).detach().float().sum().cpu() for x in rewards])
    missing = [name for name in columns if name not in batch]
    rows: list[dict[str, object]] = []
    if accelerator.log_with and missing and set(columns) != {"query", "response"}:
        raise DataError(
            f"columns_to_log must be columns of the batch; missing: {', '.join(missing)}; "
            f"available: {', '.join(batch)}"
        )
    if missing:
        warnings.warn(
            f"no table of responses is logged: the batch has no {', '.join(missing)}", stacklevel=3
        )
    else:
        values = [*(batch[name] for name in columns), reward_sums]
        if len({len(x) for x in values}) > 1:
            sizes = ", ".join(f"{name}: {len(batch[name])}" for name in columns)
            raise DataError(
                f"columns and rewards must have equal lengths, got {len(reward_sums)} rewards and"
                f" {sizes}"
            )
        rows = [
            {
                name: x.tolist() if isinstance(x, Tensor) else x
                for name, x in zip([*columns, "reward"], row, strict=True)
            }
            for row in zip(*values, strict=True)
        ]
    if accelerator.num_processes > 1:
        rows = gather_object(rows)
        reward_sums = accelerator.gather(reward_sums.to(accelerator.device)).cpu()
    if not accelerator.is_main_process or not accelerator.trackers:
        return
    logs = dict(stats) | {
        "env/reward_mean": float(reward_sums.mean()),
        "env/reward_std": float(reward_sums.std()) if len(reward_sums) > 1 else 0.0,
        "env/reward_dist": reward_sums.numpy(),
    }
    for tracker in accelerator.trackers:
        _send(tracker, logs, rows, step)


def _send(tracker: Any, logs: Mapping[str, Any], rows: list[dict[str, object]], step: int) -> None:
    """Send numbers to every tracker, and arrays and the table to trackers that show them."""
    arrays = {name: np.asarray(x) for name, x in logs.items() if np.ndim(x) > 0}
    sent: dict[str, Any] = {k: float(x) for k, x in logs.items() if k not in arrays}
    if tracker.name == "tensorboard":
        for name, x in arrays.items():
            tracker.tracker.add_histogram(name, x, step)
        if rows:
            tracker.tracker.add_text(TABLE, run_info.markdown(rows), step)
    elif tracker.name == "wandb":
        import wandb

        sent |= {name: wandb.Histogram(x) for name, x in arrays.items()}
        if rows:
            data = [list(row.values()) for row in rows]
            sent[TABLE] = wandb.Table(columns=list(rows[0]), data=data)
    elif tracker.name == "trackio" and rows:
        import trackio

        frame = importlib.import_module("pandas").DataFrame(rows)
        sent[TABLE] = trackio.Table(dataframe=frame)
    tracker.log(sent, step=step)


_USAGE = """\
```python
from kedge.classic import {loader}

model = {loader}.from_pretrained({name!r})
```

The model alone, without its value head, loads as any transformers model does."""
_OPTIONS = (
    *("learning_rate", "batch_size", "mini_batch_size", "gradient_accumulation_steps"),
    *("ppo_epochs", "init_kl_coef", "adap_kl_ctrl", "target", "kl_penalty", "gamma", "lam"),
    *("cliprange", "cliprange_value", "vf_coef", "max_grad_norm", "seed", "reward_model"),
)


def push(
    save: Callable[[str], None],
    repo_id: str,
    *,
    commit_message: str = "Upload model",
    branch: str | None = None,
    **hub_options: Any,
) -> Any:
    """Upload the files that ``save`` writes into a folder to a repository, created if missing.

    ``branch`` None is "main"; ``hub_options`` are those of ``kedge.reporting.hub.Hub``: private,
    token, api.
    """
    hub = Hub(repo_id, revision=branch, **hub_options)
    hub.create()
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        return hub.push(folder, message=commit_message)


def model_card(config: PPOConfig, name: str | None, *, loader: str) -> str:
    """The text of a model card; ``loader`` is the class of ``kedge.classic`` to load it with."""
    usage = _USAGE.format(loader=loader, name=name)
    return run_info.model_card(
        {}, model_name=str(name), args=config, hyperparameters=_OPTIONS, usage=usage
    )
