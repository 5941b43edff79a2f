"""Per-token estimators of KL(policy || reference).

Source: J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html (k1, k2, k3).
All are functions of log-probabilities in nats, float [B, R] -> float [B, R].
"""

from __future__ import annotations

from torch import Tensor


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
