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

    exp_name: str = option("rloo_config", "Name of the experiment.")
    num_generations: int = option(2, "Responses per prompt, at least 2.")
    cliprange: Bound = option(
        0.2, "Clip range of the probability ratio: 1 - cliprange to 1 + cliprange."
    )
    cliprange_high: Bound | None = option(
        None, "Upper clip range, up to 1 + this. Unset: cliprange."
    )
    normalize_advantage: bool = option(
        False, "Scale advantages to mean 0 and unit variance over the whole batch."
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
    reward_clip_range: Annotated[list[float] | None, Accepts(float)] = option(
        None,
        "Clip scores to low, high, or to -c, c for one number c; also without normalize_reward.",
    )
    credit: Literal["token", "turn"] = option(
        "token", "What is compared in a group: whole responses, or turn by turn."
    )
    mask_truncated_completions: bool = option(
        False, "Exclude responses that were truncated at the length limit from the loss."
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
