"""Per-token estimators of KL(policy || reference).

Source: J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html (k1, k2, k3).
All are functions of log-probabilities in nats, float [B, R] -> float [B, R].
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HasLogprobs(Protocol):
    """What ``per_token_kl`` reads; ``kedge.types.ModelOutputs`` is one."""

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
    """Not an estimator of the KL, but a distance: abs(log p - log q).  Classic TRL's "abs"."""
    return (logp - ref).abs()


def over_vocabulary(logp: Tensor, ref: Tensor) -> Tensor:
    """Exact: sum_v p(v) (log p(v) - log q(v)).  Of all tokens, float [B, R, V] -> [B, R]."""
    return (logp.exp() * (logp - ref)).sum(-1)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
NAMES = (*ESTIMATORS, "full")


def per_token_kl(note: HasLogprobs, estimator: str) -> Tensor:
    """The KL of each response token by ``estimator``; "full" is exact, over the vocabulary.

    Raises:
        ValueError: an unknown estimator, or one whose input was not computed.
    """
    if estimator == "full":
        if note.full_kl is None:
            raise ValueError('kl_estimator="full" needs Annotation.full_kl (needs_full_kl=True)')
        return note.full_kl
    if estimator not in ESTIMATORS:
        raise ValueError(f"kl_estimator={estimator!r} is unknown; one of {', '.join(NAMES)}")
    if note.ref_logprobs is None:
        raise ValueError("the KL penalty needs reference log-probabilities (needs_reference=True)")
    return ESTIMATORS[estimator](note.logprobs, note.ref_logprobs)
