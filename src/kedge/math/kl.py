"""Per-token estimators of KL(policy || reference).

Source: J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html (k1, k2, k3).
All are functions of log-probabilities in nats, float [B, R] -> float [B, R].
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HasLogprobs(Protocol):
    """Input of ``per_token_kl``, such as ``kedge.types.ModelOutputs``."""

    @property
    def logprobs(self) -> Tensor: ...  # noqa: D102
    @property
    def ref_logprobs(self) -> Tensor | None: ...  # noqa: D102
    @property
    def full_kl(self) -> Tensor | None: ...  # noqa: D102


def k1(logp: Tensor, ref: Tensor) -> Tensor:
    """Unbiased, may be negative: log p - log q."""
    return logp - ref


def k2(logp: Tensor, ref: Tensor) -> Tensor:
    """Biased, never negative: (log p - log q)^2 / 2.  Classic TRL calls it "mse"."""
    return 0.5 * (logp - ref) ** 2


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """Unbiased, never negative: q/p - 1 - log(q/p)."""
    return (ref - logp).expm1() - (ref - logp)


def absolute(logp: Tensor, ref: Tensor) -> Tensor:
    """A distance, not an estimator of the KL: abs(log p - log q).  Classic TRL's "abs"."""
    return (logp - ref).abs()


def over_vocabulary(logp: Tensor, ref: Tensor) -> Tensor:
    """Exact: sum_v p(v) (log p(v) - log q(v)).  float [B, R, V] -> [B, R]."""
    return (logp.exp() * (logp - ref)).sum(-1)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
NAMES = (*ESTIMATORS, "full")


def per_token_kl(outputs: HasLogprobs, estimator: str) -> Tensor:
    """The KL of each response token by ``estimator``; "full" is exact, over the vocabulary.

    Raises:
        ValueError: an unknown estimator, or a missing input.
    """
    if estimator == "full":
        if outputs.full_kl is None:
            raise ValueError(
                'kl_estimator="full" needs full_kl; set needs_full_kl=True on the Algorithm'
            )
        return outputs.full_kl
    if estimator not in ESTIMATORS:
        raise ValueError(f"kl_estimator must be one of {', '.join(NAMES)}, got {estimator!r}")
    if outputs.ref_logprobs is None:
        raise ValueError(
            "the KL penalty needs ref_logprobs; set needs_reference=True on the Algorithm"
        )
    return ESTIMATORS[estimator](outputs.logprobs, outputs.ref_logprobs)
