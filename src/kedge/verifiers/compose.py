"""The usual mixture: reward model, verifiers, format reward, and a penalty for missing EOS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.errors import ConfigError
from kedge.verifiers.by_column import ByColumn, RewardFunc
from kedge.verifiers.constraints import ifeval
from kedge.verifiers.formats import r1_style_format
from kedge.verifiers.mathematics.arithmetic import gsm8k
from kedge.verifiers.mathematics.verifier import math
from kedge.verifiers.programs import code
from kedge.verifiers.regex import regex_match
from kedge.verifiers.strings import exact_match, string_contains, string_f1, string_match

VERIFIERS: dict[str, RewardFunc] = {
    "gsm8k": gsm8k,
    "math": math,
    "ifeval": ifeval,
    "code": code,
    "regex": regex_match,
    "string_match": string_match,
    "exact_match": exact_match,
    "string_contains": string_contains,
    "string_f1": string_f1,
}


def by_column(verifiers: Mapping[str, RewardFunc] | None = None, **options: Any) -> ByColumn:
    """Verifiers selected by a dataset column: the built-in ones and your own.

    Args:
        verifiers: additional verifiers, or replacements under the same names.
        options: of ``ByColumn``: column, truth, weights, rename, name.
    """
    return ByColumn(VERIFIERS | dict(verifiers or {}), **options)


@dataclass(frozen=True, slots=True)
class RewardMix:
    """Arguments for a trainer and its config that set up a mixture of rewards.

    Attributes:
        trainer: keyword arguments of the trainer: reward_model, reward_funcs, reward_weights.
        config: options of the config: non_eos_penalty, penalty_reward_value.
    """

    trainer: dict[str, Any]
    config: dict[str, Any]


def reward_mix(
    *,
    reward_model: Any = None,
    reward_model_multiplier: float = 1.0,
    verifiers: RewardFunc | Sequence[RewardFunc] | None = None,
    apply_verifiable_reward: bool | None = None,
    verification_reward: float = 10.0,
    add_r1_style_format_reward: bool = False,
    r1_style_format_reward: float = 1.0,
    non_stop_penalty: bool = False,
    penalty_reward_value: float = -1.0,
) -> RewardMix:
    """The reward mixture of open-instruct's PPO, with its option names.

        score = multiplier * model + verification_reward * verifiers + format
        score = penalty_reward_value               if the response did not stop

    Use it as ``PPOTrainer(PPOConfig(..., **mix.config), ..., **mix.trainer)``.

    Args:
        reward_model: a model, or its name or path.
        reward_model_multiplier: weight of the model; at 0 it is not loaded.
        verifiers: one or several; the default is ``by_column()``.
        apply_verifiable_reward: whether to use verifiers; default: if any are given.
        verification_reward: weight of the verifiers.
        add_r1_style_format_reward: reward ``...</think> <answer>...</answer>``.
        r1_style_format_reward: size of that reward.
        non_stop_penalty: a response without stop token scores ``penalty_reward_value``.
        penalty_reward_value: see above.

    Raises:
        ConfigError: no reward is left, or verifiers are given but switched off.
    """
    if apply_verifiable_reward is None:
        apply_verifiable_reward = verifiers is not None
    if verifiers is not None and not apply_verifiable_reward:
        raise ConfigError(
            "verifiers were given, but apply_verifiable_reward=False ignores them; drop one of"
            " the two"
        )
    functions: list[RewardFunc] = []
    weights: list[float] = []
    model = reward_model if reward_model_multiplier else None
    if apply_verifiable_reward:
        chosen = by_column() if verifiers is None else verifiers
        functions += [chosen] if callable(chosen) else list(chosen)
        weights += [verification_reward] * len(functions)
    if add_r1_style_format_reward:
        functions.append(r1_style_format)
        weights.append(r1_style_format_reward)
    if model is None and not functions:
        raise ConfigError(
            f"no reward is left: reward_model_multiplier={reward_model_multiplier} and no verifier;"
            " set apply_verifiable_reward=True, or pass a reward_model with a nonzero multiplier"
        )
    trainer: dict[str, Any] = {"reward_weights": weights}
    if model is not None:
        trainer |= {"reward_model": model, "reward_weights": [reward_model_multiplier, *weights]}
    if functions:
        trainer["reward_funcs"] = functions
    config = {"non_eos_penalty": non_stop_penalty, "penalty_reward_value": penalty_reward_value}
    return RewardMix(trainer=trainer, config=config)
