"""Penalties for responses that were cut off before a stop token."""

from __future__ import annotations

from dataclasses import replace

import torch

from kedge.errors import ConfigError
from kedge.protocols import RewardSource
from kedge.types import RewardOutput, Rollout


class EosPenalty:
    """Lowers the score of responses that were cut off.

    With ``missing_eos_penalty``: score - penalty.  With ``non_eos_penalty``: the score becomes
    ``penalty_reward_value``.  A response counts as ended if generation stopped it at a stop token
    or stop string (``Rollout.terminated``), whatever that token is.

    Args:
        inner: source of the scores.
        missing_eos_penalty: subtracted from the score of a cut-off response.
        non_eos_penalty: replace the score of a cut-off response.
        penalty_reward_value: the replacement.

    Raises:
        ConfigError: both kinds of penalty are set.
    """

    def __init__(
        self,
        inner: RewardSource,
        *,
        missing_eos_penalty: float | None = None,
        non_eos_penalty: bool = False,
        penalty_reward_value: float = -1.0,
    ) -> None:
        if missing_eos_penalty is not None and non_eos_penalty:
            raise ConfigError(
                f"missing_eos_penalty={missing_eos_penalty} subtracts from the score of cut-off"
                f" responses, non_eos_penalty=True replaces it by {penalty_reward_value};"
                " set only one of them"
            )
        self._inner = inner
        self.columns: frozenset[str] | None = getattr(inner, "columns", None)
        self._subtract = missing_eos_penalty
        self._replace = penalty_reward_value if non_eos_penalty else None

    def score(self, rollout: Rollout) -> RewardOutput:
        """The inner reward output; its components keep the scores before the penalty."""
        output = self._inner.score(rollout)
        scores, ended = output.scores, rollout.terminated
        if self._subtract is not None:
            scores = torch.where(ended, scores, scores - self._subtract)
        if self._replace is not None:
            scores = torch.where(ended, scores, self._replace)
        return replace(output, scores=scores)
