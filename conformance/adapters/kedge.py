"""Kedge: its pure functions, and its algorithms where the formula is only there.

Inputs are handed over as they are.
"""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

import torch
from ppo_conformance.adapting import installed_version, tensors, with_gradient

from kedge.algorithms.grpo import grpo
from kedge.algorithms.ppo import ppo
from kedge.loop.control import AdaptiveKL
from kedge.math import (
    advantage,
    losses,
    masked,
    ratios,
    rewards,
)
from kedge.math import (
    kl as estimators,
)
from kedge.math import (
    turns as by_turn,
)
from kedge.math.running import RunningMoments
from kedge.ops.linear_logprob import Head, TokenConstraints, linear_kl, linear_logprob
from kedge.records.types import RewardOutput
from kedge.rewards.mixture import Mixture

LIBRARY = "Kedge"
VERSION = os.environ.get("CONFORMANCE_KEDGE_VERSION") or installed_version("kedge-rl")
NOT_CALLABLE = {"response_mask": "sampling stops at the end token; nothing cuts afterwards"}


def _rows(logits):
    """Logits as hidden states under an identity head."""
    z = tensors(logits)
    return z.reshape(-1, z.shape[-1]), Head(torch.eye(z.shape[-1], dtype=z.dtype))


def logprobs(logits, tokens, mask, temperature):
    hidden, head = _rows(logits)
    limits = TokenConstraints(temperature=temperature)
    return linear_logprob(hidden, head, tensors(tokens).flatten(), constraints=limits)[0].reshape(
        mask.shape
    )


def entropy(logits, mask, temperature):
    hidden, head = _rows(logits)
    limits = TokenConstraints(temperature=temperature)
    ids = torch.zeros(len(hidden), dtype=torch.long)
    each = linear_logprob(hidden, head, ids, constraints=limits)[1].reshape(mask.shape)
    return {"entropy": each, "mean": masked.masked_mean(each, tensors(mask))}


def kl(logp, ref, mask, estimator):
    return estimators.ESTIMATORS[estimator](*tensors(logp, ref))


def full_kl(logits, ref_logits, mask):
    hidden, head = _rows(logits)
    return linear_kl(hidden, head, _rows(ref_logits)[0], head).reshape(mask.shape)


def token_rewards(scores, logp, ref, mask, kl_coef):
    s, p, q, m = tensors(scores, logp, ref, mask)
    return rewards.place_score(s, m) - kl_coef * estimators.k1(p, q) * m


def gae(rewards, values, mask, gamma, lam, last_values):
    r, v, m, after = tensors(rewards, values, mask, last_values)
    a = advantage.gae(r, v, m, gamma=gamma, lam=lam, after=after)
    return {"advantages": a, "returns": a + v * m}


def decoupled_gae(rewards, values, mask, gamma, lam, lam_value):
    """As ``compute_advantages`` of PPO; its whitening is switched off."""
    r, v, m = tensors(rewards, values, mask)
    algorithm = ppo(gamma=gamma, lam=lam, lam_value=lam_value, whiten_advantages=False)
    rollout = SimpleNamespace(loss_mask=m)
    zero = torch.zeros(len(m))
    inputs = SimpleNamespace(
        rollout=rollout,
        reward_output=RewardOutput(scores=zero, valid=zero == 0, token_rewards=r.double()),
        model_outputs=SimpleNamespace(values=v, ref_logprobs=None, full_kl=None),
        all_reduce=masked.one_rank,
        trained=m,
    )
    out = algorithm.compute_advantages(inputs, 0.0)
    return {"advantages": out.advantages, "returns": out.returns}


def adaptive_lambda(mask, alpha):
    return advantage.length_adaptive_lambda(tensors(mask), alpha=alpha)


def turn_gae(rewards, values, turns, mask, gamma, lam):
    """As PPO with credit="turn"."""
    r, v, turn = tensors(rewards, values, turns)
    starts = by_turn.turn_starts(turn)
    summed = by_turn.segment_sum(r, turn) * starts
    return by_turn.broadcast_turns(advantage.gae(summed, v, starts, gamma=gamma, lam=lam), turn)


def discounted_returns(rewards, mask, gamma):
    return advantage.rewards_to_go(*tensors(rewards, mask), gamma=gamma)


def whiten(x, mask, rank, center):
    """Every rank by itself, with sums over all of them: a first pass collects them."""
    parts = [tensors(x[rank == r], mask[rank == r]) for r in sorted({int(r) for r in rank})]
    out, sums = [], []
    for stage in range(3):  # after stage k the first k sums are known for all ranks
        seen: list[list[torch.Tensor]] = []
        out = []
        for part, m in parts:
            own: list[torch.Tensor] = []

            def all_reduce(local, own=own):
                own.append(local)
                return sums[len(own) - 1] if len(own) <= len(sums) else local

            out.append(masked.whiten(part, m, center=center, all_reduce=all_reduce))
            seen.append(own)
        if stage < 2:
            sums.append(sum(own[stage] for own in seen))
    whole = torch.zeros(x.shape)
    for r, part in zip(sorted({int(r) for r in rank}), out, strict=True):
        whole[torch.from_numpy(rank == r)] = part.float()
    return whole


def leave_one_out(scores, group, valid):
    return advantage.leave_one_out(*tensors(scores, group, valid))


def group_normalize(scores, group, valid, scale):
    return advantage.group_normalize(
        *tensors(scores, group, valid), scale=scale, all_reduce=masked.one_rank
    )


def _policy_loss(algorithm, logp, old, advantages, mask):
    """The loss of an algorithm over one optimizer step."""
    o, a, m = tensors(old, advantages, mask)
    rows = SimpleNamespace(old_logprobs=o, advantages=a, loss_mask=m, ref_logprobs=None)
    rows.old_values = rows.returns = o * 0
    weights = losses.WEIGHTINGS[algorithm.weighting](m, masked.one_rank)
    share = losses.row_mean(m, masked.one_rank)
    batch = SimpleNamespace(rows=rows, token_weight=weights, value_weight=weights, row_weight=share)

    def loss(x):
        new = SimpleNamespace(logprobs=x, entropy=torch.zeros_like(x), values=o * 0)
        return algorithm.loss(new, batch).parts["policy"]

    return with_gradient(loss, logp)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    return _policy_loss(ppo(cliprange=(clip_low, clip_high)), logp, old, advantages, mask)


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    clip = losses.Clip(clip_low, clip_high, ceiling)
    return _policy_loss(ppo(cliprange=clip), logp, old, advantages, mask)


def double_sided(logp, old, advantages, mask, low, high):
    return _policy_loss(ppo(cliprange=losses.RatioMask(low, high)), logp, old, advantages, mask)


def cispo(logp, old, advantages, mask, top):
    return _policy_loss(grpo(loss_type="cispo", epsilon_high=top), logp, old, advantages, mask)


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    algorithm = grpo(
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=clip_low,
        epsilon_high=clip_high,
    )
    return _policy_loss(algorithm, logp, old, advantages[:, None] * mask.astype(logp.dtype), mask)


def value_loss(values, old, returns, mask, clip):
    o, g, m = tensors(old, returns, mask)
    weights = losses.token_mean(m, masked.one_rank)
    return with_gradient(
        lambda v: (weights * losses.clipped_value_loss(v, o, g, clip=clip)).sum(), values
    )


def aggregate(losses, mask, microbatch, mode, max_length):
    """Weights are computed for the whole step; micro-batches add up."""
    from kedge.math.losses import WEIGHTINGS, row_mean

    x, m = tensors(losses, mask)
    if mode == "constant":  # dr_grpo
        weights = row_mean(m, masked.one_rank)[:, None] * m / max_length
    else:
        name = {"token_mean": "token_mean", "sequence_mean": "row_then_token_mean"}[mode]
        weights = WEIGHTINGS[name](m, masked.one_rank)
    parts = sorted({int(k) for k in microbatch})
    return sum((weights * x)[torch.from_numpy(microbatch == k)].sum() for k in parts)


_LEVELS = {"token": "token", "sequence": "sequence", "geometric": "sequence_mean"}


def importance_weights(old, sampler, mask, kind, level, low, high):
    bounds = ratios.Correction(kind=kind, level=_LEVELS[level], high=high, low=low)
    return ratios.importance_weights(*tensors(old, sampler, mask), bounds)


def weighted_loss(losses, old, sampler, mask, kind, low, high):
    """As ``make_experience``: what the mask rejects leaves loss and normalizer."""
    from kedge.loop.stages import _rejected_tokens
    from kedge.math.losses import token_mean

    x, m = tensors(losses, mask)
    bounds = ratios.Correction(kind=kind, level="token", high=high, low=low)
    weight = ratios.importance_weights(*tensors(old, sampler), m, bounds)
    rejected = _rejected_tokens(weight, m, m, bounds)
    kept = m if rejected is None else m & ~rejected
    return (token_mean(kept, masked.one_rank) * weight * x).sum()


def adaptive_kl(start, target, horizon, kl, steps):
    control, out = AdaptiveKL(value=start, target=target, horizon=horizon), []
    for now, n in zip(kl, steps, strict=True):
        control.update(float(now), int(n))
        out.append(control.value)
    return out


def overlong(lengths, longest, buffer):
    return rewards.overlong_penalty(tensors(lengths), longest=longest, buffer=buffer)


@dataclasses.dataclass
class _Rollout:
    """As much of a rollout as a mixture of rewards reads."""

    ids: torch.Tensor
    terminated: torch.Tensor
    loss_mask: torch.Tensor
    episodes: None = None

    def __len__(self):
        return len(self.ids)


def eos_penalty(scores, ended, penalty, how):
    s, e = tensors(scores, ended)
    valid = torch.ones_like(e)
    source = SimpleNamespace(score=lambda rollout: RewardOutput(scores=s, valid=valid))
    if how == "replace":
        mixture = Mixture([("f", source, 1.0)], non_eos_penalty=True, penalty_reward_value=penalty)
    else:
        mixture = Mixture([("f", source, 1.0)], missing_eos_penalty=penalty)
    return mixture.score(_Rollout(s[:, None], e, valid[:, None])).scores


def running_moments(scores):
    moments, mean, std = RunningMoments(), [], []
    for batch in scores:
        moments.update(tensors(batch))
        mean.append(moments.mean)
        std.append(moments.std)
    return {"mean": mean, "std": std}
