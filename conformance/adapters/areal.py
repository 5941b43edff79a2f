"""AReaL: losses and advantages; CONFORMANCE_AREAL names its source folder.

A prompt token and a column of padding are added to the rows for ``_compute_advantages``; all else
is handed over as it is.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ppo_conformance import NotOffered
from ppo_conformance.adapting import definitions, neighbors, tensors, with_gradient

if "CONFORMANCE_AREAL" not in os.environ:
    raise ImportError("set CONFORMANCE_AREAL to the folder that holds areal/")
ROOT = Path(os.environ["CONFORMANCE_AREAL"]) / "areal"
LIBRARY = "AReaL"
VERSION = os.environ.get("CONFORMANCE_AREAL_VERSION", "source")
DOCUMENTED = {
    "kl/*-far_apart": "apply_clamp of KLEstimator, True by default",
    "gspo/*": "_compute_sequence_level_ratio_and_advantages: summed over tokens",
}
NOTES = {
    "kl": "every kind is bounded; the configuration has no switch",
    "token_rewards": "an episode that ends with tool output has its score on a token of the tool",
    "gspo": "with responses of equal length it agrees",
    "overlong": "only where the turns of an episode are longer than max_new_tokens together",
}
NOT_CALLABLE = {
    "full_kl": "no such option",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "not in this version",
    "double_sided": "not among its losses",
    "cispo": "not among its losses",
    "adaptive_kl": "no such option",
    "eos_penalty": "no such option",
    "response_mask": "the engine's ids end with the end token",
    "running_moments": "no such option",
    "discounted_returns": "GAE with values 0",
    "entropy": "inside a compiled, vocabulary-parallel function",
}
_functional = ROOT / "utils" / "functional" / "functional.py"
_names = (
    *("masked_normalization", "_compute_sequence_level_ratio_and_advantages", "_check_bounds"),
    *("RejectionSamplingResult", "apply_rejection_sampling", "ppo_actor_loss_fn", "_huber_loss"),
    *("_mse_loss", "ppo_critic_loss_fn", "reward_overlong_penalty"),
)
_found = dict(
    zip(
        _names,
        definitions(
            _functional,
            *_names,
            torch=torch,
            np=np,
            dist=dist,
            functools=functools,
            dataclass=dataclass,
            Any=Any,
        ),
        strict=True,
    )
)
Estimator, Normalization = definitions(
    ROOT / "utils" / "data.py", "KLEstimator", "Normalization", torch=torch, dist=dist, np=np
)
_advantages = definitions(
    ROOT / "trainer" / "ppo" / "actor.py",
    "_compute_advantages",
    owner="PPOActor",
    torch=torch,
    Any=Any,
)


def logprobs(logits, tokens, mask, temperature):
    function = definitions(
        ROOT / "utils" / "functional" / "vocab_parallel.py", "_gather_logprobs", torch=torch
    )
    return function(*tensors(logits, tokens), temperature)


def kl(logp, ref, mask, estimator):
    """As ``PPOActor`` builds it, with the bound of 10."""
    if estimator == "abs":
        raise NotOffered("k1, k2 and k3")
    return Estimator(estimator)(*tensors(logp, ref))


def _batch(rewards, values, logp, ref, mask, attention_mask, scores, gamma, lam, kl_coef):
    """``PPOActor._compute_advantages`` on rows of one prompt token and the response.

    Column 0 is the prompt: values, log-probabilities and masks move by one, as in its batches.  A
    column of padding is added, so that no row counts as cut off; tool output at the end of a row
    stays in it.
    """
    m, v, p, q, s = tensors(mask, values, logp, ref, scores)
    rows, width = m.shape
    if not attention_mask[:, 0].all():
        raise NotOffered("padding on the right")
    ends = tensors(attention_mask).sum(1) + 1  # tokens of prompt and response
    column = torch.zeros(rows, 1, dtype=v.dtype)
    extra = torch.zeros(rows, 1, dtype=v.dtype)

    def shifted(x):
        return torch.cat([column, x, extra], 1)

    attention = torch.arange(width + 2)[None] < ends[:, None]
    self = SimpleNamespace(
        config=SimpleNamespace(
            overlong_reward_penalty=False, use_decoupled_loss=False, recompute_logprob=False
        ),
        reward_bias=0.0,
        reward_scaling=1.0,
        reward_clip=1e9,
        reward_norm=None,
        kl_ctl=kl_coef,
        kl_estimator=(lambda old, base: -tensors(rewards_after(rewards, width)))
        if rewards is not None
        else Estimator("k1"),
        mask_no_eos_with_zero=False,
        discount=gamma,
        gae_lambda=lam,
        adv_norm=None,
    )
    data = {
        "input_ids": torch.zeros(rows, width + 2, dtype=torch.long),
        "rewards": s,
        "loss_mask": shifted(m.to(v.dtype)),
        "logprobs": shifted(p),
        "ref_logp": torch.cat([q, extra, extra], 1),
        "attention_mask": attention,
        "values": torch.cat([v, extra, extra], 1),
    }
    return _advantages(self, data), width


def rewards_after(rewards, width):
    return np.concatenate([rewards, np.zeros((len(rewards), 2), rewards.dtype)], 1)


def token_rewards(scores, logp, ref, mask, kl_coef, attention_mask):
    if not mask.any(1).all():
        raise NotOffered("no empty responses")
    masks = mask, attention_mask
    out, width = _batch(None, 0 * logp, logp, ref, *masks, scores, 1.0, 1.0, kl_coef)
    return out["tot_rewards"][:, :width]


def gae(rewards, values, mask, gamma, lam, last_values, attention_mask):
    if last_values.any():
        raise NotOffered("bootstraps rows as wide as the batch, from the value of their last token")
    zero = 0 * rewards
    masks = mask, attention_mask
    out, width = _batch(rewards, values, zero, zero, *masks, zero[:, 0], gamma, lam, 1.0)
    return {"advantages": out["advantages"][:, :width], "returns": out["returns"][:, :width]}


def whiten(x, mask, rank, center):
    """Its sums go over all processes; here one process holds all rows."""
    if not center:
        raise NotOffered("normalization removes the mean")
    return _found["masked_normalization"](*tensors(x, mask), unbiased=False, all_reduce=False)


def leave_one_out(scores, group, valid):
    return _normalized(scores, group, valid, None, True)


def group_normalize(scores, group, valid, scale):
    return _normalized(scores, group, valid, {"none": None}.get(scale, scale), False)


def _normalized(scores, group, valid, level, leave_one_out):
    n = neighbors(group, valid)
    config = SimpleNamespace(
        mean_level="group",
        std_level=level,
        group_size=n,
        mean_leave1out=leave_one_out,
        std_unbiased=True,
        eps=1e-5,
    )
    return Normalization(config)(tensors(scores))


def _actor(logp, old, advantages, mask, **options):
    o, a, m = tensors(old, advantages, mask)
    return with_gradient(
        lambda x: _found["ppo_actor_loss_fn"](x, o, o, a, loss_mask=m, **options), logp
    )


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    return _actor(logp, old, advantages, mask, eps_clip=clip_low, eps_clip_higher=clip_high)


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    options = {"eps_clip": clip_low, "eps_clip_higher": clip_high, "c_clip": ceiling}
    return _actor(logp, old, advantages, mask, **options)


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    options = {"eps_clip": clip_low, "eps_clip_higher": clip_high}
    rows = advantages[:, None] + 0 * logp
    return _actor(logp, old, rows, mask, importance_sampling_level="sequence", **options)


def value_loss(values, old, returns, mask, clip):
    if values.dtype != np.float32:
        raise NotOffered("float32 alone")
    o, g, m = tensors(old, returns, mask)
    return with_gradient(lambda v: _found["ppo_critic_loss_fn"](v, o, g, clip, m), values)


def aggregate(losses, mask, microbatch, mode, max_length):
    """Its engines weigh the mean of a micro-batch by the share of its tokens (loss_weight_fn)."""
    if mode != "token_mean":
        raise NotOffered("mean over tokens")
    x, m = tensors(losses, mask)
    total = 0.0
    for k in sorted({int(k) for k in microbatch}):
        rows = torch.from_numpy(microbatch == k)
        zero = 0 * x[rows]
        part = _found["ppo_actor_loss_fn"](zero, zero, zero, -x[rows], 0.2, m[rows])[0]
        total = total + part * m[rows].count_nonzero() / m.count_nonzero()
    return total


def _corrected(losses, old, sampler, mask, kind, level, low, high):
    o, s, x, m = tensors(old, sampler, losses, mask)
    config = SimpleNamespace(
        metric="ratio",
        action={"truncate": "clamp"}.get(kind, kind),
        level=level,
        agg="mean",
        lower=low,
        upper=high,
    )
    return _found["ppo_actor_loss_fn"](o, o, s, -x, 0.2, m, rejection_sampling=config)


def importance_weights(old, sampler, mask, kind, level, low, high):
    if level != "token":
        raise NotOffered("sequences: kept or dropped by a statistic, not weighed by a product")
    ones = np.ones(mask.shape, old.dtype)
    return _corrected(ones, old, sampler, mask, kind, "token", low, high)[1]["behave_imp_weight"]


def weighted_loss(losses, old, sampler, mask, kind, low, high):
    return _corrected(losses, old, sampler, mask, kind, "token", low, high)[0]


def overlong(lengths, longest, buffer):
    """Lengths as sums of a loss mask."""
    mask = np.arange(max(lengths))[None] < lengths[:, None]
    data = {
        "rewards": torch.zeros(len(lengths)),
        "input_ids": tensors(mask),
        "loss_mask": tensors(mask),
    }
    return _found["reward_overlong_penalty"](data, buffer, 1.0, longest)["rewards"]
