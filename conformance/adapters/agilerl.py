"""AgileRL: PPO and GRPO for language models; CONFORMANCE_AGILERL may name its folder."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import (
    definitions,
    installed_version,
    neighbors,
    tensors,
    with_gradient,
)

FOLDER = os.environ.get("CONFORMANCE_AGILERL")
LIBRARY = "AgileRL"
VERSION = installed_version("agilerl", FOLDER)
root = (
    Path(FOLDER, "agilerl") if FOLDER else Path(find_spec("agilerl").submodule_search_locations[0])
)
DOCUMENTED = {
    "token_rewards/*": "_compute_token_rewards: each action token gets its turn's reward",
    "turn_gae/*": "turn_value_reduction: the last token of a turn, or the mean",
}
NOT_CALLABLE = {
    "full_kl": "no such option",
    "logprobs": "fused with the head",
    "entropy": "fused with the head",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "discounted_returns": "no such option",
    "leave_one_out": "inside its REINFORCE, not looked at",
    "dual_clip": "no such option",
    "double_sided": "no such option",
    "cispo": "fused with the head, not looked at",
    "aggregate": "a mean per micro-batch, not looked at",
    "weighted_loss": "inside its losses",
    "importance_weights": "inside its losses",
    "adaptive_kl": "no such option",
    "overlong": "user code",
    "eos_penalty": "user code",
    "response_mask": "needs its generation config",
    "running_moments": "no such option",
}
_names = ("masked_mean", "masked_var", "masked_whiten", "pool_by_turns", "pool_log_ratio_by_level")
_names += ("clipped_min_surrogate", "clipped_is_surrogate", "calculate_k3_kl")
utils = SimpleNamespace(
    **dict(
        zip(_names, definitions(root / "utils" / "llm_utils.py", *_names, torch=torch), strict=True)
    )
)
_turn, _token, _value, _rewards = definitions(
    root / "algorithms" / "ppo_llm.py",
    *("_compute_gae_returns", "_compute_gae_returns_token", "_compute_vf_loss_token"),
    "_compute_token_rewards",
    owner="PPO",
    torch=torch,
    **{n: getattr(utils, n) for n in ("masked_mean", "masked_whiten", "pool_by_turns")},
)
_group = definitions(
    root / "algorithms" / "grpo.py", "_calculate_advantage", owner="GRPO", torch=torch
)


def kl(logp, ref, mask, estimator):
    if estimator != "k3":
        raise NotOffered("k3")
    p, q = tensors(logp, ref)
    return utils.calculate_k3_kl(q, p)


def token_rewards(scores, logp, ref, mask, kl_coef):
    """Episodes of one turn; its KL is in the loss."""
    if kl_coef:
        raise NotOffered("no KL in the reward")
    s, m = tensors(scores, mask)
    return _rewards(None, m, s[:, None], torch.where(m, 0, -1))


def gae(rewards, values, mask, gamma, lam, last_values):
    """advantage_granularity="token"."""
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    self = SimpleNamespace(gamma=gamma, whiten_advantages=False)
    returns, advantages = _token(self, *tensors(rewards, values, mask), lam)
    return {"advantages": advantages, "returns": returns}


def turn_gae(rewards, values, turns, mask, gamma, lam):
    """turn_value_reduction is "final_value", the default: V of a turn is that of its last token."""
    r, v, ids, m = tensors(rewards, values, turns, mask)
    count = int(ids.max()) + 1
    summed = utils.pool_by_turns(r, ids, count, reduction="sum")
    per_token = summed.gather(1, ids.clamp(min=0)) * m  # as _compute_token_rewards
    self = SimpleNamespace(gamma=gamma, whiten_advantages=False, turn_value_reduction="final_value")
    return _turn(self, per_token, v.masked_fill(~m, 0.0), m, ids, lam)[1]


def whiten(x, mask, rank, center):
    """Every process whitens its own rows."""
    out = torch.zeros(x.shape)
    for r in {int(r) for r in rank}:
        rows = torch.from_numpy(rank == r)
        out[rows] = utils.masked_whiten(tensors(x)[rows], tensors(mask)[rows], center)
    return out


def group_normalize(scores, group, valid, scale):
    if scale == "batch":
        raise NotOffered("deviation of the group or none")
    self = SimpleNamespace(
        group_size=neighbors(group, valid), adv_norm={"none": "mean_only"}.get(scale)
    )
    return _group(self, tensors(scores))[:, 0]


def _surrogate(logp, old, advantages, mask, level, clip):
    o, a, m = tensors(old, advantages, mask)
    return with_gradient(lambda x: utils.clipped_is_surrogate(x - o, a, m, None, level, clip), logp)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    if clip_low != clip_high:
        raise NotOffered("one clip_coef")
    return _surrogate(logp, old, advantages, mask, "token", clip_low)


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    """importance_sampling_level="trajectory", with its two bounds."""
    o, a, m = tensors(old, advantages, mask)

    def loss(x):
        weights, unit = utils.pool_log_ratio_by_level(x - o, m, None, "trajectory")
        return utils.clipped_min_surrogate(weights, a[:, None], unit, 1 - clip_low, 1 + clip_high)

    return with_gradient(loss, logp)


def value_loss(values, old, returns, mask, clip):
    o, g, m = tensors(old, returns, mask)
    self = SimpleNamespace(clip_coef=clip, vf_coef=1.0)
    return with_gradient(lambda v: _value(self, v.masked_fill(~m, 0.0), o, g, m), values)
