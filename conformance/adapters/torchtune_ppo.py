"""torchtune's PPO recipe; CONFORMANCE_TORCHTUNE may name its folder.

The recipe masks padding with fill values before it calls these functions: log-probabilities are 1
and values 0 there.  The adapter does the same.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import definitions, installed_version, tensors, with_gradient

FOLDER = os.environ.get("CONFORMANCE_TORCHTUNE")
LIBRARY = "torchtune"
VERSION = installed_version("torchtune", FOLDER)
_found = FOLDER or find_spec("torchtune").submodule_search_locations[0]
ROOT = Path(FOLDER, "torchtune") if FOLDER else Path(_found)
_names = ("masked_mean", "masked_var", "whiten", "estimate_advantages", "get_rewards_ppo")
_names += ("get_reward_penalty_mask",)
_functions = definitions(ROOT / "rlhf" / "rewards.py", *_names, torch=torch)
rlhf = SimpleNamespace(**dict(zip(_names, _functions, strict=True)))
truncate, logits_to_logprobs = definitions(
    ROOT / "rlhf" / "sequence_processing.py",
    *("truncate_sequence_at_first_stop_token", "logits_to_logprobs"),
    torch=torch,
    F=torch.nn.functional,
)
PPOLoss = definitions(
    ROOT / "rlhf" / "loss" / "ppo.py", "PPOLoss", torch=torch, nn=torch.nn, rlhf=rlhf
)
DOCUMENTED = {
    "token_rewards/*": "a comment of the recipe (6.1): the value after the last token counts",
}
NOT_CALLABLE = {
    "entropy": "no such option",
    "full_kl": "no such option",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "credit per token",
    "adaptive_kl": "no such option",
    "running_moments": "no such option",
    **dict.fromkeys(
        ("leave_one_out", "group_normalize", "dual_clip", "double_sided", "cispo", "gspo"),
        "not in PPO",
    ),
    **dict.fromkeys(
        ("importance_weights", "weighted_loss", "overlong", "discounted_returns"), "not in PPO"
    ),
}
NOTES = {
    "whiten": "called as `estimate_advantages` calls it: shift_mean=True (default) adds the mean "
    "back, as its own tests say; shift_mean=False would remove it",
}


def _last(mask):
    """Index of the last token; the recipe's responses are padded on the right, without holes."""
    right = np.arange(mask.shape[1])[None] < mask.sum(1)[:, None]
    if not (right == mask).all() or not mask.any(1).all():
        raise NotOffered("responses are padded on the right, without holes, and not empty")
    return torch.from_numpy(mask.sum(1) - 1)


def logprobs(logits, tokens, mask, temperature):
    return logits_to_logprobs(*tensors(logits, tokens), temperature)


def kl(logp, ref, mask, estimator):
    if estimator != "k1":
        raise NotOffered("k1")
    p, q = tensors(logp, ref)
    return rlhf.get_rewards_ppo(torch.zeros(len(p)), p, q, 1.0)[1]


def token_rewards(scores, logp, ref, mask, kl_coef):
    """The recipe puts the score one slot after the last token, if there is room."""
    last, (s, p, q, m) = _last(mask), tensors(scores, logp, ref, mask)
    place = torch.where((last > 0) & (last < mask.shape[1] - 1), last + 1, last)
    p, q = p.masked_fill(~m, 1.0), q.masked_fill(~m, 1.0)
    return rlhf.get_rewards_ppo(s, p, q, kl_coef, place)[0]


def gae(rewards, values, mask, gamma, lam, last_values):
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    _last(mask)
    r, v, m = tensors(rewards, values, mask)
    v = v.masked_fill(~m, 0.0)
    returns = rlhf.estimate_advantages(v, r, gamma, lam, m)[1]
    return {"advantages": returns - v, "returns": returns}


def whiten(x, mask, rank, center):
    """The advantages of ``estimate_advantages`` where gamma and V are 0."""
    if not center or rank.any():
        raise NotOffered("advantages of one process")
    r, m = tensors(x, mask)
    return rlhf.estimate_advantages(0 * r, r, 0.0, 0.0, m)[0]


def _loss(logp, old, a, m, v, old_values, returns, **options):
    loss = PPOLoss(**options)
    return loss(old, logp, a, old_values, v, returns, padding_masks=m, value_padding_masks=m)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    if clip_low != clip_high:
        raise NotOffered("one epsilon")
    o, a, m = tensors(old, advantages, mask)
    zero, p = 0 * o, o.masked_fill(~m, 1.0)
    return with_gradient(
        lambda x: _loss(x.masked_fill(~m, 1.0), p, a, m, zero, zero, zero, epsilon=clip_low), logp
    )


def value_loss(values, old, returns, mask, clip):
    o, g, m = tensors(old, returns, mask)
    zero = 0 * o
    options = {"value_clip_range": clip, "value_coeff": 1.0}
    return with_gradient(lambda v: _loss(zero, zero, zero, m, v, o, g, **options), values)


def aggregate(losses, mask, microbatch, mode, max_length):
    """``ppo_step`` divides the mean over a micro-batch by the number of micro-batches."""
    if mode != "token_mean" or len(set(np.bincount(microbatch).tolist())) > 1:
        raise NotOffered("mean over tokens; micro-batches have equally many rows")
    parts = [microbatch == k for k in sorted({int(k) for k in microbatch})]
    zero = 0 * losses
    return sum(
        ppo_clip(zero[k], zero[k], -losses[k], mask[k], 0.2, 0.2)["loss"] for k in parts
    ) / len(parts)


def eos_penalty(scores, ended, penalty, how):
    """A response without padding counts as one without an end token; the score is replaced."""
    if how == "subtract":
        raise NotOffered("the penalty replaces the score")
    s, e = tensors(scores, ended)
    s[rlhf.get_reward_penalty_mask(e[:, None], torch.ones(len(s)))] = penalty
    return s


def response_mask(tokens, eos):
    return ~truncate(tensors(tokens), torch.tensor([eos]))[0]
