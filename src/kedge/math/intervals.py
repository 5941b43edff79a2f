"""Confidence intervals of shares whose outcomes come in groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean


def share_interval(
    groups: Sequence[Sequence[float]], *, level: float = 0.95
) -> tuple[float, float]:
    """The interval of the mean of outcomes from 0 to 1, where those of a group may be alike.

    A group has the answers to one prompt, the episodes of one seed, or the outcomes of one run;
    groups are independent.  It is the interval of Wilson (1927) for the effective number of
    outcomes p (1 - p) / v, where v is the cluster-robust variance of the mean p over K groups

        v = K / (K - 1) sum_k (sum_i x_ki - n_k p)^2 / n^2

    with the quantile of Student's t of K - 1 degrees of freedom (Korn and Graubard 1998).  Where
    all groups are equal, each counts as one outcome.  With one outcome a group it is Wilson's.
    """
    rows = [x for group in groups for x in group]
    n, k, p = len(rows), len(groups), fmean(rows)
    tail = (1 + level) / 2
    z, count = NormalDist().inv_cdf(tail), float(n)
    if k == 1 < n:
        count = 1.0
    elif k < n:
        z = t_quantile(tail, k - 1)
        sums = (sum(group) - p * len(group) for group in groups)
        variance = k / (k - 1) * sum(x * x for x in sums) / n**2
        count = min(max(p * (1 - p) / variance, 1.0), n) if variance > 0 else k
    middle = p + z * z / (2 * count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    low, high = ((middle + sign * half) / (1 + z * z / count) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def t_quantile(p: float, degrees: int) -> float:
    """Student's t: exact for 1 and 2 degrees, else the expansion of Abramowitz and Stegun, 26.7.5.

    Within 0.4% at 97.5% and 3 degrees, and closer with more.
    """
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return sum(term / degrees**i for i, term in enumerate(terms))
