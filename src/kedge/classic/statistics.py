"""The statistics that ``step`` returns.  Every key is here; see docs/classic.md for meanings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.math.masked import masked_mean, moments

OBJECTIVE = ("kl", "kl_dist", "logprobs", "ref_logprobs", "kl_coef", "entropy")
TRAIN = (
    *("loss/policy", "loss/value", "loss/total", "policy/entropy", "policy/approxkl"),
    *("policy/policykl", "policy/clipfrac", "policy/advantages", "policy/advantages_mean"),
    *("policy/ratio", "returns/mean", "returns/var", "val/vpred", "val/error"),
    *("val/clipfrac", "val/mean", "val/var"),
)
TOKENS = tuple(
    f"{x}_{y}" for x in ("queries", "responses") for y in ("len_mean", "len_std", "dist")
)
TIMES = (
    *("forward_pass", "compute_rewards", "compute_advantages"),
    *("optimize_step", "calc_stats", "total"),
)
KEYS = (
    *(f"objective/{x}" for x in OBJECTIVE),
    *("ppo/mean_non_score_reward", "ppo/mean_scores", "ppo/std_scores", "ppo/learning_rate"),
    *(f"ppo/{x}" for x in TRAIN),
    "ppo/val/var_explained",
    *(f"tokens/{x}" for x in TOKENS),
    *(f"time/ppo/{x}" for x in TIMES),
)
LISTS = ("policy/advantages", "policy/ratio")


def over_steps(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Statistics of optimiser steps as one: means, and per-token numbers one after the other."""
    return {
        name: torch.cat([torch.as_tensor(x[name]).flatten() for x in found])
        if name in LISTS
        else torch.stack([torch.as_tensor(x[name]).float().mean() for x in found]).mean()
        for name in found[0]
    }


def update_statistics(
    kl_coef: float,
    *,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    non_score_reward: Tensor,
    train_stats: Mapping[str, Tensor],
    masks: Tensor,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    kls: Tensor,
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, Any]:
    """The statistics of one update, without learning rate and times.

    Means and deviations are over the rows that ``total`` sums over; arrays hold this rank's.

    Args:
        kl_coef: used in it.
        scores: float32 [B].
        logprobs: float32 [B, T] before the update, 0 or anything off the mask.
        ref_logprobs: float32 [B, T].
        non_score_reward: float32 [B, T].
        train_stats: of the optimiser steps.
        masks: bool [B, T], tokens that train.
        queries: int64 [P_i] each.
        responses: int64 [R_i] each.
        kls: float32 [B, T].
        total: sums a tensor over ranks; the default stays on this rank.

    Returns:
        Tensors, and floats for ``objective/kl_coef`` and the lengths.
    """
    mask, rows = masks.bool(), torch.ones(len(scores), dtype=torch.bool)
    per_response = torch.where(mask, kls, 0.0).sum(-1).cpu()
    minus_logprob = torch.where(mask, -logprobs, 0.0).sum(-1).cpu()
    kl = masked_mean(per_response, rows, total=total)
    score, spread = moments(scores.double().cpu(), rows, total=total)
    if float(kl) < -1.0:
        warnings.warn(
            f"the KL to the reference is {float(kl):.2f} nats per response: responses are not "
            "sampled from the policy alone (top-k, top-p, a repetition penalty, a minimum "
            "length?), or log-probabilities of padding are counted",
            stacklevel=3,
        )
    stats: dict[str, Any] = {
        "objective/kl": kl,
        "objective/kl_dist": per_response,
        "objective/logprobs": torch.where(mask, logprobs, 0.0),
        "objective/ref_logprobs": torch.where(mask, ref_logprobs, 0.0),
        "objective/kl_coef": float(kl_coef),
        "objective/entropy": masked_mean(minus_logprob, rows, total=total),
        "ppo/mean_non_score_reward": masked_mean(non_score_reward, mask, total=total),
        "ppo/mean_scores": score,
        "ppo/std_scores": spread,
    }
    for name, texts in (("queries", queries), ("responses", responses)):
        lengths = torch.tensor([float(len(x)) for x in texts])
        center, width = moments(lengths, rows, total=total)
        stats[f"tokens/{name}_len_mean"] = float(center)
        stats[f"tokens/{name}_len_std"] = float(width)
        stats[f"tokens/{name}_dist"] = lengths.numpy()
    for name, x in train_stats.items():
        stats[f"ppo/{name}"] = x.flatten() if name in LISTS else x.float().mean()
    if {"ppo/val/error", "ppo/returns/var"} <= stats.keys():
        error, variance = (stats[f"ppo/{x}"].double() for x in ("val/error", "returns/var"))
        unexplained = torch.where(variance > 0, error / variance, torch.ones_like(error))
        stats["ppo/val/var_explained"] = 1 - unexplained
    return stats
