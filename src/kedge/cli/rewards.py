"""Builds reward sources from flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kedge.cli.arguments import Options
from kedge.errors import ConfigError

# Weight -> the flag it needs to have any effect.
_NEEDS = {
    "verification_reward": "apply_verifiable_reward",
    "r1_style_format_reward": "add_r1_style_format_reward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Reward functions that are used with or without a reward model, and all weights.

    Args:
        functions: callables, or ``file.py:function`` and ``module:function`` strings.
        weights: one per source, the reward model first if any; None: ``reward_weights`` applies.
    """

    functions: list[str | Callable[..., Any]]
    weights: list[float] | None


def scores_without_model(options: Options) -> bool:
    """Whether any reward source is given that is not a reward model."""
    script = options.script
    return bool(
        script.reward_funcs
        or script.apply_verifiable_reward
        or script.add_r1_style_format_reward
        or options.config.environment
        or options.config.reward_adapter
    )


def check_rewards(options: Options) -> None:
    """Reject reward flags that would have no effect, or leave no reward source."""
    given, script = options.given, options.script
    for amount, switch in _NEEDS.items():
        if amount in given and not getattr(script, switch):
            raise ConfigError(f"--{amount} needs --{switch}; add it")
    if script.reward_model_multiplier == 0 and not scores_without_model(options):
        raise ConfigError(
            "--reward_model_multiplier 0 leaves no reward source; add --reward_funcs,"
            " --apply_verifiable_reward or --add_r1_style_format_reward"
        )
    if script.reward_model_multiplier != 1 and "reward_model_path" not in given:
        raise ConfigError("--reward_model_multiplier needs --reward_model_path; add it")


def build_sources(options: Options, *, model: bool) -> Sources:
    """Reward functions and weights; ``model`` says whether a reward model comes first."""
    from kedge.verifiers import by_column, r1_style_format

    script = options.script
    weighted: list[tuple[Any, float]] = [(name, 1.0) for name in script.reward_funcs or []]
    if script.apply_verifiable_reward:
        renamed = getattr(options.config, "remap_verifier", None)
        old, _, new = (renamed or "").partition("=")
        if renamed is not None and not (old and new):
            raise ConfigError(
                f"--remap_verifier must be old=new, two verifier names, got {renamed}"
            )
        verifier = by_column(rename={} if renamed is None else {old: new})
        weighted.append((verifier, script.verification_reward))
    if script.add_r1_style_format_reward:
        weighted.append((r1_style_format, script.r1_style_format_reward))
    functions = [function for function, _ in weighted]
    flags = ("reward_model_multiplier", *_NEEDS, *_NEEDS.values())
    amounts = [flag for flag in flags if flag in options.given]
    if not amounts:
        return Sources(functions=functions, weights=None)
    if options.config.reward_weights is not None:
        raise ConfigError(
            f"--reward_weights and --{amounts[0]} both set reward weights; remove --reward_weights"
        )
    first = [script.reward_model_multiplier] if model else []
    return Sources(functions=functions, weights=first + [weight for _, weight in weighted])
