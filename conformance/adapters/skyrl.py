"""SkyRL: ppo_utils.py of its training backend; CONFORMANCE_SKYRL names its source folder.

Rows move to the right edge for gae and discounted_returns (``_aligned``); all else is handed over
as it is.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import definitions, stub, tensors, with_gradient

if "CONFORMANCE_SKYRL" not in os.environ:
    raise ImportError("set CONFORMANCE_SKYRL to the folder that holds skyrl/")
stub("loguru")
ROOT = Path(os.environ["CONFORMANCE_SKYRL"]) / "skyrl" / "backends" / "skyrl_train" / "utils"
LIBRARY = "SkyRL"
VERSION = os.environ.get("CONFORMANCE_SKYRL_VERSION", "source")
DOCUMENTED = {
    "kl/k3-*": "a comment of compute_approx_kl: for numerical stability",
}
NOTES = {
    "gae": "at gamma = lambda = 1, its defaults, it agrees (case turns-gamma_1)",
    "discounted_returns": "at gamma = 1, its default, it agrees",
}
NOT_CALLABLE = {
    "full_kl": "no such option",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "credit per token",
    "double_sided": "its rollout_is loss, another formula",
    "token_rewards": "its generator gives a reward per token; the trainer only takes the KL off",
    "overlong": "user code",
    "eos_penalty": "user code",
    "response_mask": "the engine's ids end with the end token",
    "running_moments": "no such option",
    "entropy": "inside its model wrapper",
    "logprobs": "inside its model wrapper",
}
masked_mean, safe_exp_delta = definitions(
    ROOT / "torch_utils.py", "masked_mean", "safe_exp_delta", torch=torch
)
_names = (
    *(
        "AdaptiveKLController",
        "compute_approx_kl",
        "masked_var",
        "masked_whiten",
        "ppo_critic_loss",
    ),
    *("ppo_policy_loss", "gspo_policy_loss", "compute_policy_loss_cispo", "reduce_loss"),
    *("apply_loss_reduction_to_advantages_minibatch", "compute_gae_advantage_return"),
    *("compute_reinforce_plus_plus_outcome_advantage", "compute_rloo_outcome_advantage"),
    "compute_grpo_outcome_advantage",
)
ppo_utils = SimpleNamespace(
    **dict(
        zip(
            _names,
            definitions(
                ROOT / "ppo_utils.py",
                *_names,
                torch=torch,
                np=np,
                defaultdict=defaultdict,
                masked_mean=masked_mean,
                safe_exp_delta=safe_exp_delta,
                apply_off_policy_correction=lambda loss, old, rollout, mask, config: (
                    loss,
                    mask,
                    {},
                ),
            ),
            strict=True,
        )
    )
)

_names = ("off_policy_correction_enabled", "compute_tis_ratio", "compute_token_mask")
_correction = definitions(
    ROOT / "off_policy_correction_utils.py",
    *_names,
    "compute_off_policy_correction",
    "apply_off_policy_correction",
    torch=torch,
    masked_mean=masked_mean,
    safe_exp_delta=safe_exp_delta,
)[-1]


def kl(logp, ref, mask, estimator):
    return ppo_utils.compute_approx_kl(*tensors(logp, ref), kl_estimator_type=estimator)


def _aligned(attention_mask, *arrays):
    """Its batches: responses end in the last column; tool output is inside of response_mask.

    Moves every row to the right by its padding and fills the padding on the left with 0.  Returns
    the mask, the arrays, and a function that moves a result back.
    """
    width = attention_mask.shape[1]
    shifts = attention_mask[:, ::-1].argmax(1)
    places = (np.arange(width)[None] - shifts[:, None]) % width
    inside = np.arange(width)[None] >= (width - attention_mask.sum(1))[:, None]
    moved = [np.take_along_axis(x, places, 1) for x in arrays]
    moved = [np.where(inside, x, 0).astype(x.dtype) for x in moved]
    back = (np.arange(width)[None] + shifts[:, None]) % width
    return tensors(inside), tensors(*moved), lambda x: x.gather(1, torch.from_numpy(back))


def gae(rewards, values, mask, gamma, lam, last_values, attention_mask):
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    m, (r, v), back = _aligned(attention_mask, rewards, values)
    returns = ppo_utils.compute_gae_advantage_return(r, v, m.to(r.dtype), gamma, lam)[1]
    return {"advantages": back(returns - v), "returns": back(returns)}  # before it whitens


def discounted_returns(rewards, mask, gamma, attention_mask):
    m, r, back = _aligned(attention_mask, rewards)
    function = ppo_utils.compute_reinforce_plus_plus_outcome_advantage
    return back(function(r, m.to(r.dtype), gamma)[1])


def whiten(x, mask, rank, center):
    """The driver holds the batch of all ranks."""
    return ppo_utils.masked_whiten(*tensors(x, mask), shift_mean=center)


def _outcome(function, scores, group, valid, **options):
    if not valid.all():
        raise NotOffered("responses are not dropped one by one")
    rewards = tensors(scores[:, None])
    return function(rewards, torch.ones_like(rewards), np.asarray(group), **options)[0][:, 0]


def leave_one_out(scores, group, valid):
    return _outcome(ppo_utils.compute_rloo_outcome_advantage, scores, group, valid)


def group_normalize(scores, group, valid, scale):
    if scale == "batch":
        raise NotOffered("deviation of the group or none")
    function = ppo_utils.compute_grpo_outcome_advantage
    return _outcome(function, scores, group, valid, grpo_norm_by_std=scale == "group")


_REDUCTIONS = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "constant": "seq_mean_token_sum_norm",
}


def _scaled(advantages, mask, mode, max_length=1):
    """The trainer divides advantages by what the loss is to be divided by."""
    scale = ppo_utils.apply_loss_reduction_to_advantages_minibatch
    return scale(advantages, mask, _REDUCTIONS[mode], len(mask), max_length)


def _step(function, logp, old, advantages, mask, mode="token_mean", **config):
    o, a, m = tensors(old, advantages, mask)
    options = SimpleNamespace(
        **{
            "policy_loss_type": "regular",
            "loss_reduction": mode,
            "off_policy_correction": None,
            **config,
        }
    )
    scaled = _scaled(a, m.to(a.dtype), mode)
    return with_gradient(lambda x: function(x, o, scaled, options, m.to(x.dtype)), logp)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    config = {"eps_clip_low": clip_low, "eps_clip_high": clip_high}
    return _step(ppo_utils.ppo_policy_loss, logp, old, advantages, mask, **config)


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    config = {"eps_clip_low": clip_low, "eps_clip_high": clip_high, "clip_ratio_c": ceiling}
    function = ppo_utils.ppo_policy_loss
    return _step(function, logp, old, advantages, mask, policy_loss_type="dual_clip", **config)


def cispo(logp, old, advantages, mask, top):
    """Its lower bound is set to 0."""
    options = {"cispo_anchor": "old", "cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": top - 1}
    function = ppo_utils.compute_policy_loss_cispo
    return _step(function, logp, old, advantages, mask, cispo=SimpleNamespace(**options))


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    rows = advantages[:, None] + 0 * logp
    config = {"eps_clip_low": clip_low, "eps_clip_high": clip_high}
    return _step(ppo_utils.gspo_policy_loss, logp, old, rows, mask, "sequence_mean", **config)


def value_loss(values, old, returns, mask, clip):
    o, g, m = tensors(old, returns, mask)
    config = SimpleNamespace(value_clip=clip)
    return with_gradient(
        lambda v: ppo_utils.ppo_critic_loss(v, o, g, config, m.to(v.dtype)), values
    )


def aggregate(losses, mask, microbatch, mode, max_length):
    """The loss of a token is minus its scaled advantage; micro-batches are summed."""
    x, m = tensors(losses, mask)
    scaled = _scaled(-x, m.to(x.dtype), mode, max_length)
    parts = [torch.from_numpy(microbatch == k) for k in sorted({int(k) for k in microbatch})]
    return sum(ppo_utils.reduce_loss(-scaled[rows], m[rows]) for rows in parts)


def _corrected(losses, old, sampler, mask, kind, level, low, high):
    """Losses times weights, and the mask that is left.

    "mask" is its token mask with its truncation set out of reach.
    """
    if level == "geometric" or (kind == "truncate" and low > 0):
        raise NotOffered("truncation has no lower bound, and no geometric mean has a weight")
    cap = high if kind == "truncate" else 1e9
    config = SimpleNamespace(
        tis_ratio_type=level,
        token_tis_ratio_clip_high=cap,
        sequence_tis_ratio_clip_high=cap,
        sequence_mask_metric=None,
        outlier_token_is_threshold_low=None,
        outlier_token_is_threshold_high=None,
        token_mask_is_threshold_low=low if kind == "mask" else None,
        token_mask_is_threshold_high=high if kind == "mask" else None,
    )
    o, s, m = tensors(old, sampler, mask.astype(old.dtype))
    return _correction(losses, o, s, m, config)[:2]


def importance_weights(old, sampler, mask, kind, level, low, high):
    if kind == "mask" and level != "token":
        raise NotOffered("sequences are kept or dropped; only tokens have a mask with weights")
    ones = torch.ones_like(tensors(old))
    weights, left = _corrected(ones, old, sampler, mask, kind, level, low, high)
    return weights * left


def weighted_loss(losses, old, sampler, mask, kind, low, high):
    """Divided, before the correction, by the tokens of the mask."""
    x, m = tensors(losses, mask.astype(losses.dtype))
    scaled = -_scaled(-x, m, "token_mean")
    each, left = _corrected(scaled, old, sampler, mask, kind, "token", low, high)
    return ppo_utils.reduce_loss(each, left)


def adaptive_kl(start, target, horizon, kl, steps):
    control, out = ppo_utils.AdaptiveKLController(start, target, horizon), []
    for now, n in zip(kl, steps, strict=True):
        control.update(now, n)
        out.append(control.value)
    return out
