"""TRL's configurations, with defaults that work on any machine."""

from __future__ import annotations

from typing import Any, Literal

import torch

from kedge.errors import ConfigError


def config_class(kind: Literal["sft", "reward"]) -> Any:
    """``SFTConfig`` or ``RewardConfig``.

    Raises:
        ConfigError: TRL is not installed.
    """
    try:
        from trl.trainer.reward_config import RewardConfig
        from trl.trainer.sft_config import SFTConfig
    except ImportError as error:
        raise ConfigError(
            f"kedge {kind} needs TRL: pip install 'kedge[pipeline]' ({error})"
        ) from error
    return SFTConfig if kind == "sft" else RewardConfig


def defaults() -> dict[str, Any]:
    """Options that differ from TRL's defaults, where they are not given."""
    gpu = torch.cuda.is_available()
    found: dict[str, Any] = {"report_to": "none", "logging_steps": 10}
    return found if gpu else found | {"bf16": False, "dataloader_pin_memory": False}
