"""Options of the importance weights of the learner against the rollout engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from kedge.config.rollout import RolloutOptions
from kedge.errors import ConfigError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """The requested importance-sampling correction; see ``kedge.math.importance.Correction``.

    Attributes:
        kind: what happens to weights out of bounds.
        level: None: that of the algorithm's ratio, the token or the whole response.
        high: upper bound. None: 2 for tokens, 5 for responses, 1.01 for the geometric mean.
        low: lower bound.
        reason: why ``sampler_correction="auto"`` turned it on; "" if it was set explicitly.
    """

    kind: Kind
    level: Level | None
    high: float | None
    low: float
    reason: str = ""


def correction_options(config: Any, rollout: RolloutOptions) -> CorrectionOptions | None:
    """The correction that a run uses, or None.

    ``sampler_correction="auto"`` turns it on if ``max_lag >= 2``, and in GRPO with vLLM as TRL's
    ``vllm_importance_sampling_*`` say.

    Raises:
        ConfigError: bounds in the wrong order, or an unknown mode of TRL.
    """
    kind = config.sampler_correction
    explicit = CorrectionOptions(
        kind="truncate" if kind in ("auto", "off", None) else kind,
        level=config.sampler_correction_level,
        high=config.sampler_correction_high,
        low=config.sampler_correction_low,
    )
    _check_order("sampler_correction_low", explicit.low, "sampler_correction_high", explicit.high)
    trl = _trl_correction(config, rollout)
    if kind in ("off", None):
        return None
    if kind != "auto":
        return explicit
    if config.max_lag >= 2:
        return replace(explicit, reason=f"max_lag={config.max_lag}")
    return trl


def _trl_correction(config: Any, rollout: RolloutOptions) -> CorrectionOptions | None:
    """The correction set by TRL's options, which apply if vLLM samples; None without."""
    if not hasattr(config, "vllm_importance_sampling_mode"):
        return None
    mode = config.vllm_importance_sampling_mode
    if mode not in MODES:
        raise ConfigError(f"{_TRL}mode={mode!r} must be one of {', '.join(map(repr, MODES))}")
    level, kind = MODES[mode]
    high = config.vllm_importance_sampling_clip_max
    low = config.vllm_importance_sampling_clip_min
    for name, bound in (("clip_max", high), ("clip_min", low)):
        if bound is not None and not 0 <= bound < math.inf:
            raise ConfigError(
                f"{_TRL}{name}={bound!r} must be a finite number of at least 0, or unset"
            )
    _check_order(f"{_TRL}clip_min", low, f"{_TRL}clip_max", high)
    if not (rollout.uses_vllm and config.vllm_importance_sampling_correction):
        return None
    if kind == "truncate" and high is None and low is None:
        raise ConfigError(
            f"{_TRL}mode={mode!r} needs a bound: set {_TRL}clip_max or {_TRL}clip_min, or"
            f" {_TRL}correction=False"
        )
    return CorrectionOptions(
        kind=kind,
        level=level,
        high=math.inf if high is None else high,
        low=low or 0.0,
        reason=f"{_TRL}correction=True, and vLLM samples",
    )


def _check_order(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    if low is not None and high is not None and low >= high:
        raise ConfigError(f"{low_name}={low:g} must be less than {high_name}={high:g}")
