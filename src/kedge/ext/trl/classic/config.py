"""Options of the classic trainer."""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from accelerate.utils import LoggerType
from annotated_types import Interval

from kedge.config.declare import (
    Bound,
    Count,
    NonNegative,
    Positive,
    Probability,
    check_fields,
    format_value,
    read_mapping,
)
from kedge.ext.trl.classic.core import flatten_dict
from kedge.loop.control import AdaptiveKL, FixedKL
from kedge.records.errors import ConfigError
from kedge.suggestions import suggest_names

JSON = dict[str, Any] | str | None  # a dictionary, or its JSON on a command line
_JSON_FIELDS = (
    "tracker_kwargs",
    "accelerator_kwargs",
    "project_kwargs",
    "push_to_hub_if_best_kwargs",
)
TRACKERS = tuple(str(x) for x in LoggerType)  # "all" selects every installed tracker


def _script() -> str:
    return Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "kedge"


@suggest_names("option")
@dataclass
class PPOConfig:
    """Options of ``kedge.classic.PPOTrainer``.

    Sizes are per process.  One call of ``step`` takes ``batch_size`` samples through
    ``ppo_epochs`` passes of ``batch_size / (mini_batch_size * gradient_accumulation_steps)``
    optimizer steps each.

    Args:
        exp_name: name of the experiment, for trackers.
        seed: for Python, numpy and torch, set when the trainer is created, and for shuffling.
        log_with: a tracker supported by accelerate: "tensorboard", "wandb", "trackio", "mlflow",
            "swanlab", "comet_ml", ..., or "all" (all installed ones).
        task_name: for trackers.
        model_name: for trackers and the model card.
        query_dataset: for trackers.
        reward_model: for trackers.
        remove_unused_columns: drop dataset columns that neither the model nor the loop reads.
        tracker_kwargs: per tracker, e.g. {"wandb": {"name": "mine"}}.
        accelerator_kwargs: arguments of ``accelerate.Accelerator``.
        project_kwargs: arguments of ``accelerate.utils.ProjectConfiguration``, e.g. logging_dir.
        tracker_project_name: project name in trackers.
        push_to_hub_if_best_kwargs: arguments of ``push_to_hub``, with repo_id: every
            ``compare_steps`` calls, push if the mean score is the best so far.
        steps: samples of the whole run; only used to compute ``total_ppo_epochs``.
        learning_rate: Adam's learning rate, unless you pass an optimizer.
        adap_kl_ctrl: adapt the coefficient toward ``target``; False: keep ``init_kl_coef``.
        init_kl_coef: initial coefficient of the KL penalty.
        kl_penalty: "kl" (log p - log q), "abs", "mse" (half its square) or "full" (over the
            whole vocabulary).
        target: target KL, nats per response.
        horizon: responses over which an error of 100% would double the coefficient.
        gamma: discount per token.
        lam: lambda of GAE.
        cliprange: clip range of the probability ratio.
        cliprange_value: clip range of the value around its old prediction.
        vf_coef: weight of the value loss.
        batch_size: samples of one call of ``step``.
        forward_batch_size: deprecated name of ``mini_batch_size``.
        mini_batch_size: samples per forward and backward pass (micro-batch); the default is at
            most ``batch_size``.
        gradient_accumulation_steps: passes per optimizer step.
        world_size: set by the trainer: number of processes.
        ppo_epochs: passes over each batch.
        max_grad_norm: gradient norm clipping; None: off.
        optimize_cuda_cache: deprecated name of ``optimize_device_cache``.
        optimize_device_cache: empty the accelerator's memory cache after each ``step``.
        early_stopping: stop the passes over a batch when the policy KL exceeds its limit.
        target_kl: the limit is 1.5 times this, nats per token.
        early_stopping_keeps_step: still take the optimizer step whose KL exceeds the limit, then
            stop, as TRL does; False: stop without it.
        compare_steps: calls of ``step`` between checks for ``push_to_hub_if_best_kwargs``.
        ratio_threshold: optimizer steps with a higher mean probability ratio are skipped.
        use_score_scaling: divide scores by their running standard deviation.
        use_score_norm: subtract their running mean first; only with ``use_score_scaling``.
        score_clip: maximum absolute score, after scaling.
        whiten_rewards: scale the rewards of a batch to unit variance.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        is_encoder_decoder: set by the trainer; if given, it must match the model.
        is_peft_model: set by the trainer; if given, it must match the model.
        backward_batch_size: computed: samples per optimizer step.
        global_backward_batch_size: set by the trainer: samples per optimizer step, all processes.
        global_batch_size: set by the trainer: ``batch_size`` over all processes.
        dataset_num_proc: processes for tokenizing a dataset without ``input_ids``.

    Raises:
        ConfigError: an invalid value, or sizes that do not divide.
    """

    exp_name: str = field(default_factory=_script)
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] = 0
    log_with: str | None = None
    task_name: str | None = None
    model_name: str | None = "gpt2"
    query_dataset: str | None = "stanfordnlp/imdb"
    reward_model: str | None = "sentiment-analysis:lvwerra/distilbert-imdb"
    remove_unused_columns: bool = True
    tracker_kwargs: JSON = field(default_factory=dict)
    accelerator_kwargs: JSON = field(default_factory=dict)
    project_kwargs: JSON = field(default_factory=dict)
    tracker_project_name: str = "trl"
    push_to_hub_if_best_kwargs: JSON = field(default_factory=dict)
    steps: Count = 20000
    learning_rate: NonNegative = 1.41e-5
    adap_kl_ctrl: bool = True
    init_kl_coef: NonNegative = 0.2
    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    target: Positive = 6.0
    horizon: Positive = 10000.0
    gamma: Probability = 1.0
    lam: Probability = 0.95
    cliprange: Bound = 0.2
    cliprange_value: Bound = 0.2
    vf_coef: NonNegative = 0.1
    batch_size: Count = 128
    forward_batch_size: Count | None = None
    mini_batch_size: Count = 128
    gradient_accumulation_steps: Count = 1
    world_size: Count | None = None
    ppo_epochs: Count = 4
    max_grad_norm: Bound | None = None
    optimize_cuda_cache: bool | None = None
    optimize_device_cache: bool = False
    early_stopping: bool = False
    target_kl: Bound = 1.0
    compare_steps: Count = 1
    ratio_threshold: Bound = 10.0
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: Bound | None = None
    whiten_rewards: bool = False
    gradient_checkpointing: bool = False
    is_encoder_decoder: bool | None = None
    is_peft_model: bool | None = None
    backward_batch_size: Count | None = None
    global_backward_batch_size: Count | None = None
    global_batch_size: Count | None = None
    dataset_num_proc: Count | None = None
    early_stopping_keeps_step: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in _JSON_FIELDS:
            setattr(self, name, self.options(name))
        if self.forward_batch_size is not None:
            _deprecated("forward_batch_size", "mini_batch_size")
            self.mini_batch_size = self.forward_batch_size
        elif self.mini_batch_size == type(self).mini_batch_size:  # unset
            self.mini_batch_size = min(self.mini_batch_size, self.batch_size)
        if self.optimize_cuda_cache is not None:
            _deprecated("optimize_cuda_cache", "optimize_device_cache")
            self.optimize_device_cache = self.optimize_cuda_cache
        self.check()

    def check(self) -> None:
        """Check all values and compute the sizes; the trainer calls this at each step."""
        check_fields(self)
        self._check_values()
        self.backward_batch_size = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % self.backward_batch_size:
            given = self.forward_batch_size
            older = "" if given is None else f"forward_batch_size={given}, now "
            raise ConfigError(
                f"batch_size={self.batch_size} must be a multiple of {older}mini_batch_size="
                f"{self.mini_batch_size} x gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} = {self.backward_batch_size}; lower one of "
                "these to a divisor"
            )
        self.total_ppo_epochs = math.ceil(self.steps / self.batch_size)

    def _check_values(self) -> None:
        if self.log_with is not None and self.log_with not in TRACKERS:
            raise ConfigError(
                f"log_with={format_value(self.log_with)} must be one of {', '.join(TRACKERS)}"
            )
        if self.log_with not in (None, "all") and find_spec(str(self.log_with)) is None:
            raise ImportError(
                f"log_with={self.log_with!r} needs its package; run pip install {self.log_with}"
            )
        best = self.options("push_to_hub_if_best_kwargs")
        if best and not isinstance(best.get("repo_id"), str):
            raise ConfigError(
                f"push_to_hub_if_best_kwargs={format_value(best)} needs a repo_id to push to"
            )

    def options(self, name: str) -> dict[str, Any]:
        """A dictionary option; on the command line it is JSON."""
        return read_mapping(getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """All options as one flat dictionary, nested names joined by "/"."""
        return flatten_dict(asdict(self) | {"total_ppo_epochs": self.total_ppo_epochs})


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; use {new}, which does the same", stacklevel=5)


class AdaptiveKLController(AdaptiveKL):
    """``kedge.loop.control.AdaptiveKL`` under TRL's names."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        super().__init__(value=init_kl_coef, target=target, horizon=horizon)


class FixedKLController(FixedKL):
    """A constant KL coefficient."""

    def __init__(self, kl_coef: float) -> None:
        super().__init__(value=kl_coef)
