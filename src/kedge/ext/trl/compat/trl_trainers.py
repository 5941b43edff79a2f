"""Kedge's trainers with some behavior of TRL's, for programs that run unmodified."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import kedge
from kedge.ext.trl import options, ppov2

if TYPE_CHECKING:
    from kedge import PPOTrainer as Trainer  # base class of the mixins below
else:
    Trainer = object
logger = logging.getLogger(__name__)


class PolicyAndValue(nn.Module):
    """The trained models; a program reads ``policy`` and ``value_model``, as in TRL."""

    def __init__(self, policy: nn.Module, value_model: nn.Module | None) -> None:
        super().__init__()
        self.policy, self.value_model = policy, value_model
        self.config: Any = policy.config

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether the policy computes activations again in the backward pass."""
        return bool(getattr(self.policy, "is_gradient_checkpointing", False))

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """As of the policy."""
        self.policy.gradient_checkpointing_enable(*args, **kwargs)  # type: ignore[operator]

    def gradient_checkpointing_disable(self) -> None:
        """As of the policy."""
        self.policy.gradient_checkpointing_disable()  # type: ignore[operator]

    def forward(self, **inputs: Any) -> Any:
        """The policy's output."""
        return self.policy(**inputs)


class _StartsOver(Trainer):
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; checkpoints of an earlier run in the folder are moved away instead of refused.

        Other arguments of ``transformers.Trainer.train`` are accepted and not used.
        """
        resume = resume_from_checkpoint or self.args.resume_from_checkpoint
        if not resume and self.args.output_dir and self.engine.step == 0:
            if self.accelerator.is_main_process and not self.args.overwrite_output_dir:
                put_aside(Path(self.args.output_dir))
            self.accelerator.wait_for_everyone()
        return super().train(resume_from_checkpoint)


def _with_defaults(config: type, unnamed: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a trainer, with TRL's defaults if no config is among them."""
    given = len(unnamed) > 2 or named.get("args") is not None or named.get("config") is not None
    return named if given else {**named, "args": config()}


class _WrapsModels(_StartsOver):
    @cached_property
    def model(self) -> nn.Module:
        """Policy and value model in one module."""
        return PolicyAndValue(super().model, self.value_model)


class PPOTrainer(_WrapsModels, kedge.PPOTrainer):
    """``kedge.PPOTrainer``; ``model`` has ``policy`` and ``value_model``."""


class PPOv2Trainer(_WrapsModels, ppov2.PPOv2Trainer):
    """``kedge.PPOv2Trainer``; ``model`` has ``policy`` and ``value_model``."""


class RLOOTrainer(_StartsOver, kedge.RLOOTrainer):
    """``kedge.RLOOTrainer``, which starts over in a folder with checkpoints."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_with_defaults(options.RLOOConfig, args, kwargs))


class GRPOTrainer(_StartsOver, kedge.GRPOTrainer):
    """``kedge.GRPOTrainer``, which starts over in a folder with checkpoints."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_with_defaults(options.GRPOConfig, args, kwargs))


def put_aside(root: Path) -> None:
    """Move the checkpoints of an earlier run to a folder ``earlier-N`` below, with a warning."""
    existing = [folder for folder in root.glob("checkpoint-*") if folder.is_dir()]
    if not existing:
        return
    number = 1 + sum(1 for _ in root.glob("earlier-*"))
    (root / f"earlier-{number}").mkdir()
    for folder in existing:
        folder.rename(root / f"earlier-{number}" / folder.name)
    logger.warning(
        "%s held checkpoints of an earlier run; they are in %s now, and this run starts over; to"
        " continue a run, call train(resume_from_checkpoint=True)",
        root,
        root / f"earlier-{number}",
    )
