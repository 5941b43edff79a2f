"""What a user hands over to a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from kedge.config.newer import NewerArguments
from kedge.config.on_policy import OnPolicyConfig
from kedge.protocols import RolloutEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a user hands over to a trainer; see ``kedge.PPOTrainer`` for each."""

    args: OnPolicyConfig
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
    reward_weights: Sequence[float] | None = None
    reward_processing_class: Any = None
    rollout_engine: RolloutEngine | None = None
    quantization_config: Any = None


def trusts(config: OnPolicyConfig) -> bool:
    """Whether code that comes with models given by name may run."""
    return isinstance(config, NewerArguments) and config.trust_remote_code
