"""Options of RLOOTrainer, in the names of TRL up to 0.21 and of TRL 0.22 and later."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kedge.config.base import OnPolicyConfig
from kedge.config.compat.trl import NEWER, NewerArguments, settle_newer
from kedge.config.declare import check_fields, option
from kedge.config.option_status import FIELD_SUPPORT
from kedge.config.options import Honored, Moved, Refused, Support, apply_support
from kedge.errors import ConfigError
from kedge.suggestions import named

_RLOO = "algorithm: kedge.algorithms.rloo"

RLOO_SUPPORT: dict[str, Support] = {
    **FIELD_SUPPORT,
    **NEWER,
    "rloo_k": Moved("num_generations"),
    "beta": Moved("kl_coef"),
    "epsilon": Moved("cliprange"),
    "epsilon_high": Moved("cliprange_high"),
    "normalize_advantages": Moved("normalize_advantage"),
    "whiten_rewards": Refused("RLOO has one reward per response", "set normalize_reward=True"),
    **dict.fromkeys(
        (
            "cliprange",
            "cliprange_high",
            "ratio_level",
            "token_level_kl",
            "normalize_reward",
            "reward_clip_range",
            "normalize_advantage",
            "mask_truncated_completions",
        ),
        Honored(_RLOO),
    ),
}

# Older and newer name of the same option.
PAIRS = (
    ("rloo_k", "num_generations"),
    ("kl_coef", "beta"),
    ("cliprange", "epsilon"),
    ("num_ppo_epochs", "num_iterations"),
    ("num_mini_batches", "steps_per_generation"),
    ("num_mini_batches", "generation_batch_size"),
    ("response_length", "max_completion_length"),
    ("normalize_advantage", "normalize_advantages"),
)
# Defaults of unset options: with the older names, with the newer names.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "num_generations": (2, 2),
    "kl_coef": (0.05, 0.05),
    "cliprange": (0.2, 0.2),
    "num_ppo_epochs": (4, 1),
    "num_mini_batches": (1, 1),
    "response_length": (53, 512),
    "normalize_advantage": (False, False),
    "temperature": (0.7, 1.0),
    "learning_rate": (5e-5, 1e-6),
}


@named("option")
@dataclass(repr=False)
class RLOOConfig(NewerArguments, OnPolicyConfig):
    """Options of ``kedge.RLOOTrainer``, in the names of TRL up to 0.21 or of 0.22 and later.

    Newer names are converted to the older ones on construction; older and newer names in one config
    are refused.  Unset options get the defaults that belong to the names used, those of the older
    names if neither are.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    SUPPORT: ClassVar[Mapping[str, Support]] = RLOO_SUPPORT
    SETTLED: ClassVar[Mapping[str, Any]] = {name: older for name, (older, _) in DEFAULTS.items()}

    exp_name: str = option("rloo_config", "Name of the experiment.")

    # Unset until it is known which names are used.
    learning_rate: float | None = option(  # type: ignore[assignment]
        None, "Learning rate. Unset: 5e-5, with newer names 1e-6."
    )
    num_ppo_epochs: int | None = option(  # type: ignore[assignment]
        None, "Passes over each batch of responses. Unset: 4, with newer names 1."
    )
    num_mini_batches: int | None = option(  # type: ignore[assignment]
        None, "Optimizer steps per pass over the batch. Unset: 1."
    )
    num_generations: int | None = option(  # type: ignore[assignment]
        None, "Responses per prompt, at least 2. Unset: 2."
    )
    response_length: int | None = option(  # type: ignore[assignment]
        None, "Maximum length of a response, in tokens. Unset: 53, with newer names 512."
    )
    temperature: float | None = option(  # type: ignore[assignment]
        None, "Sampling temperature; divides the logits in training too. Unset: 0.7, newer names 1."
    )
    kl_coef: float | None = option(  # type: ignore[assignment]
        None, "Weight of the KL penalty in the reward. Unset: 0.05."
    )
    cliprange: float | None = option(
        None,
        "Clip range of the probability ratio: 1 - cliprange to 1 + cliprange. Unset: 0.2.",
        gt=0,
        le=math.inf,
    )
    normalize_advantage: bool | None = option(
        None, "Scale advantages to mean 0 and unit variance over the whole batch. Unset: False."
    )

    # RLOO.
    rloo_k: int | None = option(None, "Older name of num_generations.", ge=1)
    cliprange_high: float | None = option(
        None, "Upper clip range, up to 1 + this. Unset: cliprange.", gt=0, le=math.inf
    )
    ratio_level: Literal["sequence", "token"] | None = option(
        None,
        "Clip the ratio of whole responses or of tokens. Unset: sequence, or token with "
        "token_level_kl.",
    )
    token_level_kl: bool = option(
        False, "Penalize each token by its KL and that of later tokens, not of the whole response."
    )
    normalize_reward: bool = option(
        False, "Scale scores to mean 0 and unit variance over the whole batch, then clip them."
    )
    reward_clip_range: list[float] | None = option(
        None,
        "Clip scores to low, high, or to -c, c for one number c; also without normalize_reward.",
        accepts=list[float] | float | None,
    )
    mask_truncated_completions: bool = option(
        False, "Exclude responses that were truncated at the length limit from the loss."
    )
    whiten_rewards: bool = option(False, "Not supported; see normalize_reward.")

    # Newer names.
    beta: float | None = option(None, "Newer name of kl_coef.")
    epsilon: float | None = option(None, "Newer name of cliprange.")
    epsilon_high: float | None = option(None, "Newer name of cliprange_high.")
    normalize_advantages: bool | None = option(None, "Newer name of normalize_advantage.")

    @property
    def length_option(self) -> str:
        """The name of ``response_length`` to use in messages."""
        return "max_completion_length" if self._newer else "response_length"

    def __post_init__(self) -> None:
        check_fields(self)
        self._newer = newer = self._uses_newer_names()
        settle_newer(self)
        apply_support(self, self.SUPPORT)
        for name, defaults in DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, defaults[newer])
        super().__post_init__()
        self._check_rloo()

    def _uses_newer_names(self) -> bool:
        """Whether newer names are used.

        Raises:
            ConfigError: older and newer names are mixed.
        """
        older = [a for a, _ in PAIRS if getattr(self, a) is not None]
        newer = [b for _, b in PAIRS if getattr(self, b) is not None]
        for a, b in PAIRS:
            if a in older and b in newer:
                raise ConfigError(
                    f"{a}={getattr(self, a)!r} and {b}={getattr(self, b)!r} are the older and newer"
                    " name of one option; set one of them"
                )
        # num_generations is set in both cases once a config is constructed.
        mixed = [b for b in newer if b != "num_generations"]
        if older and mixed:
            a, b = older[0], mixed[0]
            raise ConfigError(
                f"{a}={getattr(self, a)!r} is a name of TRL up to 0.21, {b}={getattr(self, b)!r}"
                f" one of TRL 0.22 and later, which have different defaults; replace"
                f" {a} by {dict(PAIRS)[a]}, or {b} by {_older(b)}"
            )
        return bool(newer) and not older

    def _check_rloo(self) -> None:
        if self.token_level_kl and self.ratio_level == "sequence":
            raise ConfigError(
                "token_level_kl=True gives one advantage per token, but ratio_level='sequence'"
                " needs one per response; set ratio_level='token'"
            )
        bounds = reward_bounds(self.reward_clip_range)
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ConfigError(
                f"reward_clip_range={self.reward_clip_range!r} must be low, high with low < high,"
                " or one number above 0"
            )


def _older(newer: str) -> str:
    return next(a for a, b in PAIRS if b == newer)


def reward_bounds(value: Any) -> tuple[float, float] | None:
    """``(low, high)`` of c, [c] or (low, high).

    Raises:
        ConfigError: ``value`` is none of these.
    """
    if value is None:
        return None
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers):
        raise ConfigError(f"reward_clip_range={value!r} must be one number or low, high")
    if len(numbers) == 1:
        return -float(numbers[0]), float(numbers[0])
    if len(numbers) != 2:
        raise ConfigError(f"reward_clip_range={value!r} must be one number or low, high")
    return float(numbers[0]), float(numbers[1])
