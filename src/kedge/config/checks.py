"""Values and combinations of options that cannot work, each with the way out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig

from kedge.config.sampling import check_end
from kedge.config.support import Moved
from kedge.errors import ConfigError

FINITE = 1e30  # larger numbers overflow in float32 sooner or later


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers a field may hold."""

    low: float
    high: float = math.inf
    above: bool = False  # low itself is not allowed
    below: bool = False  # high itself is not allowed
    whole: bool = False
    optional: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        kind = "a finite number" if self.high == FINITE else kind
        low = f"above {self.low:g}" if self.above else f"of at least {self.low:g}"
        if math.isinf(self.high) or self.high >= 2**62:
            return f"{kind} {low}"
        return f"{kind} {low} and {'below' if self.below else 'at most'} {self.high:g}"

    def holds(self, value: object) -> bool:
        """Whether ``value`` is such a number."""
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.whole and value != int(value):
            return False
        low = value > self.low if self.above else value >= self.low
        return low and (value < self.high if self.below else value <= self.high)


_COUNT = Range(1, 2**62, whole=True)
_COUNT_OR_NONE = Range(1, 2**62, whole=True, optional=True)
_WHOLE = Range(0, 2**62, whole=True)
_UNIT = Range(0, 1)
_POSITIVE = Range(0, above=True)
_NOT_NEGATIVE = Range(0)
_FACTOR = Range(0, FINITE)

RANGES: dict[str, Range] = {
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "num_ppo_epochs": _COUNT,
    "num_mini_batches": _COUNT,
    "num_generations": _COUNT,
    "total_episodes": _COUNT_OR_NONE,
    "max_steps": Range(-1, 2**62, whole=True),
    "num_train_epochs": _NOT_NEGATIVE,
    "local_rollout_forward_batch_size": _COUNT,
    "num_sample_generations": _WHOLE,
    "log_token_rows": _WHOLE,
    "dataset_num_proc": _COUNT_OR_NONE,
    "response_length": _COUNT,
    "min_new_tokens": _WHOLE,
    "temperature": _POSITIVE,
    "top_k": _WHOLE,
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1, below=True),
    "stop_token_id": Range(0, 2**62, whole=True, optional=True),
    "missing_eos_penalty": Range(0, optional=True),
    "penalty_reward_value": Range(-1e30),
    "reward_error_score": Range(-1e30, optional=True),
    "kl_coef": _FACTOR,
    "kl_target": _POSITIVE,
    "kl_horizon": _POSITIVE,
    "cliprange": _POSITIVE,
    "cliprange_value": _POSITIVE,
    "vf_coef": _FACTOR,
    "gamma": _UNIT,
    "lam": _UNIT,
    "lam_value": Range(0, 1, optional=True),
    "lam_alpha": Range(0, above=True, optional=True),
    "dual_clip": Range(1, above=True, optional=True),
    "cliprange_high": Range(0, above=True, optional=True),
    "epsilon": _POSITIVE,
    "epsilon_high": Range(0, above=True, optional=True),
    "delta": Range(1, above=True, optional=True),
    "beta": _FACTOR,
    "overlong_buffer": _WHOLE,
    "dynamic_sampling": _WHOLE,
    "sampler_correction_high": Range(0, above=True, optional=True),
    "sampler_correction_low": _NOT_NEGATIVE,
    "vllm_start_timeout": _POSITIVE,
    "vllm_heartbeat": _POSITIVE,
    "vllm_patience": _POSITIVE,
    "vllm_num_engines": _COUNT,
    "vllm_tensor_parallel_size": _COUNT,
    "rollout_timeout": _POSITIVE,
    "ray_reward_workers": _WHOLE,
    "ray_reward_gpus": _NOT_NEGATIVE,
    "ray_ref_workers": _WHOLE,
    "ray_ref_gpus": _NOT_NEGATIVE,
    "ray_wait_seconds": _POSITIVE,
    "vllm_tolerance": Range(0, above=True, optional=True),
    "value_learning_rate": Range(0, optional=True),
    "value_warmup_steps": _WHOLE,
    "max_prompt_length": _COUNT_OR_NONE,
    "max_lag": _WHOLE,
    "rollout_pieces": _COUNT_OR_NONE,
    "learning_rate": _FACTOR,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": Range(0, optional=True),
    "adam_beta1": Range(0, 1, below=True),
    "adam_beta2": Range(0, 1, below=True),
    "adam_epsilon": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "logging_steps": _NOT_NEGATIVE,
    "save_steps": _NOT_NEGATIVE,
    "eval_steps": Range(0, optional=True),
    "save_total_limit": _COUNT_OR_NONE,
    "num_generations_eval": _COUNT_OR_NONE,
    "eval_success_score": Range(-1e30, optional=True),
    "seed": Range(0, 2**32 - 1, whole=True),
    "data_seed": Range(0, 2**62, whole=True, optional=True),
}

CHOICES: dict[str, tuple[str | None, ...]] = {
    "kl_estimator": ("k1", "k2", "k3", "abs", "full"),
    "stop_token": ("eos", None),
    "on_reward_error": ("raise", "score", "drop"),
    "score_position": ("last", "after_last"),
    "value_source": ("auto", "reward", "policy"),
    "overlong_prompts": ("drop", "truncate"),
    "ratio_level": ("sequence", "token", None),
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "rollout_schedule": ("in_order", "as_completed"),
    "vllm_transfer": ("auto", "nccl", "host"),
    "sampler_correction": ("auto", "off", "truncate", "mask", None),
    "sampler_correction_level": ("token", "sequence", "sequence_mean", None),
}

# Their prefixes; each needs hooks in layers, or a switch before every evaluation.
UNSUPPORTED_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo", "schedule_free")
UNSUPPORTED_SCHEDULES = ("reduce_lr_on_plateau", "greedy")


_ABSENT = object()  # a field that this config does not have


def _value(config: Any, name: str) -> Any:
    """The field's value, or absent where it only names another field here."""
    moved = isinstance(config.SUPPORT.get(name), Moved)
    return _ABSENT if moved else getattr(config, name, _ABSENT)


def check_values(config: Any) -> None:
    """Check every value alone, then the combinations.

    Raises:
        ConfigError: naming the field, its value, and what is allowed.
    """
    for name, allowed in RANGES.items():
        value = _value(config, name)
        if value is not _ABSENT and not allowed.holds(value):
            raise ConfigError(f"{name}={value!r} must be {allowed}")
    for name, choices in CHOICES.items():
        value = _value(config, name)
        if value is not _ABSENT and value not in choices:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    for check in COMBINATIONS:
        check(config)


def _stops(c: Any) -> None:
    for i in c.stop_token_ids or ():
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ConfigError(f"stop_token_ids={c.stop_token_ids!r} must be token ids, 0 or more")
    if isinstance(c.stop_strings, str) or not all(
        isinstance(s, str) and s for s in c.stop_strings or ()
    ):
        raise ConfigError(f"stop_strings={c.stop_strings!r} must be a list of texts, none empty")
    if c.min_new_tokens > c.response_length:
        raise ConfigError(
            f"min_new_tokens={c.min_new_tokens} is more than response_length={c.response_length}"
        )


def _end(c: Any) -> None:
    check_end(c, has_eos=True)  # what the tokenizer has is not known yet


def _sampling(c: Any) -> None:
    cut = [
        f"{name}={getattr(c, name)}"
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        if getattr(c, name) != off
    ]
    if cut and not c.keep_sampling_mask:
        raise ConfigError(
            f"{', '.join(cut)} leaves tokens out of what responses are sampled from, while "
            "training would count them, so the probability ratio would be wrong from the first "
            "step; set keep_sampling_mask=True to train over the same tokens, or sample from all"
        )


def _penalties(c: Any) -> None:
    if c.non_eos_penalty and c.missing_eos_penalty is not None:
        raise ConfigError(
            f"non_eos_penalty replaces the score and missing_eos_penalty={c.missing_eos_penalty} "
            "is subtracted from it; set one of them"
        )


def _reward_errors(c: Any) -> None:
    if c.on_reward_error == "score" and c.reward_error_score is None:
        raise ConfigError("on_reward_error='score' needs reward_error_score, the score to give")
    if c.on_reward_error != "score" and c.reward_error_score is not None:
        raise ConfigError(
            f"reward_error_score={c.reward_error_score} is read with on_reward_error='score', "
            f"and that is {c.on_reward_error!r}"
        )
    for w in c.reward_weights or ():
        if not Range(-1e30).holds(w):
            raise ConfigError(f"reward_weights={c.reward_weights!r} must be numbers")


def _kl(c: Any) -> None:
    if c.adaptive_kl and c.kl_coef == 0:
        raise ConfigError(
            "adaptive_kl multiplies kl_coef, and kl_coef=0 stays 0; start above it, as with 0.05"
        )


def _ceiling(c: Any) -> None:
    ceiling = getattr(c, "dual_clip", None)
    if ceiling is not None and ceiling <= 1 + c.cliprange:
        raise ConfigError(
            f"dual_clip={ceiling} must be above 1 + cliprange={1 + c.cliprange:g}; 3 is usual"
        )


def _adapters(c: Any) -> None:
    if c.ref_adapter_name is not None and c.ref_adapter_name == c.model_adapter_name:
        raise ConfigError(
            f"ref_adapter_name and model_adapter_name are both {c.ref_adapter_name!r}: the "
            "reference would move with the policy; name another adapter or leave it unset"
        )


def _rollout_folders(c: Any) -> None:
    if c.replay_rollouts is None:
        return
    if c.save_rollouts is not None:
        raise ConfigError(
            f"replay_rollouts={c.replay_rollouts!r} reads what save_rollouts={c.save_rollouts!r} "
            "would write again; set one of them"
        )
    if c.max_lag > 0:
        raise ConfigError(
            f"replay_rollouts samples nothing, so max_lag={c.max_lag} has no meaning; set max_lag=0"
        )
    if not Path(c.replay_rollouts).is_dir():
        raise ConfigError(f"replay_rollouts={c.replay_rollouts!r} is no folder")


def _schedule(c: Any) -> None:
    if c.rollout_schedule == "in_order":
        if c.rollout_pieces is not None:
            raise ConfigError(
                f"rollout_pieces={c.rollout_pieces} cuts batches for rollout_schedule="
                '"as_completed"; set that, or leave rollout_pieces out'
            )
    elif c.max_lag == 0:
        raise ConfigError(
            'rollout_schedule="as_completed" trains on one piece while others are sampled, and'
            " max_lag=0 samples nothing meanwhile; set max_lag=1 or more"
        )


def _optimizer(c: Any) -> None:
    optim = str(getattr(c.optim, "value", c.optim))
    if optim.startswith(UNSUPPORTED_OPTIMIZERS):
        raise ConfigError(
            f"optim={optim!r} is not supported: it works through hooks in the layers or needs a "
            "switch around every forward pass; adamw_torch_fused, adamw_torch, adafactor, sgd, "
            "rmsprop, adagrad and the bitsandbytes optimisers are"
        )
    schedule = str(getattr(c.lr_scheduler_type, "value", c.lr_scheduler_type))
    if schedule in UNSUPPORTED_SCHEDULES:
        raise ConfigError(
            f"lr_scheduler_type={schedule!r} is not supported: it follows a validation loss, and "
            "there is none; linear, cosine and constant_with_warmup are"
        )


def _loader_options(c: Any) -> None:
    given = c.accelerator_config
    if isinstance(given, str) and Path(given).is_file():
        given = json.loads(Path(given).read_text(encoding="utf-8"))
    if not isinstance(given, dict):
        return
    inert = AcceleratorConfig().to_dict()  # what a config's own to_dict() gives back
    allowed = ("use_configured_state", "non_blocking")
    refused = sorted(k for k, v in given.items() if k not in allowed and v != inert.get(k, ...))
    if refused:
        raise ConfigError(
            f"accelerator_config sets {', '.join(refused)}: they steer a data loader, and there is "
            "none; leave them out"
        )


def _output_dir(c: Any) -> None:
    if not isinstance(c.output_dir, str | Path | None):
        raise ConfigError(f"output_dir={c.output_dir!r} must be the name of a folder")
    if c.output_dir is not None and not str(c.output_dir).strip():
        raise ConfigError(
            f"output_dir={c.output_dir!r} names no folder: models and checkpoints could not be"
            " saved; name one, or '.' for the current folder"
        )
    if c.output_dir is not None and Path(c.output_dir).expanduser().is_file():
        raise ConfigError(f"output_dir={c.output_dir!r} is a file; name a folder")


def _completions(c: Any) -> None:
    evaluates = str(getattr(c.eval_strategy, "value", c.eval_strategy)) != "no"
    if c.log_completions_hub_repo and not (c.num_sample_generations or evaluates):
        raise ConfigError(
            f"log_completions_hub_repo={c.log_completions_hub_repo!r}, but there are no tables of"
            " completions to send; set num_sample_generations (and leave log_completions alone), or"
            " leave it out"
        )


COMBINATIONS: tuple[Callable[[Any], None], ...] = (
    _stops,
    _end,
    _sampling,
    _penalties,
    _reward_errors,
    _kl,
    _ceiling,
    _adapters,
    _rollout_folders,
    _schedule,
    _optimizer,
    _loader_options,
    _output_dir,
    _completions,
)
