"""Options of RLOOTrainer, in the names of TRL up to 0.21 and of TRL 0.22 and later."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from kedge.config.base import OnPolicyConfig
from kedge.config.compat import CONVERTED, TRL_RLOO, NewerArguments, convert_newer
from kedge.config.declare import Foreign, option
from kedge.records.errors import ConfigError

_RLOO = "algorithm: kedge.algorithms.rloo"
_rloo = partial(option, acts_in=_RLOO, resume=True)

# Pairs of old and new names for the same option.
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
# Defaults of unset options under the older names, and under the newer names.
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


class _Release(argparse.Action):
    """Argparse action that stores a value and the release that its flag belongs to."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Store them."""
        setattr(namespace, self.dest, values)
        name = str(option_string).removeprefix("--").replace("-", "_")
        of, given = getattr(parser, "rloo_names", (None, {}))
        given = {**(given if of is namespace else {}), name: values}
        parser.rloo_names = namespace, given
        if name == "rloo_k":
            namespace.trl_defaults = "0.21"
        elif _uses_newer_names(given) and name != self.dest:
            namespace.trl_defaults = "0.22"


_named = partial(option, alias_action=_Release)


@dataclass(repr=False)
class RLOOConfig(NewerArguments, OnPolicyConfig):
    """Options of ``kedge.RLOOTrainer``, in the names of TRL up to 0.21 or of 0.22 and later.

    Older and newer names in one config are refused.  Unset options get the defaults that belong to
    the names used, those of the older names if neither are.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    ON_CONSTRUCTION: ClassVar[Sequence[str]] = (*CONVERTED, "trl_defaults")
    FOREIGN: ClassVar[Mapping[str, Foreign]] = TRL_RLOO
    UNSET: ClassVar[Mapping[str, Any]] = {name: older for name, (older, _) in DEFAULTS.items()}

    exp_name: str = option("rloo_config", "Name of the experiment.")

    trl_defaults: Literal["0.21", "0.22"] | None = option(
        None,
        "Defaults of unset options: of TRL up to 0.21, or of 0.22 and later. Unset: those of the "
        "release whose names are used, else 0.21.",
        acts_in="defaults of other options",
    )
    # Left unset until it is known which names the caller uses.
    learning_rate: float | None = option(  # type: ignore[assignment]
        None, "Learning rate. Unset: 5e-5, with newer names 1e-6."
    )
    num_ppo_epochs: int | None = _named(  # type: ignore[assignment]
        None,
        "Passes over each batch of responses. Unset: 4, with newer names 1.",
        alias="num_iterations",
    )
    num_mini_batches: int | None = option(  # type: ignore[assignment]
        None, "Optimizer steps per pass over the batch. Unset: 1."
    )
    num_generations: int | None = _named(  # type: ignore[assignment]
        None, "Responses per prompt, at least 2. Unset: 2.", alias="rloo_k"
    )
    response_length: int | None = _named(  # type: ignore[assignment]
        None,
        "Maximum length of a response, in tokens. Unset: 53, with newer names 512.",
        alias="max_completion_length",
    )
    temperature: float | None = option(  # type: ignore[assignment]
        None, "Sampling temperature; divides the logits in training too. Unset: 0.7, newer names 1."
    )
    kl_coef: float | None = _named(  # type: ignore[assignment]
        None, "Weight of the KL penalty in the reward. Unset: 0.05.", alias="beta"
    )
    cliprange: float | None = _named(
        None,
        "Clip range of the probability ratio: 1 - cliprange to 1 + cliprange. Unset: 0.2.",
        gt=0,
        le=math.inf,
        alias="epsilon",
        acts_in=_RLOO,
        resume=True,
    )
    normalize_advantage: bool | None = _named(
        None,
        "Scale advantages to mean 0 and unit variance over the whole batch. Unset: False.",
        alias="normalize_advantages",
        acts_in=_RLOO,
        resume=True,
    )

    # RLOO.
    cliprange_high: float | None = _named(
        None,
        "Upper clip range, up to 1 + this. Unset: cliprange.",
        gt=0,
        le=math.inf,
        alias="epsilon_high",
        acts_in=_RLOO,
        resume=True,
    )
    ratio_level: Literal["sequence", "token"] | None = _rloo(
        None,
        "Clip the ratio of whole responses or of tokens. Unset: sequence, or token with "
        "token_level_kl.",
    )
    token_level_kl: bool = _rloo(
        False, "Penalize each token by its KL and that of later tokens, not of the whole response."
    )
    normalize_reward: bool = _rloo(
        False, "Scale scores to mean 0 and unit variance over the whole batch, then clip them."
    )
    reward_clip_range: list[float] | None = _rloo(
        None,
        "Clip scores to low, high, or to -c, c for one number c; also without normalize_reward.",
        accepts=list[float] | float | None,
    )
    credit: Literal["token", "turn"] = _rloo(
        "token", "What is compared in a group: whole responses, or turn by turn."
    )
    mask_truncated_completions: bool = _rloo(
        False, "Exclude responses that were truncated at the length limit from the loss."
    )

    @property
    def length_option(self) -> str:
        """The name of ``response_length`` to use in messages."""
        return "max_completion_length" if self.trl_defaults == "0.22" else "response_length"

    @classmethod
    def convert(cls, c: Any, given: Mapping[str, Any]) -> None:
        """Determine which release's names are used, and convert options of TRL."""
        if c.trl_defaults is None:
            c.trl_defaults = "0.22" if _uses_newer_names(given) else "0.21"
        convert_newer(c)

    def _fill_defaults(self) -> None:
        for name, defaults in DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, defaults[self.trl_defaults == "0.22"])
        super()._fill_defaults()

    def _check(self) -> None:
        super()._check()
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


def _uses_newer_names(given: Mapping[str, Any]) -> bool:
    """Whether names of TRL 0.22 and later are used."""
    older = [a for a, _ in PAIRS if given.get(a) is not None]
    newer = [b for _, b in PAIRS if given.get(b) is not None]
    mixed = [b for b in newer if b != "num_generations"]  # older releases have this name, too
    pairs = [(a, b) for a, b in PAIRS if a in older and b in newer]
    pairs += [(older[0], mixed[0])] if older and mixed else []
    for a, b in pairs[:1]:
        raise ConfigError(
            f"{a}={given[a]!r} is a name of TRL up to 0.21, {b}={given[b]!r} one of TRL 0.22 and"
            f" later, which have different defaults; replace {a} by {dict(PAIRS)[a]}, or {b} by"
            f" {next(old for old, new in PAIRS if new == b)}"
        )
    return bool(newer) and not older


def reward_bounds(value: float | Sequence[float] | None) -> tuple[float, float] | None:
    """``(low, high)`` of c, [c] or (low, high)."""
    if value is None:
        return None
    numbers = [*value] if isinstance(value, Sequence) else [value]
    if len(numbers) not in (1, 2):
        raise ConfigError(f"reward_clip_range={value!r} must be one number or low, high")
    return (-numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
