"""Options of RLOOTrainer."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from kedge.config.base import OnPolicyConfig
from kedge.config.common import GroupArguments
from kedge.config.declare import Accepts, Bound, option
from kedge.records.errors import ConfigError


@dataclass(repr=False)
class RLOOConfig(GroupArguments, OnPolicyConfig):
    """Options of ``kedge.RLOOTrainer``, with the defaults of TRL up to 0.21.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    SECTION: ClassVar[str] = "algorithm"

    exp_name: str = option("rloo_config", "The name of the experiment, which run_name uses.")
    num_generations: int = option(2, "How many responses are sampled for each prompt, at least 2.")
    cliprange: Bound = option(
        0.2, "The probability ratio is clipped to 1 - cliprange .. 1 + cliprange."
    )
    cliprange_high: Bound | None = option(
        None, "The upper bound of the clip is 1 + this. If unset, cliprange."
    )
    normalize_advantage: bool = option(
        False, "Scale advantages to mean 0 and unit variance over the whole batch."
    )
    ratio_level: Literal["sequence", "token"] | None = option(
        None,
        "Clip the ratio of whole responses (sequence) or of tokens. If unset, sequence, or token "
        "with token_level_kl.",
    )
    token_level_kl: bool = option(
        False, "Charge each token with its own and later KL, not with that of the whole response."
    )
    normalize_reward: bool = option(
        False, "Scale scores to mean 0 and unit variance over the whole batch, then clip them."
    )
    reward_clip_range: Annotated[list[float] | None, Accepts(float)] = option(
        None,
        "Clip scores to low .. high, or to -c .. c if it is one number c. It acts without "
        "normalize_reward, too.",
    )
    credit: Literal["token", "turn"] = option(
        "token", "What is compared within a group: whole responses, or turn by turn."
    )
    mask_truncated_completions: bool = option(
        False, "Leave responses that were cut off at the length limit out of the loss."
    )

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


def reward_bounds(value: float | Sequence[float] | None) -> tuple[float, float] | None:
    """``(low, high)`` of c, [c] or (low, high)."""
    if value is None:
        return None
    numbers = [*value] if isinstance(value, Sequence) else [value]
    if len(numbers) not in (1, 2):
        raise ConfigError(f"reward_clip_range={value!r} must be one number or low, high")
    return (-numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
