"""TRL 0.12 to 1.12, trl.experimental.ppo; CONFORMANCE_TRL_PPO may name the folder that holds it.

Most formulas stand in the middle of ``PPOTrainer.train``: those lines are run as they are.

It knows the index of the last token alone, so the adapter refuses holes; log-probabilities of
padding are 1 (INVALID_LOGPROB) where the trainer sets them before.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import excerpt, installed_version, library, tensors, with_gradient

warnings.simplefilter("ignore")
library("CONFORMANCE_TRL_PPO", "trl")
from trl.experimental.ppo import ppo_trainer
from trl.experimental.utils import first_true_indices
from trl.trainer.utils import selective_log_softmax

LIBRARY = "TRL PPO"
VERSION = installed_version("trl", os.environ.get("CONFORMANCE_TRL_PPO"))
DOCUMENTED = {
    "token_rewards/*": "a comment of train (padding_mask_p1), after arXiv:2403.17031's code",
}
NOTES = {
    "entropy": "a logged statistic; nothing trains on it",
    "token_rewards": "the slot after the last token takes part in GAE, too",
    "gae": "called with the mask shifted by that slot, so that the formula itself is compared",
}
NOT_CALLABLE = {
    "full_kl": "no such option",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "credit per token",
    **dict.fromkeys(
        ("leave_one_out", "group_normalize", "dual_clip", "double_sided"), "not in PPO"
    ),
    **dict.fromkeys(
        ("cispo", "gspo", "importance_weights", "weighted_loss", "overlong"), "not in PPO"
    ),
    **dict.fromkeys(("adaptive_kl", "discounted_returns", "running_moments"), "no such option"),
}
FILE = Path(ppo_trainer.__file__)


def _lines(start, stop, **names):
    known = {
        "torch": torch,
        "masked_mean": ppo_trainer.masked_mean,
        "masked_whiten": ppo_trainer.masked_whiten,
        "selective_log_softmax": selective_log_softmax,
        "INVALID_LOGPROB": ppo_trainer.INVALID_LOGPROB,
    }
    return excerpt(FILE, start, stop, **known, **names)


def _lengths(mask):
    """The trainer knows the index of the last token of each response, and no holes."""
    lengths = mask.sum(1)
    if (
        not (mask.sum(1, keepdims=True) > range(mask.shape[1])).astype(bool).__eq__(mask).all()
        or not lengths.all()
    ):
        raise NotOffered("responses are padded on the right, without holes, and not empty")
    return torch.from_numpy(lengths - 1)


def logprobs(logits, tokens, mask, temperature):
    z, ids = tensors(logits, tokens)
    z = torch.cat([z, z[:, :1]], 1)  # the last position predicts nothing
    output = SimpleNamespace(logits=z)
    tokenizer = SimpleNamespace(pad_token_id=0)
    found = _lines(
        "output, vpred_temp = forward(",
        "new_logprobs = torch.masked_fill(",
        forward=lambda *_: (output, None),
        model=None,
        mb_query_responses=None,
        processing_class=tokenizer,
        context_length=1,
        mb_responses=ids,
        args=SimpleNamespace(temperature=temperature),
    )
    return found["new_logprobs"]


def entropy(logits, mask, temperature):
    """The statistic ``policy/entropy_avg``, over all positions of the micro-batch."""
    z = tensors(logits) / (temperature + 1e-7)
    each = _lines("prob_dist = torch.nn.functional.softmax(logits", "approxkl = 0.5", logits=z)[
        "entropy"
    ]
    return {"entropy": each, "mean": each.mean()}


def kl(logp, ref, mask, estimator):
    if estimator not in {"k1", "k3"}:
        raise NotOffered("k1 and k3")
    p, q = tensors(logp, ref)
    args = SimpleNamespace(kl_estimator=estimator, kl_coef=1.0)
    return _lines(
        "logr = ref_logprobs - logprobs",
        "rewards = non_score_reward",
        logprobs=p,
        ref_logprobs=q,
        args=args,
    )["kl"]


def token_rewards(scores, logp, ref, mask, kl_coef):
    last = _lengths(mask)
    s, p, q = tensors(scores, logp, ref)
    args = SimpleNamespace(kl_estimator="k1", kl_coef=kl_coef)
    return _lines(
        "response_idxs = torch.arange(",
        "# 5. whiten rewards",
        responses=p,
        sequence_lengths=last,
        logprobs=p,
        ref_logprobs=q,
        values=p,
        scores=s,
        args=args,
    )["rewards"]


def gae(rewards, values, mask, gamma, lam, last_values):
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    last = _lengths(mask)
    r, v = tensors(rewards, values)
    # Its masks end one slot after the response; here that slot is the last token.
    v = _lines(
        "response_idxs = torch.arange(",
        "# 4. compute rewards",
        responses=r,
        sequence_lengths=last - 1,
        logprobs=r,
        ref_logprobs=r,
        values=v,
    )["values"]
    args = SimpleNamespace(gamma=gamma, lam=lam)
    found = _lines(
        "# 6. compute advantages and returns",
        "advantages = masked_whiten(",
        responses=r,
        rewards=r,
        values=v,
        args=args,
    )
    return {"advantages": found["advantages"], "returns": found["returns"]}


def whiten(x, mask, rank, center):
    """Every process whitens its own rows."""
    out = torch.zeros(x.shape)
    for r in {int(r) for r in rank}:
        rows = torch.from_numpy(rank == r)
        out[rows] = ppo_trainer.masked_whiten(tensors(x)[rows], tensors(mask)[rows], center)
    return out


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    if clip_low != clip_high:
        raise NotOffered("one cliprange")
    o, a, m = tensors(old, advantages, mask)
    names = {"mb_logprobs": o.masked_fill(~m, 1.0), "mb_advantage": a, "padding_mask": ~m}
    args = SimpleNamespace(cliprange=clip_low)

    def loss(x):
        new = x.masked_fill(~m, 1.0)  # INVALID_LOGPROB, as two lines before
        found = _lines(
            "logprobs_diff = new_logprobs",
            "loss = pg_loss +",
            new_logprobs=new,
            micro_batch_inds=slice(None),
            args=args,
            **names,
        )
        return found["pg_loss"]

    return with_gradient(loss, logp)


def value_loss(values, old, returns, mask, clip):
    o, g, m = tensors(old, returns, mask)
    args = SimpleNamespace(cliprange_value=clip)

    def loss(v):
        found = _lines(
            "vpredclipped = torch.clamp(",
            "vf_clipfrac = masked_mean(",
            vpred=v,
            mb_values=o,
            mb_return=g,
            padding_mask_p1=~m,
            micro_batch_inds=slice(None),
            args=args,
        )
        return found["vf_loss"]

    return with_gradient(loss, values)


def aggregate(losses, mask, microbatch, mode, max_length):
    """``masked_mean`` over a micro-batch; accelerate divides by their number."""
    if mode != "token_mean":
        raise NotOffered("mean over tokens")
    if len(set(np.bincount(microbatch).tolist())) > 1:
        raise NotOffered("micro-batches have equally many rows")
    x, m = tensors(losses, mask)
    parts = [torch.from_numpy(microbatch == k) for k in sorted({int(k) for k in microbatch})]
    return sum(ppo_trainer.masked_mean(x[rows], m[rows]) for rows in parts) / len(parts)


def eos_penalty(scores, ended, penalty, how):
    if how == "replace":
        raise NotOffered("missing_eos_penalty is subtracted")
    s, e = tensors(scores, ended)
    self = SimpleNamespace(args=SimpleNamespace(missing_eos_penalty=penalty))
    return _lines(
        "if self.args.missing_eos_penalty is not None",
        "# accelerator.print(",
        self=self,
        scores=s.clone(),
        contain_eos_token=e,
    )["scores"]


def response_mask(tokens, eos):
    """Cut by ``truncate_response``; the mask is up to the first padding, of another id."""
    ids, pad = tensors(tokens), -1
    cut = ppo_trainer.truncate_response(eos, pad, ids)
    last = first_true_indices(cut == pad) - 1
    return torch.arange(ids.shape[1])[None] <= last[:, None]
