"""Float64 references, vectorized: one function per family, outputs as a dict of arrays.

Inputs are those of ``families.py``.  Keywords after ``*`` choose a convention, where several are
right.  ``second.py`` computes the same in another way and shares no code with this file.
"""

from __future__ import annotations

import numpy as np

# -- distributions -----------------------------------------------------------------------------


def _log_softmax(z):
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def logprobs(logits, tokens, mask, temperature):
    logp = _log_softmax(np.asarray(logits, float) / temperature)
    return {"logprobs": np.take_along_axis(logp, tokens[..., None], -1)[..., 0]}


def entropy(logits, mask, temperature):
    logp = _log_softmax(np.asarray(logits, float) / temperature)
    each = -(np.exp(logp) * logp).sum(-1)
    return {"entropy": each, "mean": each[mask].mean()}


def kl(logp, ref, mask, estimator):
    gap = logp - ref
    kinds = {
        "k1": gap,
        "k2": gap**2 / 2,
        "k3": np.expm1(-gap) + gap,
        "abs": np.abs(gap),
    }
    return {"kl": kinds[estimator]}


def full_kl(logits, ref_logits, mask):
    p, q = _log_softmax(np.asarray(logits, float)), _log_softmax(np.asarray(ref_logits, float))
    return {"kl": (np.exp(p) * (p - q)).sum(-1)}


# -- rewards -----------------------------------------------------------------------------------


def _last(mask):
    slots = np.arange(mask.shape[1])
    return np.where(mask, slots, -1).max(1)


def token_rewards(scores, logp, ref, mask, kl_coef, attention_mask=None):
    here = np.arange(mask.shape[1])[None] == _last(mask)[:, None]
    penalty = np.where(mask, -kl_coef * (logp - ref), 0.0)
    return {"rewards": penalty + here * scores[:, None]}


def overlong(lengths, longest, buffer):
    return {"penalty": np.clip((longest - buffer - lengths) / buffer, -1.0, 0.0)}


def eos_penalty(scores, ended, penalty, how):
    without = penalty + np.zeros_like(scores) if how == "replace" else scores - penalty
    return {"scores": np.where(ended, scores, without)}


def response_mask(tokens, eos):
    ends = np.cumsum(tokens == eos, 1)
    return {"mask": (ends - (tokens == eos)) == 0}


def running_moments(scores):
    means, stds = [], []
    for n in range(1, len(scores) + 1):
        seen = scores[:n].ravel()
        means.append(seen.mean())
        stds.append(seen.std(ddof=1))
    return {"mean": np.array(means), "std": np.array(stds)}


# -- advantages --------------------------------------------------------------------------------


def _gae_row(r, v, gamma, lam, after):
    delta = r + gamma * np.append(v[1:], after) - v
    steps = np.arange(len(r))
    gap = steps[None] - steps[:, None]
    return np.where(gap >= 0, (gamma * lam) ** np.maximum(gap, 0), 0.0) @ delta


def gae(rewards, values, mask, gamma, lam, last_values, attention_mask=None):
    advantages, lam = np.zeros(mask.shape), np.broadcast_to(lam, len(mask))
    for b, m in enumerate(mask):
        if m.any():
            row = _gae_row(rewards[b, m], values[b, m], gamma, lam[b], last_values[b])
            advantages[b, m] = row
    return {"advantages": advantages, "returns": advantages + np.where(mask, values, 0.0)}


def decoupled_gae(rewards, values, mask, gamma, lam, lam_value):
    zero = np.zeros(len(mask))
    policy = gae(rewards, values, mask, gamma, lam, zero)
    value = gae(rewards, values, mask, gamma, lam_value, zero)
    return {"advantages": policy["advantages"], "returns": value["returns"]}


def adaptive_lambda(mask, alpha):
    lengths = np.maximum(mask.sum(1), 1)
    return {"lam": np.maximum(1 - 1 / (alpha * lengths), 0.0)}


def turn_gae(rewards, values, turns, mask, gamma, lam):
    out = np.zeros(mask.shape)
    for b, turn in enumerate(turns):
        count = turn.max() + 1
        if not count:
            continue
        member = turn[None] == np.arange(count)[:, None]  # [turns, T]
        row = _gae_row(member @ rewards[b], values[b][member.argmax(1)], gamma, lam, 0.0)
        out[b] = row @ member
    return {"advantages": out}


def discounted_returns(rewards, mask, gamma, attention_mask=None):
    out = np.zeros(mask.shape)
    for b, m in enumerate(mask):
        steps = np.arange(m.sum())
        gap = steps[None] - steps[:, None]
        out[b, m] = np.where(gap >= 0, float(gamma) ** np.maximum(gap, 0), 0.0) @ rewards[b, m]
    return {"returns": out}


def whiten(x, mask, rank, center, *, ddof=1, by_rank=False):
    out = np.zeros(x.shape)
    for rows in [rank == r for r in np.unique(rank)] if by_rank else [slice(None)]:
        inside = x[rows][mask[rows]]
        scaled = (x[rows] - inside.mean()) / inside.std(ddof=ddof)
        out[rows] = scaled if center else scaled + inside.mean()
    return {"whitened": out}


def _groups(group, valid):
    for g in np.unique(group):
        rows = np.flatnonzero((group == g) & valid)
        if len(rows):
            yield rows


def leave_one_out(scores, group, valid, *, alone="zero"):
    out = np.zeros(len(scores))
    for rows in _groups(group, valid):
        k = len(rows)
        if k > 1:
            out[rows] = (k * scores[rows] - scores[rows].sum()) / (k - 1)
        elif alone == "keep":
            out[rows] = scores[rows]
    return {"advantages": out}


def group_normalize(scores, group, valid, scale, *, ddof=1, centered_std=False, alone="zero"):
    scores = np.asarray(scores, float)  # in float32 the mean of equal scores may not be one of them
    centered, out = np.zeros(len(scores)), np.zeros(len(scores))
    for members in _groups(group, valid):
        single = len(members) == 1 and alone == "keep"
        centered[members] = scores[members] - (0 if single else scores[members].mean())
        out[members] = centered[members]
        if scale == "group" and len(members) > 1:
            out[members] = _divide(centered[members], scores[members].std(ddof=ddof))
    if scale == "batch":
        spread = centered if centered_std else scores
        out = np.where(valid, _divide(centered, spread[valid].std(ddof=ddof)), 0.0)
    return {"advantages": out}


def _divide(centered, std):
    return centered / std if std > 0 else 0 * centered


# -- losses: value, and gradient by logp (or by the values), written by hand ---------------------


def _terms(logp, old, mask):
    return np.where(mask, np.exp(np.where(mask, logp - old, 0.0)), 0.0), mask.sum()


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    ratio, n = _terms(logp, old, mask)
    bounded = np.clip(ratio, 1 - clip_low, 1 + clip_high)
    each = np.maximum(-ratio * advantages, -bounded * advantages)
    over, under = ratio > 1 + clip_high, ratio < 1 - clip_low
    free = ~((advantages > 0) & over | (advantages < 0) & under)
    gradient = np.where(mask & free, -ratio * advantages, 0.0) / n
    return {"loss": np.where(mask, each, 0.0).sum() / n, "gradient": gradient}


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    ratio, n = _terms(logp, old, mask)
    bounded = np.clip(ratio, 1 - clip_low, 1 + clip_high)
    each = np.maximum(-ratio * advantages, -bounded * advantages)
    negative = advantages < 0
    each = np.where(negative, np.minimum(each, -ceiling * advantages), each)
    free = np.where(negative, (ratio >= 1 - clip_low) & (ratio <= ceiling), ratio <= 1 + clip_high)
    gradient = np.where(mask & free, -ratio * advantages, 0.0) / n
    return {"loss": np.where(mask, each, 0.0).sum() / n, "gradient": gradient}


def double_sided(logp, old, advantages, mask, low, high):
    ratio, n = _terms(logp, old, mask)
    inside = mask & (ratio > 1 - low) & (ratio < 1 + high)
    each = np.where(inside, -ratio * advantages, 0.0)
    return {"loss": each.sum() / n, "gradient": each / n}


def cispo(logp, old, advantages, mask, top):
    ratio, n = _terms(logp, old, mask)
    weight = np.where(mask, -np.minimum(ratio, top) * advantages, 0.0)
    return {"loss": (weight * np.where(mask, logp, 0.0)).sum() / n, "gradient": weight / n}


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    lengths = mask.sum(1)
    ratio = np.exp(np.where(mask, logp - old, 0.0).sum(1) / lengths)
    a = advantages
    each = np.maximum(-ratio * a, -np.clip(ratio, 1 - clip_low, 1 + clip_high) * a)
    free = ~((a > 0) & (ratio > 1 + clip_high) | (a < 0) & (ratio < 1 - clip_low))
    by_row = np.where(free, -ratio * a / lengths, 0.0) / len(a)
    return {"loss": each.mean(), "gradient": np.where(mask, by_row[:, None], 0.0)}


def value_loss(values, old, returns, mask, clip, *, half=True, by_row=False):
    bounded = old + np.clip(values - old, -clip, clip)
    plain, clipped = (values - returns) ** 2, (bounded - returns) ** 2
    n = len(mask) * mask.sum(1, keepdims=True) if by_row else mask.sum()
    weight = np.where(mask, (0.5 if half else 1.0) / n, 0.0)
    free = (plain >= clipped) | (np.abs(values - old) <= clip)
    slope = np.where(free, 2 * (values - returns), 0.0)
    return {"loss": (weight * np.maximum(plain, clipped)).sum(), "gradient": weight * slope}


def aggregate(losses, mask, microbatch, mode, max_length, *, empty_rows=None):
    inside = np.where(mask, losses, 0.0)
    rows = len(mask) if empty_rows == "count" else mask.any(1).sum()
    if mode == "token_mean":
        return {"loss": inside.sum() / mask.sum()}
    if mode == "sequence_mean":
        return {"loss": (inside.sum(1) / np.maximum(mask.sum(1), 1)).sum() / rows}
    rows = mask.any(1).sum() if empty_rows == "leave" else len(mask)
    return {"loss": inside.sum() / (rows * max_length)}


# -- corrections and controllers ---------------------------------------------------------------


def _bounded_weights(old, sampler, mask, kind, level, low, high):
    gap = np.where(mask, old - sampler, 0.0)
    if level != "token":
        total = gap.sum(1) / (1 if level == "sequence" else np.maximum(mask.sum(1), 1))
        gap = np.broadcast_to(total[:, None], gap.shape)
    weight = np.exp(gap)
    if kind == "truncate":
        return np.clip(weight, low, high)
    return np.where((weight >= low) & (weight <= high), weight, 0.0)


def importance_weights(old, sampler, mask, kind, level, low, high):
    return {"weights": _bounded_weights(old, sampler, mask, kind, level, low, high)}


def weighted_loss(losses, old, sampler, mask, kind, low, high, *, rejected="leave"):
    weight = _bounded_weights(old, sampler, mask, kind, "token", low, high)
    kept = mask & (weight > 0) if kind == "mask" and rejected == "leave" else mask
    return {"loss": np.where(mask, weight * losses, 0.0).sum() / kept.sum()}


def adaptive_kl(start, target, horizon, kl, steps):
    error = np.clip(kl / target - 1, -0.2, 0.2)
    return {"coefficients": start * np.cumprod(1 + error * steps / horizon)}
