"""rlhf-book, code/policy_gradients; CONFORMANCE_RLHF_BOOK names the folder that holds it.

Inputs are handed over as they are.  Its losses are means over responses, so a mean over tokens is
made of its losses of single responses.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import definitions, neighbors, tensors, with_gradient
from torch import nn

if "CONFORMANCE_RLHF_BOOK" not in os.environ:
    raise ImportError("set CONFORMANCE_RLHF_BOOK to the folder that holds policy_gradients/")
ROOT = Path(os.environ["CONFORMANCE_RLHF_BOOK"]) / "policy_gradients"
LIBRARY = "rlhf-book"
VERSION = os.environ.get("CONFORMANCE_RLHF_BOOK_VERSION", "source")
NOTES = {
    "kl": "kl1 and kl3 are Schulman's estimators with policy and reference exchanged; kl3 is the "
    "default",
}
NOT_CALLABLE = {
    "logprobs": "reads a model",
    "entropy": "no such option",
    "full_kl": "no such option",
    "token_rewards": "the mean KL of a response is taken off its score",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "one turn",
    "discounted_returns": "no such option",
    "whiten": "advantages are not whitened in PPO",
    "dual_clip": "no such option",
    "double_sided": "no such option",
    "importance_weights": "no such option",
    "weighted_loss": "no such option",
    "adaptive_kl": "no such option",
    "eos_penalty": "no such option",
    "response_mask": "inside its rollout",
    "running_moments": "no such option",
    "overlong": "a function inside a function",
}
_names = ("approx_kl3", "approx_kl2", "approx_kl1", "get_approx_kl", "masked_mean", "GSPOLoss")
_names += ("CISPOLoss", "PPOLoss", "DAPOLoss", "GRPOLoss")
losses_of = SimpleNamespace(
    **dict(zip(_names, definitions(ROOT / "loss.py", *_names, torch=torch, nn=nn), strict=True))
)
_names = ("compute_standardized_advantages", "compute_nonstandardized_advantages")
_names += ("compute_loo_advantages", "compute_gae")
utils = SimpleNamespace(
    **dict(zip(_names, definitions(ROOT / "utils.py", *_names, torch=torch), strict=True))
)


def kl(logp, ref, mask, estimator):
    if estimator == "abs":
        raise NotOffered("kl1, kl2 and kl3")
    return losses_of.get_approx_kl(f"kl{estimator[1]}", *tensors(logp, ref, mask))


def gae(rewards, values, mask, gamma, lam, last_values):
    """It takes one reward per response, for the last token."""
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    scores = rewards[range(len(mask)), last]
    if last_values.any() or (abs(rewards).sum(1) != abs(scores)).any():
        raise NotOffered("one reward per response, which has ended")
    s, m, v = tensors(scores[:, None], mask, values)
    a = utils.compute_gae(s, m, v, gamma, lam)
    return {"advantages": a}


def _grouped(function, scores, group, valid):
    n = neighbors(group, valid)
    return torch.cat([function(part[:, None])[:, 0] for part in tensors(scores).split(n)])


def leave_one_out(scores, group, valid):
    return _grouped(utils.compute_loo_advantages, scores, group, valid)


def group_normalize(scores, group, valid, scale):
    if scale == "batch":
        raise NotOffered("deviation of the group or none")
    functions = {
        "group": utils.compute_standardized_advantages,
        "none": utils.compute_nonstandardized_advantages,
    }
    return _grouped(functions[scale], scores, group, valid)


def aggregate(losses, mask, microbatch, mode, max_length):
    """The loss of a token is -A with ratio 1; train.py divides by the number of micro-batches."""
    kinds = {"token_mean": losses_of.DAPOLoss, "sequence_mean": losses_of.GRPOLoss}
    if mode not in kinds or len(set(np.bincount(microbatch).tolist())) > 1:
        raise NotOffered("token and sequence means; micro-batches have equally many rows")
    loss = kinds[mode](0.2, 0.2, beta=0.0, kl_estimator="kl3")
    parts = [microbatch == k for k in sorted({int(k) for k in microbatch})]
    zero = 0 * losses
    out = [_step(loss, zero[k], zero[k], -losses[k], mask[k])["loss"] for k in parts]
    return sum(out) / len(parts)


def _step(loss, logp, old, advantages, mask):
    o, a, m = tensors(old, advantages, mask)
    batch = SimpleNamespace(log_probs_old=o, advantages=a, action_mask=m)
    return with_gradient(lambda x: loss(x, batch), logp)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    """DAPO's loss, which has the mean over tokens."""
    return _step(losses_of.DAPOLoss(clip_low, clip_high), logp, old, advantages, mask)


def cispo(logp, old, advantages, mask, top):
    """Its lower bound is set to 0; its mean is over responses, so these are given one by one."""
    loss = losses_of.CISPOLoss(1.0, top - 1, 0.0, "kl3")
    parts = [
        _step(loss, logp[b : b + 1], old[b : b + 1], advantages[b : b + 1], mask[b : b + 1])
        for b in range(len(mask))
    ]
    shares = mask.sum(1) / mask.sum()
    total = sum(part["loss"] * float(w) for part, w in zip(parts, shares, strict=True))
    return {
        "loss": total,
        "gradient": torch.cat(
            [p["gradient"] * float(w) for p, w in zip(parts, shares, strict=True)]
        ),
    }


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    return _step(
        losses_of.GSPOLoss(clip_low, clip_high, 0.0, "kl3"), logp, old, advantages[:, None], mask
    )


def value_loss(values, old, returns, mask, clip):
    """PPO's loss with advantages G - V_old and a ratio of 1; its mean is over responses."""
    o, g, m = tensors(old, returns, mask)
    loss = losses_of.PPOLoss(0.2, 0.2, clip, 1.0)
    zero = 0 * o

    def one(v, b):
        batch = SimpleNamespace(
            values_old=o[b], advantages=(g - o)[b], log_probs_old=zero[b], action_mask=m[b]
        )
        policy = -((g - o)[b] * m[b]).sum() / m[b].sum()
        return loss(zero[b], batch, v[b]) - policy

    def total(v):
        rows = [slice(b, b + 1) for b in range(len(m))]
        return sum(one(v, b) * m[b].sum() for b in rows) / m.sum()

    return with_gradient(total, values)
