"""Builds the importance-sampling correction between learner and rollout engine."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from kedge.algorithms import Algorithm
from kedge.config.base import OnPolicyConfig
from kedge.errors import ConfigError
from kedge.math.importance import Correction

logger = logging.getLogger(__name__)
Kind = Literal["truncate", "mask"]
Level = Literal["token", "sequence", "sequence_mean"]

HIGH: dict[Level, float] = {"token": 2.0, "sequence": 5.0, "sequence_mean": 1.01}
# Values of TRL's vllm_importance_sampling_mode.
MODES: dict[str, tuple[Level, Kind]] = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
_TRL = "vllm_importance_sampling_"


def build_correction(
    args: OnPolicyConfig, algorithm: Algorithm, *, engine: str, vllm: bool, logprobs: str
) -> Correction | None:
    """The correction that a run uses, or None; logged if it is on by default.

    ``sampler_correction="auto"`` turns it on if ``max_lag >= 2``, and in GRPO with vLLM as TRL's
    ``vllm_importance_sampling_*`` say.

    Args:
        args: the config.
        algorithm: the algorithm.
        engine: name of the rollout engine, for messages.
        vllm: whether vLLM samples.
        logprobs: ``RolloutEngine.logprobs``.
    """
    low, high = args.sampler_correction_low, args.sampler_correction_high
    _check_order("sampler_correction_low", low, "sampler_correction_high", high)
    correction, reason = (
        _trl_correction(args, vllm=vllm),
        f"{_TRL}correction=True, and vLLM samples",
    )
    mode = args.sampler_correction or "off"
    if mode != "auto" or args.max_lag >= 2:
        reason = f"max_lag={args.max_lag}" if mode == "auto" else ""
        whole = algorithm.whole_responses
        level = args.sampler_correction_level or ("sequence" if whole else "token")
        correction = (
            None
            if mode == "off"
            else Correction(
                kind="mask" if mode == "mask" else "truncate",
                level=level,
                high=HIGH[level] if high is None else high,
                low=low,
            )
        )
    recorded = logprobs != "none"
    if correction is None or (reason and not recorded):
        if args.max_lag > 0 and not recorded:
            logger.warning(
                "max_lag=%d trains on samples of older weights, but %s records no"
                " log-probabilities: the loss does not correct for stale samples",
                args.max_lag,
                engine,
            )
        return None
    _check(correction, algorithm, engine=engine, recorded=recorded)
    if reason:
        logger.warning(
            "%s: importance weights of learner over rollout engine multiply the advantages (%s, per"
            ' %s, bounded at %g); sampler_correction="off" disables them',
            reason,
            correction.kind,
            correction.level,
            correction.high,
        )
    return correction


def _check(correction: Correction, algorithm: Algorithm, *, engine: str, recorded: bool) -> None:
    if not recorded:
        raise ConfigError(
            f"sampler_correction={correction.kind!r} needs log-probabilities of the rollout engine,"
            f" but {engine} records none; leave it unset"
        )
    if algorithm.whole_responses and correction.level == "token":
        raise ConfigError(
            f"sampler_correction_level='token' needs token-level advantages, but {algorithm.name}"
            " has one advantage per response; set 'sequence' or 'sequence_mean', or"
            " ratio_level='token'"
        )


def _trl_correction(args: Any, *, vllm: bool) -> Correction | None:
    """The correction set by TRL's options, which apply if vLLM samples; None without."""
    if not hasattr(args, f"{_TRL}mode"):
        return None
    mode = args.vllm_importance_sampling_mode
    if mode not in MODES:
        raise ConfigError(f"{_TRL}mode={mode!r} must be one of {', '.join(map(repr, MODES))}")
    level, kind = MODES[mode]
    high = args.vllm_importance_sampling_clip_max
    low = args.vllm_importance_sampling_clip_min
    for name, bound in (("clip_max", high), ("clip_min", low)):
        if bound is not None and not 0 <= bound < math.inf:
            raise ConfigError(
                f"{_TRL}{name}={bound!r} must be a finite number of at least 0, or unset"
            )
    _check_order(f"{_TRL}clip_min", low, f"{_TRL}clip_max", high)
    if not (vllm and args.vllm_importance_sampling_correction):
        return None
    if kind == "truncate" and high is None and low is None:
        raise ConfigError(
            f"{_TRL}mode={mode!r} needs a bound: set {_TRL}clip_max or {_TRL}clip_min, or"
            f" {_TRL}correction=False"
        )
    high = math.inf if high is None else high
    return Correction(kind=kind, level=level, high=high, low=low or 0.0)


def _check_order(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    if low is not None and high is not None and low >= high:
        raise ConfigError(f"{low_name}={low:g} must be less than {high_name}={high:g}")
