"""miniVERL: advantages, losses and reductions; CONFORMANCE_MINIVERL may name its folder.

Inputs are handed over as they are, masks as floats.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import installed_version, library, tensors, with_gradient

library("CONFORMANCE_MINIVERL", "miniverl")
from miniverl.algorithms import advantages as estimators
from miniverl.algorithms.kl import reference_kl_penalty
from miniverl.algorithms.policy import clipped_policy_loss
from miniverl.algorithms.value import clipped_value_loss
from miniverl.losses import numerics, reduction

LIBRARY = "miniVERL"
VERSION = installed_version("miniverl", os.environ.get("CONFORMANCE_MINIVERL"))
DOCUMENTED = {
    "kl/k3-*": "reference_kl_penalty: verl's estimator",
}
NOT_CALLABLE = {
    "full_kl": "distillation alone",
    "token_rewards": "inside its trainer",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "credit per token",
    "double_sided": "not among its losses",
    "cispo": "not among its losses",
    "gspo": "not among its losses",
    "adaptive_kl": "no such option",
    "importance_weights": "no such option",
    "weighted_loss": "no such option",
    "overlong": "no such option",
    "eos_penalty": "no such option",
    "response_mask": "inside its sampler",
    "running_moments": "no such option",
}


def logprobs(logits, tokens, mask, temperature):
    z, ids = tensors(logits, tokens)
    return numerics.log_softmax_f32(z, temperature).gather(-1, ids[..., None])[..., 0]


def entropy(logits, mask, temperature):
    logp = numerics.log_softmax_f32(tensors(logits), temperature)
    return {"entropy": numerics.entropy_from_log_probs(logp)}


def kl(logp, ref, mask, estimator):
    penalty = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(estimator, estimator)
    return reference_kl_penalty(*tensors(logp, ref), penalty=penalty)


def gae(rewards, values, mask, gamma, lam, last_values):
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    r, v, m = tensors(rewards, values, mask.astype(rewards.dtype))
    returns = estimators.gae_advantage_return(r, v, m, gamma=gamma, lam=lam).returns
    return {"advantages": returns - v, "returns": returns}  # before it whitens the advantages


def discounted_returns(rewards, mask, gamma):
    r, m = tensors(rewards, mask.astype(rewards.dtype))
    return estimators.reinforce_plus_plus_advantage(r, m, gamma=gamma).returns


def whiten(x, mask, rank, center):
    """One process."""
    if not center or len(set(rank.tolist())) > 1:
        raise NotOffered("advantages of one process, centered")
    return estimators._masked_whiten(*tensors(x, mask))


def _outcome(function, scores, group, valid, **options):
    if not valid.all() or min(np.unique(group, return_counts=True)[1]) < 2:
        raise NotOffered("complete groups of at least two responses")
    rewards = tensors(scores[:, None])
    names = [f"g{g}" for g in group]
    return function(rewards, torch.ones_like(rewards), names, **options).sequence_advantages


def leave_one_out(scores, group, valid):
    return _outcome(estimators.rloo_outcome_advantage, scores, group, valid)


def group_normalize(scores, group, valid, scale):
    if scale == "batch":
        raise NotOffered("deviation of the group or none")
    function = estimators.grpo_outcome_advantage
    return _outcome(function, scores, group, valid, normalize_by_std=scale == "group")


def _policy(logp, old, advantages, mask, **options):
    o, a, m = tensors(old, advantages, mask.astype(old.dtype))
    return with_gradient(
        lambda x: (
            clipped_policy_loss(
                current_log_probs=x, old_log_probs=o, advantages=a, response_mask=m, **options
            ).loss
        ),
        logp,
    )


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    """Its dual clip (c = 3 by default) is set out of reach."""
    options = {"clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "clip_ratio_c": 1e9}
    return _policy(logp, old, advantages, mask, **options)


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    options = {"clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "clip_ratio_c": ceiling}
    return _policy(logp, old, advantages, mask, **options)


def value_loss(values, old, returns, mask, clip):
    o, g, m = tensors(old, returns, mask.astype(old.dtype))
    return with_gradient(
        lambda v: clipped_value_loss(v, o, g, m, cliprange_value=clip).loss, values
    )


def aggregate(losses, mask, microbatch, mode, max_length):
    """Weights and denominator of the whole batch, computed before the cut."""
    modes = {
        "token_mean": "token-mean",
        "sequence_mean": "seq-mean-token-mean",
        "constant": "seq-mean-token-sum-norm",
    }
    x, m = tensors(losses, mask.astype(losses.dtype))
    weights, denominator = reduction.rl_reduction_weights(
        list(m), modes[mode], response_length=max_length
    )
    return sum(
        reduction.weighted_mean(row, w, denominator=denominator)
        for row, w in zip(x, weights, strict=True)
    )
