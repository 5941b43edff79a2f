"""Checks of option values and combinations; each error says what to set instead."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig

from kedge.config.declare import check_fields
from kedge.config.rollout import json_object
from kedge.config.sampling import check_end
from kedge.config.values import shown
from kedge.errors import ConfigError

# Prefixes; each needs hooks in layers or a switch before every evaluation.
UNSUPPORTED_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo", "schedule_free")
# Arguments of torch.utils.checkpoint.
CHECKPOINTING = (
    "use_reentrant",
    "context_fn",
    "determinism_check",
    "preserve_rng_state",
    "early_stop",
    "debug",
)
UNSUPPORTED_SCHEDULES = ("reduce_lr_on_plateau", "greedy")


def check_values(config: Any) -> None:
    """Check every value, then the combinations.

    Raises:
        ConfigError: naming the field, its value, and what is allowed.
    """
    check_fields(config)
    for check in COMBINATIONS:
        check(config)


def _response_lengths(c: Any) -> None:
    if c.min_new_tokens > c.response_length:
        raise ConfigError(
            f"min_new_tokens={c.min_new_tokens} must be at most response_length={c.response_length}"
        )


def _stop_tokens(c: Any) -> None:
    check_end(c, has_eos=True)  # the tokenizer is not known yet


def _sampling(c: Any) -> None:
    cut = [
        f"{name}={getattr(c, name)}"
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        if getattr(c, name) != off
    ]
    if cut and not c.keep_sampling_mask:
        raise ConfigError(
            f"{', '.join(cut)} excludes tokens from sampling that training would include, so the "
            "probability ratio would be wrong from the first step; set keep_sampling_mask=True to "
            "train over the same tokens, or sample from all of them"
        )


def _penalties(c: Any) -> None:
    if c.non_eos_penalty and c.missing_eos_penalty is not None:
        raise ConfigError(
            f"non_eos_penalty=True replaces the score, but missing_eos_penalty="
            f"{c.missing_eos_penalty} is subtracted from it; set one of them"
        )


def _reward_errors(c: Any) -> None:
    if c.on_reward_error == "score" and c.reward_error_score is None:
        raise ConfigError("on_reward_error='score' needs reward_error_score, the score to give")
    if c.on_reward_error != "score" and c.reward_error_score is not None:
        raise ConfigError(
            f"reward_error_score={c.reward_error_score} needs on_reward_error='score', got "
            f"{c.on_reward_error!r}"
        )


def _kl(c: Any) -> None:
    if c.adaptive_kl and c.kl_coef == 0:
        raise ConfigError(
            "adaptive_kl=True multiplies kl_coef, so kl_coef=0 would stay 0; set for example"
            " kl_coef=0.05"
        )


def _dual_clip(c: Any) -> None:
    limit = getattr(c, "dual_clip", None)
    if limit is not None and limit <= 1 + c.cliprange:
        raise ConfigError(
            f"dual_clip={limit} must be above 1 + cliprange={1 + c.cliprange:g}; 3 is usual"
        )


def _adapters(c: Any) -> None:
    if c.ref_adapter_name is not None and c.ref_adapter_name == c.model_adapter_name:
        raise ConfigError(
            f"ref_adapter_name and model_adapter_name are both {c.ref_adapter_name!r}, so the "
            "reference would be the policy; name another adapter or leave ref_adapter_name unset"
        )


def _rollout_folders(c: Any) -> None:
    if c.replay_rollouts is None:
        return
    if c.save_rollouts is not None:
        raise ConfigError(
            f"replay_rollouts={c.replay_rollouts!r} and save_rollouts={c.save_rollouts!r} would "
            "only copy rollouts; set one of them"
        )
    if c.max_lag > 0:
        raise ConfigError(
            f"replay_rollouts={shown(c.replay_rollouts)} samples nothing, so max_lag={c.max_lag}"
            " has no effect; set max_lag=0"
        )
    if not os.path.isdir(c.replay_rollouts):
        raise ConfigError(
            f"replay_rollouts={shown(c.replay_rollouts)} is not a folder; give a folder written"
            " by save_rollouts"
        )


def _schedule(c: Any) -> None:
    if c.rollout_schedule == "in_order":
        if c.num_partial_batches is not None:
            raise ConfigError(
                f"num_partial_batches={c.num_partial_batches} needs"
                ' rollout_schedule="as_completed", got "in_order"; set it, or leave'
                " num_partial_batches out"
            )
        if c.in_flight_weight_updates:
            raise ConfigError(
                'in_flight_weight_updates=True needs rollout_schedule="as_completed", got'
                ' "in_order", which trains on whole batches of one policy version; set it, or leave'
                " in_flight_weight_updates out"
            )
    elif c.max_lag == 0:
        raise ConfigError(
            'rollout_schedule="as_completed" trains on a partial batch while others are sampled,'
            " but max_lag=0 does not sample during training; set max_lag=1 or more"
        )


def _optimizer(c: Any) -> None:
    optim = str(getattr(c.optim, "value", c.optim))
    if optim.startswith(UNSUPPORTED_OPTIMIZERS):
        raise ConfigError(
            f"optim={optim!r} is not supported: it needs hooks in the layers or a switch around "
            "every forward pass; use adamw_torch_fused, adamw_torch, adafactor, sgd, rmsprop, "
            "adagrad or a bitsandbytes optimizer"
        )
    schedule = str(getattr(c.lr_scheduler_type, "value", c.lr_scheduler_type))
    if schedule in UNSUPPORTED_SCHEDULES:
        raise ConfigError(
            f"lr_scheduler_type={schedule!r} is not supported: it needs a validation loss; "
            "use linear, cosine or constant_with_warmup"
        )


def _optim_args(c: Any) -> None:
    pairs = (c.optim_args or "style=torch").split(",")
    if any(pair.count("=") != 1 or pair.strip().startswith("=") for pair in pairs):
        raise ConfigError(
            f"optim_args={shown(c.optim_args)} must be comma-separated name=value pairs, such as"
            " 'style=tf'"
        )


def _checkpointing(c: Any) -> None:
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        arguments = json_object(name, getattr(c, name, None))
        unknown = sorted(set(arguments) - set(CHECKPOINTING))
        if unknown:
            raise ConfigError(
                f"{name}={shown(arguments)} has the unknown argument {unknown[0]!r};"
                f" torch.utils.checkpoint takes {', '.join(CHECKPOINTING)}"
            )


def _loader_options(c: Any) -> None:
    options = c.accelerator_config
    if isinstance(options, str):
        is_json = options.startswith("{")
        options = json.loads(options if is_json else Path(options).read_text(encoding="utf-8"))
    if not isinstance(options, dict):
        return
    defaults = AcceleratorConfig().to_dict()  # a config's to_dict() has all of these
    allowed = ("use_configured_state", "non_blocking")
    refused = sorted(
        k for k, v in options.items() if k not in allowed and v != defaults.get(k, ...)
    )
    if refused:
        raise ConfigError(
            f"accelerator_config={shown(options)} sets {', '.join(refused)}, which configure a data"
            " loader, but Kedge does not use one; leave them out"
        )


def _output_dir(c: Any) -> None:
    if c.output_dir is not None and not str(c.output_dir).strip():
        raise ConfigError(
            f"output_dir={c.output_dir!r} must be the path of a folder for models and checkpoints;"
            " set '.' for the current folder"
        )
    for name in ("output_dir", "logging_dir", "save_rollouts"):
        if _too_long(getattr(c, name) or "."):
            raise ConfigError(f"{name}={shown(getattr(c, name))} is too long for a path")
    if c.output_dir is not None and os.path.isfile(os.path.expanduser(c.output_dir)):
        raise ConfigError(f"output_dir={c.output_dir!r} is a file; give a folder")


def _too_long(path: str) -> bool:
    try:
        os.lstat(os.path.expanduser(path))
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def _completions(c: Any) -> None:
    evaluates = str(getattr(c.eval_strategy, "value", c.eval_strategy)) != "no"
    if c.log_completions_hub_repo and not (c.num_sample_generations or evaluates):
        raise ConfigError(
            f"log_completions_hub_repo={c.log_completions_hub_repo!r} needs tables of completions;"
            " set num_sample_generations above 0 (and not log_completions=False), or leave it out"
        )


COMBINATIONS: tuple[Callable[[Any], None], ...] = (
    _response_lengths,
    _stop_tokens,
    _sampling,
    _penalties,
    _reward_errors,
    _kl,
    _dual_clip,
    _adapters,
    _rollout_folders,
    _schedule,
    _optimizer,
    _optim_args,
    _checkpointing,
    _loader_options,
    _output_dir,
    _completions,
)
