"""The same outputs by other means: fractions, 50-digit decimals, enumeration, finite differences.

Shares no code with ``first.py``: plain Python, one token at a time, from the definitions.
"""

from __future__ import annotations

from decimal import Decimal, getcontext
from fractions import Fraction as F
from itertools import combinations

getcontext().prec = 50
STEP = 1e-6  # of central differences, in float64


def _decimal(x):
    return Decimal(float(x))


def _root(x: F) -> float:
    return float((Decimal(x.numerator) / Decimal(x.denominator)).sqrt())


def _exp(x) -> Decimal:
    return _decimal(x).exp()


def _probabilities(z, temperature=1.0):
    weights = [(_decimal(x) / _decimal(temperature)).exp() for x in z]
    total = sum(weights)
    return [w / total for w in weights]


def _table(mask, value):
    return [[float(value(b, t)) for t in range(len(row))] for b, row in enumerate(mask)]


def _places(row):
    return [t for t, inside in enumerate(row) if inside]


def logprobs(logits, tokens, mask, temperature):
    def one(b, t):
        return _probabilities(logits[b][t], temperature)[tokens[b][t]].ln()

    return {"logprobs": _table(mask, one)}


def entropy(logits, mask, temperature):
    def one(b, t):  # log Z - E[z]
        z = [_decimal(x) / _decimal(temperature) for x in logits[b][t]]
        p = _probabilities(logits[b][t], temperature)
        return sum(x.exp() for x in z).ln() - sum(a * x for a, x in zip(p, z, strict=True))

    table = _table(mask, one)
    inside = [table[b][t] for b, row in enumerate(mask) for t in _places(row)]
    return {"entropy": table, "mean": sum(inside) / len(inside)}


def kl(logp, ref, mask, estimator):
    def one(b, t):
        ratio = _exp(ref[b][t]) / _exp(logp[b][t])  # q / p
        log = ratio.ln()
        return {"k1": -log, "k2": log * log / 2, "k3": ratio - 1 - log, "abs": abs(log)}[estimator]

    return {"kl": _table(mask, one)}


def full_kl(logits, ref_logits, mask):
    def one(b, t):  # cross-entropy minus entropy
        p, q = _probabilities(logits[b][t]), _probabilities(ref_logits[b][t])
        cross = -sum(x * y.ln() for x, y in zip(p, q, strict=True))
        return cross + sum(x * x.ln() for x in p if x)

    return {"kl": _table(mask, one)}


def token_rewards(scores, logp, ref, mask, kl_coef, attention_mask=None):
    rewards = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        places = _places(row)
        for t in places:
            rewards[b][t] = float(-F(float(kl_coef)) * (F(float(logp[b][t])) - F(float(ref[b][t]))))
        if places:
            rewards[b][places[-1]] += float(scores[b])
    return {"rewards": rewards}


def overlong(lengths, longest, buffer):
    def one(length):
        if length <= longest - buffer:
            return F(0)
        if length >= longest:
            return F(-1)
        return F(int(longest - buffer - length), int(buffer))

    return {"penalty": [float(one(int(length))) for length in lengths]}


def eos_penalty(scores, ended, penalty, how):
    out = []
    for score, end in zip(scores, ended, strict=True):
        changed = penalty if how == "replace" else score - penalty
        out.append(float(score if end else changed))
    return {"scores": out}


def response_mask(tokens, eos):
    out = []
    for row in tokens:
        ids = [int(x) for x in row]
        length = ids.index(eos) + 1 if eos in ids else len(ids)
        out.append([t < length for t in range(len(ids))])
    return {"mask": out}


def running_moments(scores):
    means, stds, seen = [], [], []
    for batch in scores:
        seen += [F(float(x)) for x in batch]
        means.append(float(sum(seen) / len(seen)))
        stds.append(_root(_variance(seen, 1)))
    return {"mean": means, "std": stds}


def _variance(x, ddof):  # by pairs: sum over i < j of (x_i - x_j)^2 / (n (n - ddof))
    n = len(x)
    return sum(((a - b) ** 2 for a, b in combinations(x, 2)), F(0)) / (n * (n - ddof))


def gae(rewards, values, mask, gamma, lam, last_values, attention_mask=None):
    advantages = [[F(0)] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    g = F(float(gamma))
    for b, row in enumerate(mask):
        weight = F(float(lam[b] if hasattr(lam, "__len__") else lam))
        following, trace = F(float(last_values[b])), F(0)
        for t in reversed(_places(row)):
            value = F(float(values[b][t]))
            trace = F(float(rewards[b][t])) + g * following - value + g * weight * trace
            advantages[b][t], following = trace, value
            returns[b][t] = float(trace + value)
    return {"advantages": [[float(x) for x in row] for row in advantages], "returns": returns}


def decoupled_gae(rewards, values, mask, gamma, lam, lam_value):
    # Lambda-returns as mixtures of n-step returns, without a recursion.
    out = {}
    for name, weight in (("advantages", F(float(lam))), ("returns", F(float(lam_value)))):
        table = [[0.0] * len(row) for row in mask]
        for b, row in enumerate(mask):
            places = _places(row)
            for i, t in enumerate(places):
                value = _mixture(rewards[b], values[b], places[i:], F(float(gamma)), weight)
                table[b][t] = float(value - (F(float(values[b][t])) if name[0] == "a" else 0))
        out[name] = table
    return out


def _mixture(r, v, places, gamma, lam):
    total, n = F(0), len(places)
    for k in range(1, n + 1):
        target = sum((gamma**j * F(float(r[places[j]])) for j in range(k)), F(0))
        if k < n:
            target += gamma**k * F(float(v[places[k]]))
        total += (lam ** (k - 1) * (1 - lam) if k < n else lam ** (n - 1)) * target
    return total


def adaptive_lambda(mask, alpha):
    out = []
    for row in mask:
        product = F(float(alpha)) * max(len(_places(row)), 1)
        out.append(float(max(1 - 1 / product, F(0))))
    return {"lam": out}


def turn_gae(rewards, values, turns, mask, gamma, lam):
    out = [[0.0] * len(row) for row in turns]
    for b, row in enumerate(turns):
        following = trace = F(0)
        for turn in sorted({int(x) for x in row if x >= 0}, reverse=True):
            places = [t for t, x in enumerate(row) if x == turn]
            reward = sum(F(float(rewards[b][t])) for t in places)
            value = F(float(values[b][places[0]]))
            delta = reward + F(float(gamma)) * following - value
            trace, following = delta + F(float(gamma)) * F(float(lam)) * trace, value
            for t in places:
                out[b][t] = float(trace)
    return {"advantages": out}


def discounted_returns(rewards, mask, gamma, attention_mask=None):
    out = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        total = F(0)
        for t in reversed(_places(row)):
            total = F(float(rewards[b][t])) + F(float(gamma)) * total
            out[b][t] = float(total)
    return {"returns": out}


def whiten(x, mask, rank, center, *, ddof=1, by_rank=False):
    def one(b, t):
        rows = [c for c in range(len(mask)) if rank[c] == rank[b] or not by_rank]
        inside = [F(float(x[c][u])) for c in rows for u in _places(mask[c])]
        mean, std = sum(inside) / len(inside), _root(_variance(inside, ddof))
        return float(F(float(x[b][t])) - mean) / std + (0.0 if center else float(mean))

    return {"whitened": _table(mask, one)}


def _others(group, valid, i):
    return [j for j in range(len(group)) if group[j] == group[i] and valid[j] and j != i]


def leave_one_out(scores, group, valid, *, alone="zero"):
    out = []
    for i in range(len(scores)):
        others = _others(group, valid, i)
        known = valid[i] and (others or alone == "keep")
        mean = sum(F(float(scores[j])) for j in others) / len(others) if others else 0
        out.append(float(F(float(scores[i])) - mean) if known else 0.0)
    return {"advantages": out}


def group_normalize(scores, group, valid, scale, *, ddof=1, centered_std=False, alone="zero"):
    exact = [F(float(x)) for x in scores]
    centered = []
    for i, x in enumerate(exact):
        members = [*_others(group, valid, i), i]
        mean = sum(exact[j] for j in members) / len(members)
        mean = F(0) if alone == "keep" and len(members) == 1 else mean
        centered.append(x - mean if valid[i] else F(0))

    def std(members):
        return _root(_variance(members, ddof)) if len(members) > 1 else 0.0

    out = []
    batch = [(centered if centered_std else exact)[j] for j in range(len(exact)) if valid[j]]
    for i, x in enumerate(centered):
        members = [exact[j] for j in [*_others(group, valid, i), i]]
        own = 1.0 if alone == "keep" and len(members) == 1 else std(members)
        spread = {"none": 1.0, "batch": std(batch), "group": own}[scale]
        out.append(float(x) / spread if spread else 0.0)
    return {"advantages": out}


# -- losses: a number by a loop, its gradient by central differences ----------------------------


def _loss_and_gradient(loss, x):
    x = [[float(y) for y in row] for row in x]
    gradient = [[0.0] * len(row) for row in x]
    for b, row in enumerate(x):
        for t in range(len(row)):
            kept, sides = row[t], []
            for sign in (1, -1):
                row[t] = kept + sign * STEP
                sides.append(loss(x))
            row[t] = kept
            gradient[b][t] = (sides[0] - sides[1]) / (2 * STEP)
    return {"loss": loss(x), "gradient": gradient}


def _token_mean(mask, term):
    terms = [term(b, t) for b, row in enumerate(mask) for t in _places(row)]
    return sum(terms) / len(terms)


def _ratio(x, old, b, t):
    return 2.718281828459045 ** (x[b][t] - float(old[b][t]))


def _clipped(ratio, a, low, high):
    bounded = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * a, bounded * a)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    def loss(x):
        return _token_mean(
            mask,
            lambda b, t: _clipped(_ratio(x, old, b, t), advantages[b][t], clip_low, clip_high),
        )

    return _loss_and_gradient(loss, logp)


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    def term(x, b, t):
        a = advantages[b][t]
        value = _clipped(_ratio(x, old, b, t), a, clip_low, clip_high)
        return min(value, -ceiling * a) if a < 0 else value

    return _loss_and_gradient(lambda x: _token_mean(mask, lambda b, t: term(x, b, t)), logp)


def double_sided(logp, old, advantages, mask, low, high):
    def term(x, b, t):
        ratio = _ratio(x, old, b, t)
        return -ratio * advantages[b][t] if 1 - low < ratio < 1 + high else 0.0

    return _loss_and_gradient(lambda x: _token_mean(mask, lambda b, t: term(x, b, t)), logp)


def cispo(logp, old, advantages, mask, top):
    # The weight is held at the given logp: it has no gradient.
    weights = [
        [min(_ratio(logp, old, b, t), top) for t in range(len(row))] for b, row in enumerate(mask)
    ]

    def loss(x):
        return _token_mean(mask, lambda b, t: -weights[b][t] * advantages[b][t] * x[b][t])

    return _loss_and_gradient(loss, logp)


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    def loss(x):
        total = 0.0
        for b, row in enumerate(mask):
            ratio = 1.0
            for t in _places(row):
                ratio *= _ratio(x, old, b, t) ** (1 / len(_places(row)))
            total += _clipped(ratio, advantages[b], clip_low, clip_high)
        return total / len(mask)

    return _loss_and_gradient(loss, logp)


def value_loss(values, old, returns, mask, clip, *, half=True, by_row=False):
    def term(x, b, t):
        v, before, target = x[b][t], float(old[b][t]), float(returns[b][t])
        near = min(max(v, before - clip), before + clip)
        return (0.5 if half else 1.0) * max((v - target) ** 2, (near - target) ** 2)

    def loss(x):
        if not by_row:
            return _token_mean(mask, lambda b, t: term(x, b, t))
        rows = [[term(x, b, t) for t in _places(row)] for b, row in enumerate(mask)]
        return sum(sum(row) / len(row) for row in rows) / len(rows)

    return _loss_and_gradient(loss, values)


def aggregate(losses, mask, microbatch, mode, max_length, *, empty_rows=None):
    sums = [sum((F(float(losses[b][t])) for t in _places(m)), F(0)) for b, m in enumerate(mask)]
    counts = [len(_places(m)) for m in mask]
    trained = sum(1 for n in counts if n)
    if mode == "token_mean":
        return {"loss": float(sum(sums) / sum(counts))}
    if mode == "sequence_mean":
        means = [s / n for s, n in zip(sums, counts, strict=True) if n]
        return {"loss": float(sum(means) / (len(counts) if empty_rows == "count" else trained))}
    rows = trained if empty_rows == "leave" else len(counts)
    return {"loss": float(sum(sums) / (rows * int(max_length)))}


def _weight(old, sampler, places, kind, low, high, root):
    weight = Decimal(1)
    for o, s in ((old[t], sampler[t]) for t in places):
        weight *= _exp(o) / _exp(s)
    if root and places:
        weight = weight ** (Decimal(1) / len(places))
    if kind == "truncate":
        return min(max(weight, _decimal(low)), _decimal(high))
    return weight if _decimal(low) <= weight <= _decimal(high) else Decimal(0)


def importance_weights(old, sampler, mask, kind, level, low, high):
    def one(b, t):
        places = [t] if level == "token" else _places(mask[b])
        if not mask[b][t]:
            return 0
        return _weight(old[b], sampler[b], places, kind, low, high, level == "geometric")

    return {"weights": _table(mask, one)}


def weighted_loss(losses, old, sampler, mask, kind, low, high, *, rejected="leave"):
    total, count = 0.0, 0
    for b, row in enumerate(mask):
        for t in _places(row):
            weight = float(_weight(old[b], sampler[b], [t], kind, low, high, False))
            total += weight * float(losses[b][t])
            count += kind == "truncate" or rejected == "stay" or weight > 0
    return {"loss": total / count}


def adaptive_kl(start, target, horizon, kl, steps):
    coefficient, out = F(float(start)), []
    for now, n in zip(kl, steps, strict=True):
        error = F(float(now)) / F(float(target)) - 1
        error = min(max(error, F(-1, 5)), F(1, 5))
        coefficient *= 1 + error * int(n) / int(horizon)
        out.append(float(coefficient))
    return {"coefficients": out}
