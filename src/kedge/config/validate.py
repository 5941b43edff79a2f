"""Checks of combinations of options; each error says what to set instead."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig

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


def check_combinations(config: Any) -> None:
    """Check what options say together.

    Raises:
        ConfigError: naming the field, its value, and what is allowed.
    """
    check_end(config, has_eos=True)  # the tokenizer is not known yet
    _check_responses(config)
    _check_rollouts(config)
    _check_learner(config)
    _check_loader(config)
    _check_outputs(config)


def _check_responses(c: Any) -> None:
    if c.min_new_tokens > c.response_length:
        raise ConfigError(
            f"min_new_tokens={c.min_new_tokens} must be at most response_length={c.response_length}"
        )
    if c.non_eos_penalty and c.missing_eos_penalty is not None:
        raise ConfigError(
            f"non_eos_penalty=True replaces the score, but missing_eos_penalty="
            f"{c.missing_eos_penalty} is subtracted from it; set one of them"
        )
    if c.on_reward_error == "score" and c.reward_error_score is None:
        raise ConfigError("on_reward_error='score' needs reward_error_score, the score to give")
    if c.on_reward_error != "score" and c.reward_error_score is not None:
        raise ConfigError(
            f"reward_error_score={c.reward_error_score} needs on_reward_error='score', got "
            f"{c.on_reward_error!r}"
        )
    if c.adaptive_kl and c.kl_coef == 0:
        raise ConfigError(
            "adaptive_kl=True multiplies kl_coef, so kl_coef=0 would stay 0; set for example"
            " kl_coef=0.05"
        )
    limit = getattr(c, "dual_clip", None)
    if limit is not None and limit <= 1 + c.cliprange:
        raise ConfigError(
            f"dual_clip={limit} must be above 1 + cliprange={1 + c.cliprange:g}; 3 is usual"
        )
    if c.ref_adapter_name is not None and c.ref_adapter_name == c.model_adapter_name:
        raise ConfigError(
            f"ref_adapter_name and model_adapter_name are both {c.ref_adapter_name!r}, so the "
            "reference would be the policy; name another adapter or leave ref_adapter_name unset"
        )


def _check_rollouts(c: Any) -> None:
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


def _check_learner(c: Any) -> None:
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
    pairs = (c.optim_args or "name=value").split(",")
    if any(pair.count("=") != 1 or pair.strip().startswith("=") for pair in pairs):
        raise ConfigError(
            f"optim_args={shown(c.optim_args)} must be comma-separated name=value pairs, such as"
            " 'momentum=0.9'"
        )
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        arguments = json_object(name, getattr(c, name, None))
        unknown = sorted(set(arguments) - set(CHECKPOINTING))
        if unknown:
            raise ConfigError(
                f"{name}={shown(arguments)} has the unknown argument {unknown[0]!r};"
                f" torch.utils.checkpoint takes {', '.join(CHECKPOINTING)}"
            )


def _check_loader(c: Any) -> None:
    options = c.accelerator_config
    if isinstance(options, str):
        try:
            is_json = options.startswith("{")
            options = json.loads(options if is_json else Path(options).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"accelerator_config={shown(options)} must be JSON: {error}"
            ) from error
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


def _check_outputs(c: Any) -> None:
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
    evaluates = str(getattr(c.eval_strategy, "value", c.eval_strategy)) != "no"
    if c.log_completions_hub_repo and not (c.num_sample_generations or evaluates):
        raise ConfigError(
            f"log_completions_hub_repo={c.log_completions_hub_repo!r} needs tables of completions;"
            " set num_sample_generations above 0 (and not log_completions=False), or leave it out"
        )


def _too_long(path: str) -> bool:
    try:
        os.lstat(os.path.expanduser(path))
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False
