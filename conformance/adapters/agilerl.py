"""AgileRL: PPO and GRPO for language models; CONFORMANCE_AGILERL may name its folder.

Values outside the mask are 0 for turn_gae and value_loss, as ``learn`` makes them; all else is
handed over as it is.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
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
NOTES = {
    "gae": 'advantage_granularity="token"; "auto" (default) uses "turn" for many turns',
    "token_rewards": "at turn level the mean over the turn gives the reward back",
    "group_normalize": "two groups in a batch; where a batch has one, 0.3 eight times gives 0.71",
    "cispo": "the path without the fused kernel, normalized over the accumulation window",
}
NOT_CALLABLE = {
    "full_kl": "no such option",
    "logprobs": "fused with the head",
    "entropy": "fused with the head",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "discounted_returns": "no such option",
    "leave_one_out": "its REINFORCE normalizes returns over the batch (ReBN), without a baseline",
    "dual_clip": "no such option",
    "double_sided": "no such option",
    "weighted_loss": "inside its losses",
    "importance_weights": "inside its losses",
    "adaptive_kl": "no such option",
    "overlong": "user code",
    "eos_penalty": "user code",
    "response_mask": "needs its generation config",
    "running_moments": "no such option",
}
_names = ("masked_mean", "masked_var", "masked_whiten", "pool_by_turns", "pool_log_ratio_by_level")
_names += ("clipped_min_surrogate", "clipped_is_surrogate", "calculate_k3_kl", "fill_outside_mask")
_names += ("k3_kl_penalty_reference",)
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
_group, *_cispo = definitions(
    root / "algorithms" / "grpo.py",
    "_calculate_advantage",
    *("_compute_policy_loss", "_log_importance_weights", "_clipped_units", "_reduce_masked_loss"),
    "_token_loss_weights",
    owner="GRPO",
    torch=torch,
    **vars(utils),
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


def cispo(logp, old, advantages, mask, top):
    """GRPO with loss_type="cispo", without its fused kernel."""
    self = SimpleNamespace(
        clip_coef_max=top,
        beta=0.0,
        kl_clamp=None,
        use_kl_advantage_shaping=False,
        use_bias_correction_kl=False,
        _masks_off_policy_tokens=False,
        _resolve_loss_window=lambda: (1, float(mask.sum())),
    )
    for function in _cispo[1:]:
        setattr(self, function.__name__, functools.partial(function, self))
    o, a, m = tensors(old, advantages, mask)
    return with_gradient(lambda x: _cispo[0](self, m, x, o, o, a, None, "token", "cispo")[0], logp)


def aggregate(losses, mask, microbatch, mode, max_length):
    """PPO's loss of a micro-batch; the backward pass divides by their number."""
    if mode != "token_mean" or len(set(np.bincount(microbatch).tolist())) > 1:
        raise NotOffered("mean over tokens; micro-batches have equally many rows")
    parts = [microbatch == k for k in sorted({int(k) for k in microbatch})]
    zero = 0 * losses
    out = [_surrogate(zero[k], zero[k], -losses[k], mask[k], "token", 0.2)["loss"] for k in parts]
    return sum(out) / len(parts)


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
