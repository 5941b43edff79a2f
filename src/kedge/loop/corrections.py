"""Which importance weights, of the learner over the rollout engine, a run uses."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from kedge.math.ratios import Correction
from kedge.records.errors import ConfigError
from kedge.records.types import Sampling

logger = logging.getLogger(__name__)
Level = Literal["token", "sequence", "sequence_mean"]
Mode = Literal["auto", "off", "truncate", "mask", "mask_old", "ratio"]
HIGH: dict[Level, float] = {"token": 2.0, "sequence": 5.0, "sequence_mean": 1.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """What is asked for (``sampler_correction``, and bounds), and how old samples may be."""

    mode: Mode = "auto"
    level: Level | None = None  # None: token
    low: float | None = None
    high: float | None = None  # None: that of the level
    max_lag: int = 0
    in_flight: bool = False  # tokens may be older than max_lag


def build_correction(
    options: CorrectionOptions, *, engine: str, vllm: bool, logprobs: str, sampling: Sampling
) -> Correction | None:
    """The correction that a run uses, or None; logged if it is on by default.

    ``sampler_correction*`` acts at every lag.  Unset, weights per token truncated at 2 are on with
    vLLM, from ``max_lag=2``, and in flight (ADR 7).  ``engine`` is a name for messages, and
    ``logprobs`` its ``RolloutEngine.logprob_kind``, with these ``sampling`` parameters.
    """
    asked, correction = _asked_correction(options)
    lag, recorded = options.max_lag, logprobs != "none"
    needed = correction is not None or lag > 0 or options.in_flight
    name, value = next(iter(asked.items()), ("max_lag", lag))
    if needed and logprobs == "raw" and sampling.changes_logprobs:
        if correction is None:
            name, value = "max_lag", lag
        raise ConfigError(
            f"{name}={value!r} needs log-probabilities of the distribution that"
            f" {engine} samples from, but it records those of the model (logprob_kind='raw')"
            " without temperature, top_k, top_p, min_p and min_new_tokens; record the former"
            " (logprob_kind='sampled'), set temperature=1 without the others, or set max_lag=0"
            " without a correction"
        )
    if not asked and recorded and (vllm or options.in_flight or lag >= 2):
        correction = Correction()
        logger.warning(
            "%s: importance weights of learner over rollout engine multiply the advantages (%s, per"
            ' %s, bounded at %g); sampler_correction="off" disables them',
            "vLLM samples" if vllm else f"max_lag={lag}",
            *(correction.kind, correction.level, correction.high),
        )
    if correction is None and lag > 0 and not recorded:
        logger.warning(
            "max_lag=%d trains on samples of older weights, but %s records no log-probabilities:"
            " the loss does not correct for stale samples",
            *(lag, engine),
        )
    if correction is not None and not recorded:
        raise ConfigError(
            f"{name}={value!r} needs log-probabilities of the rollout engine,"
            f" but {engine} records none; leave it unset"
        )
    return correction


def _asked_correction(options: CorrectionOptions) -> tuple[dict[str, Any], Correction | None]:
    """The options that are set, by name, and the correction that they describe."""
    mode, level, low, high = options.mode, options.level, options.low, options.high
    names = {"level": level, "low": low, "high": high}
    bounds = {f"sampler_correction_{n}": x for n, x in names.items() if x is not None}
    asked = bounds if mode == "auto" else {"sampler_correction": mode, **bounds}
    if mode in ("off", "ratio") and bounds:
        name, value = next(iter(bounds.items()))
        raise ConfigError(
            f"{name}={value!r} has no effect with sampler_correction={mode!r};"
            " leave one of them out"
        )
    if not asked or mode == "off":
        return asked, None
    if mode == "ratio":
        return asked, Correction(kind="ratio")
    level = level or "token"
    kind: Literal["mask", "truncate"] = "mask" if mode == "mask" else "truncate"
    high = HIGH[level] if high is None else high
    if low is None and kind == "mask" and high > 1:  # symmetric bounds, as in verl
        low = 1 / high
    if low is not None and low >= high:
        raise ConfigError(
            f"sampler_correction_low={low:g} must be less than sampler_correction_high={high:g}"
        )
    return asked, Correction(kind=kind, level=level, high=high, low=low or 0.0)
