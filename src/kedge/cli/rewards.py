"""What scores responses, as the flags say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kedge.cli.arguments import Options
from kedge.errors import ConfigError

# A flag that says how much, and the flag without which it would do nothing.
_NEEDS = {
    "verification_reward": "apply_verifiable_reward",
    "r1_style_format_reward": "add_r1_style_format_reward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Reward sources beside a reward model, and the weights of all of them.

    Args:
        functions: callables, or ``file.py:function`` and ``module:function`` strings.
        weights: the model's first, if there is one; None leaves them to ``reward_weights``.
    """

    functions: list[str | Callable[..., Any]]
    weights: list[float] | None


def scores_without_model(options: Options) -> bool:
    """Whether anything but a reward model scores."""
    script = options.script
    return bool(
        script.reward_funcs or script.apply_verifiable_reward or script.add_r1_style_format_reward
    )


def check_rewards(options: Options) -> None:
    """Refuse flags that would do nothing, or say the same thing twice.

    Raises:
        ConfigError: see above.
    """
    given, script = options.given, options.script
    for amount, switch in _NEEDS.items():
        if amount in given and not getattr(script, switch):
            raise ConfigError(f"--{amount} is set without --{switch}; add it")
    if script.reward_model_multiplier == 0 and not scores_without_model(options):
        raise ConfigError(
            "--reward_model_multiplier 0 leaves nothing to score with; add --reward_funcs,"
            " --apply_verifiable_reward or --add_r1_style_format_reward"
        )
    if script.reward_model_multiplier != 1 and "reward_model_path" not in given:
        raise ConfigError("--reward_model_multiplier is set without --reward_model_path; add it")


def _renamed(spec: str | None) -> dict[str, str]:
    """``old=new`` as the other names of verifiers."""
    if spec is None:
        return {}
    old, equals, new = spec.partition("=")
    if not (old and equals and new):
        raise ConfigError(f"--remap_verifier {spec} must be old=new, two names of verifiers")
    return {old: new}


def build_sources(options: Options, *, model: bool) -> Sources:
    """Functions and weights.

    Args:
        options: what ``parse`` returned.
        model: whether a reward model comes first.

    Raises:
        ConfigError: weights are given in two ways.
    """
    from kedge.verifiers import by_column, r1_style_format

    script = options.script
    weighted: list[tuple[Any, float]] = [(name, 1.0) for name in script.reward_funcs or []]
    if script.apply_verifiable_reward:
        renamed = getattr(options.config, "remap_verifier", None)
        weighted.append((by_column(rename=_renamed(renamed)), script.verification_reward))
    if script.add_r1_style_format_reward:
        weighted.append((r1_style_format, script.r1_style_format_reward))
    functions = [each for each, _ in weighted]
    amounts = [
        flag
        for flag in ("reward_model_multiplier", *_NEEDS, *_NEEDS.values())
        if flag in options.given
    ]
    if not amounts:
        return Sources(functions=functions, weights=None)
    if options.config.reward_weights is not None:
        raise ConfigError(
            f"--reward_weights and --{amounts[0]} both say how much a reward counts; leave"
            " --reward_weights out"
        )
    first = [script.reward_model_multiplier] if model else []
    return Sources(functions=functions, weights=first + [weight for _, weight in weighted])
