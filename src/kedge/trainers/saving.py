"""Model files, and the parts of a checkpoint that are records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.value_head import save_value
from kedge.config.resolve import PPOSettings
from kedge.engine.loop import Engine

VALUE_FOLDER = "value_model"


def write_models(folder: Path, learner: HFLearner, tokenizer: Any) -> None:
    """Policy, tokenizer and value model, in the layout that ``from_pretrained`` reads.

    Every rank calls it; rank 0 writes.
    """
    if not learner.accelerator.is_main_process:
        return
    policy: Any = learner.policy
    policy.save_pretrained(folder)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    if learner.value is not None:
        save_value(learner.value, folder / VALUE_FOLDER)


def numbers_of(settings: PPOSettings, engine: Engine) -> dict[str, Any]:
    """The settings that change numbers, as JSON values, for comparison when a run goes on."""
    plan = engine.plan
    named: Mapping[str, Any] = {
        "seed": settings.seed,
        "max_lag": settings.max_lag,
        "algorithm": engine.algorithm.name,
        "updates": plan.updates,
        "batch_size": plan.batch_size,
        "num_mini_batches": plan.minibatches,
        "num_ppo_epochs": plan.epochs,
        "num_generations": plan.group,
        "sampling": asdict(settings.sampling),
        "ppo": asdict(settings.ppo),
        "kl": asdict(settings.kl),
        "value": asdict(settings.value),
        "learning_rate": settings.learner.learning_rate,
        "max_grad_norm": settings.learner.max_grad_norm,
        "scheduler": settings.learner.scheduler,
        "precision": settings.learner.precision,
        "shuffle_dataset": settings.data.shuffle,
    }
    return json.loads(json.dumps(named, default=str))


def recording_of(settings: PPOSettings) -> dict[str, Any]:
    """What a recording of rollouts must agree with to be trained from."""
    return {"temperature": settings.sampling.temperature, "stop_ids": [*settings.sampling.stop_ids]}
