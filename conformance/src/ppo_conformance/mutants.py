"""Known errors as functions: what a wrong implementation returns.

``found`` says in which public report the error was seen.  Errors without it are the usual slips of
the formula.  A mutant that equals a reference of another convention is none.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppo_conformance.references import first as ref

Answer = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    """An error: ``answer(**inputs)`` is what it returns."""

    family: str
    name: str
    found: str
    answer: Callable[..., Answer]

    def __call__(self, **inputs: Any) -> Answer:
        """What the wrong implementation returns; its NaN and its warnings are its own."""
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return self.answer(**inputs)

    @property
    def label(self) -> str:
        """One line for people."""
        return f"{self.name} ({self.found})" if self.found else self.name


MUTANTS: list[Mutant] = []


def _error(family: str, name: str, found: str = "") -> Callable[[Callable], Callable]:
    def add(answer):
        MUTANTS.append(Mutant(family, name, found, answer))
        return answer

    return add


def _inputs(family: str, name: str, found: str = "", **changes: Callable[[dict], Any]) -> None:
    """The right formula on wrong inputs: ``changes`` are functions of the inputs."""

    def answer(**i):
        return getattr(ref, family)(**{**i, **{k: change(i) for k, change in changes.items()}})

    MUTANTS.append(Mutant(family, name, found, answer))


def of(family: str) -> list[Mutant]:
    """The known errors of a family."""
    return [m for m in MUTANTS if m.family == family]


def _everywhere(i):
    return np.ones_like(i["mask"])


def _up_to_last(i):
    """The mask with its holes filled."""
    return np.flip(np.logical_or.accumulate(np.flip(i["mask"], 1), 1), 1)


# -- distributions -----------------------------------------------------------------------------

_TEMPERATURE = "OpenRLHF #857: training ignored the sampling temperature until March 2025"
_inputs("logprobs", "temperature is ignored", _TEMPERATURE, temperature=lambda i: 1.0)
_inputs("logprobs", "temperature multiplies the logits", temperature=lambda i: 1 / i["temperature"])
_inputs(
    "logprobs",
    "logits are one position late",
    "open-instruct #1549: shifted twice under sequence parallelism",
    logits=lambda i: np.roll(i["logits"], -1, 1),
)


@_error("logprobs", "the log-probability is divided by the temperature, not the logits")
def _(logits, tokens, mask, temperature):
    return {"logprobs": ref.logprobs(logits, tokens, mask, 1.0)["logprobs"] / temperature}


@_error("logprobs", "logits are not normalized")
def _(logits, tokens, mask, temperature):
    return {"logprobs": np.take_along_axis(logits, tokens[..., None], -1)[..., 0] / temperature}


_inputs("entropy", "temperature is ignored", temperature=lambda i: 1.0)


@_error("entropy", "the mean includes padding", "TRL #6809: policy/entropy_avg over padding")
def _(logits, mask, temperature):
    each = ref.entropy(logits, mask, temperature)["entropy"]
    return {"entropy": each, "mean": each.mean()}


@_error("entropy", "in bits")
def _(**i):
    return {k: v / np.log(2) for k, v in ref.entropy(**i).items()}


@_error(
    "entropy",
    "minus the log-probability of the likeliest token",
    "TRL #2022, #2281: wrong or negative entropy",
)
def _(logits, mask, temperature):
    each = -ref._log_softmax(logits / temperature).max(-1)
    return {"entropy": each, "mean": each[mask].mean()}


@_error("entropy", "mean of the means of rows")
def _(**i):
    each, m = ref.entropy(**i)["entropy"], i["mask"]
    return {"entropy": each, "mean": np.mean([each[b, m[b]].mean() for b in range(len(m))])}


_inputs("kl", "policy and reference are swapped", logp=lambda i: i["ref"], ref=lambda i: i["logp"])


@_error("kl", "k2 without the factor 1/2")
def _(**i):
    return {"kl": ref.kl(**i)["kl"] * (2 if i["estimator"] == "k2" else 1)}


@_error("kl", "k3 of the ratio p/q, not q/p")
def _(logp, ref, mask, estimator):
    gap = logp - ref
    kinds = {"k1": gap, "k2": gap**2 / 2, "k3": np.expm1(gap) - gap, "abs": abs(gap)}
    return {"kl": kinds[estimator]}


@_error("kl", "k1 without its sign")
def _(**i):
    return {"kl": np.abs(ref.kl(**i)["kl"])}


@_error("kl", "abs keeps its sign")
def _(**i):
    return ref.kl(**{**i, "estimator": {"abs": "k1"}.get(i["estimator"], i["estimator"])})


@_error("kl", "bounded to -10 .. 10")
def _(**i):
    return {"kl": np.clip(ref.kl(**i)["kl"], -10, 10)}


@_error("kl", "k3 bounded to -10 .. 10")
def _(**i):
    return {
        "kl": np.clip(ref.kl(**i)["kl"], *((-10, 10) if i["estimator"] == "k3" else (None, None)))
    }


_inputs(
    "full_kl",
    "KL of the reference to the policy",
    logits=lambda i: i["ref_logits"],
    ref_logits=lambda i: i["logits"],
)


@_error("full_kl", "mean over the vocabulary, not the sum")
def _(**i):
    return {"kl": ref.full_kl(**i)["kl"] / i["logits"].shape[-1]}


@_error("full_kl", "the negative")
def _(**i):
    return {"kl": -ref.full_kl(**i)["kl"]}


# -- rewards -----------------------------------------------------------------------------------


def _place(i, place, mask=None):
    here = np.arange(i["mask"].shape[1])[None] == place[:, None]
    m = i["mask"] if mask is None else mask
    return {
        "rewards": np.where(m, -i["kl_coef"] * (i["logp"] - i["ref"]), 0)
        + here * i["scores"][:, None]
    }


@_error(
    "token_rewards",
    "the score stands one slot after the last token",
    "so in the code of arXiv:2403.17031 and in TRL's PPO 0.12 to 1.12, where the value does, too",
)
def _(**i):
    return _place(i, np.minimum(ref._last(i["mask"]) + 1, i["mask"].shape[1] - 1))


@_error("token_rewards", "the score stands in the last column", "TRL #1893: reward on a pad slot")
def _(**i):
    return _place(i, np.full(len(i["mask"]), i["mask"].shape[1] - 1))


@_error("token_rewards", "the score stands on the last token of the row, tool output included")
def _(**i):
    return _place(i, ref._last(i["attention_mask"]))


@_error("token_rewards", "the score stands on the token before the last")
def _(**i):
    return _place(i, ref._last(i["mask"]) - 1)


@_error("token_rewards", "the score stands at the end of the first turn")
def _(**i):
    first = i["mask"].argmax(1)
    stops = ~i["mask"] & (np.arange(i["mask"].shape[1])[None] > first[:, None])
    return _place(i, np.where(stops.any(1), stops.argmax(1) - 1, i["mask"].shape[1] - 1))


@_error("token_rewards", "the place of the score is the number of tokens, holes not counted")
def _(**i):
    return _place(i, i["mask"].sum(1) - 1)


_inputs("token_rewards", "the KL is a bonus", kl_coef=lambda i: -i["kl_coef"])
_inputs("token_rewards", "the KL penalty is missing", kl_coef=lambda i: 0.0)


@_error("token_rewards", "the score replaces the KL of the last token")
def _(**i):
    out = ref.token_rewards(**i)["rewards"].copy()
    for b, t in enumerate(ref._last(i["mask"])):
        if t >= 0:
            out[b, t] = i["scores"][b]
    return {"rewards": out}


@_error("token_rewards", "the score stands on every token")
def _(**i):
    alone = ref.token_rewards(**{**i, "scores": 0 * i["scores"]})["rewards"]
    return {"rewards": alone + i["mask"] * i["scores"][:, None]}


_inputs("overlong", "the ramp starts at the limit", longest=lambda i: i["longest"] + i["buffer"])


@_error("overlong", "no floor at -1")
def _(lengths, longest, buffer):
    return {"penalty": np.minimum((longest - buffer - lengths) / buffer, 0)}


@_error("overlong", "the penalty is a bonus")
def _(**i):
    return {"penalty": -ref.overlong(**i)["penalty"]}


@_error("overlong", "a step instead of a ramp")
def _(lengths, longest, buffer):
    return {"penalty": -(lengths > longest - buffer).astype(float)}


@_error("overlong", "nothing at the limit itself")
def _(lengths, longest, buffer):
    return {
        "penalty": np.where(
            lengths >= longest, 0, ref.overlong(lengths, longest, buffer)["penalty"]
        )
    }


@_error("eos_penalty", "replaced and subtracted are mixed up", "TRL 0.10 and 0.11 differ (#2033)")
def _(**i):
    return ref.eos_penalty(**{**i, "how": {"replace": "subtract"}.get(i["how"], "replace")})


_inputs("eos_penalty", "responses that ended are penalized", ended=lambda i: ~i["ended"])
_inputs("eos_penalty", "the penalty has no effect", ended=lambda i: np.ones_like(i["ended"]))


@_error("eos_penalty", "the penalty is added", "the sign of missing_eos_penalty")
def _(scores, ended, penalty, how):
    return {"scores": np.where(ended, scores, scores + penalty)}


@_error(
    "eos_penalty", "lost for a penalty of 0", "of the kind of OpenRLHF #1219: 0.0 taken as missing"
)
def _(**i):
    return ref.eos_penalty(**i) if i["penalty"] else {"scores": i["scores"]}


@_error("response_mask", "the end token itself is left out", "TRL 1.12: pad == eos masks the EOS")
def _(tokens, eos):
    return {"mask": np.cumsum(tokens == eos, 1) == 0}


@_error("response_mask", "every end token is left out", "padding with the id of EOS")
def _(tokens, eos):
    return {"mask": tokens != eos}


@_error("response_mask", "cut at the last end token")
def _(tokens, eos):
    ids = tokens.shape[1]
    last = np.where((tokens == eos).any(1), ids - 1 - np.flip(tokens == eos, 1).argmax(1), ids - 1)
    return {"mask": np.arange(ids)[None] <= last[:, None]}


@_error("response_mask", "a response without an end token is empty")
def _(tokens, eos):
    return {"mask": ref.response_mask(tokens, eos)["mask"] & (tokens == eos).any(1)[:, None]}


@_error("running_moments", "moments of the newest update alone")
def _(scores):
    return {"mean": scores.mean(1), "std": scores.std(1, ddof=1)}


@_error("running_moments", "the distance between the means of updates is forgotten")
def _(scores):
    n = np.arange(1, len(scores) + 1)
    squares = np.cumsum(((scores - scores.mean(1, keepdims=True)) ** 2).sum(1))
    return {
        "mean": np.cumsum(scores.mean(1)) / n,
        "std": np.sqrt(squares / (n * scores.shape[1] - 1)),
    }


@_error("running_moments", "deviation divided by n")
def _(scores):
    seen = [scores[: n + 1].ravel() for n in range(len(scores))]
    return {"mean": np.array([x.mean() for x in seen]), "std": np.array([x.std() for x in seen])}


# -- advantages --------------------------------------------------------------------------------

_inputs(
    "gae",
    "bootstraps over padding: values outside the mask count",
    "ROLL, PR #447: critic values outside the mask fed the bootstrap",
    mask=_everywhere,
)


@_error("gae", "bootstraps a finished response from the value of the padding after it")
def _(**i):
    last = ref._last(i["mask"])
    after = np.take_along_axis(
        np.pad(i["values"], ((0, 0), (0, 1))), np.maximum(last + 1, 0)[:, None], 1
    )[:, 0]
    return ref.gae(**{**i, "last_values": np.where(i["last_values"] == 0, after, i["last_values"])})


_inputs(
    "gae",
    "steps over observation tokens: gamma and lambda decay through them, with V = 0",
    "verl #2337, miles #1827: GAE stepped over observation tokens",
    mask=lambda i: i["attention_mask"],
    rewards=lambda i: i["rewards"] * i["mask"],
    values=lambda i: i["values"] * i["mask"],
)
_inputs(
    "gae",
    "values of observation tokens are used",
    "miles #1827",
    mask=lambda i: i["attention_mask"],
    rewards=lambda i: i["rewards"] * i["mask"],
)
_inputs(
    "gae",
    "a response that was cut off gets no bootstrap",
    "TRL PPO: V after the last token is 0 for truncated responses",
    last_values=lambda i: 0 * i["last_values"],
)


@_error("gae", "the trace ends at an observation: later rewards do not reach earlier turns")
def _(**i):
    out = {k: np.zeros(i["mask"].shape) for k in ("advantages", "returns")}
    for b, m in enumerate(i["mask"]):
        edges = np.flatnonzero(np.diff(np.r_[0, m.astype(int), 0]))
        for n, (start, stop) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
            part = {k: i[k][b : b + 1, start:stop] for k in ("rewards", "values", "mask")}
            last = i["last_values"][b : b + 1] * (2 * n + 2 == len(edges))
            found = ref.gae(**{**i, **part, "last_values": last})
            for k, x in found.items():
                out[k][b, start:stop] = x[0]
    return out


_inputs("gae", "lambda is ignored (1)", lam=lambda i: 1.0)
_inputs("gae", "gamma is ignored (1)", gamma=lambda i: 1.0)


def _loop(i, step):
    """GAE by a loop: step(r, v, next, trace) -> (advantage, trace)."""
    out = np.zeros(i["mask"].shape)
    for b, m in enumerate(i["mask"]):
        following, trace = i["last_values"][b], 0.0
        for t in reversed(np.flatnonzero(m)):
            v = i["values"][b, t]
            out[b, t], trace = step(i["rewards"][b, t], v, following, trace)
            following = v
    return {"advantages": out, "returns": out + np.where(i["mask"], i["values"], 0)}


@_error("gae", "the trace decays by lambda alone, without gamma")
def _(**i):
    def step(r, v, following, trace):
        a = r + i["gamma"] * following - v + i["lam"] * trace
        return a, a

    return _loop(i, step)


@_error("gae", "the trace decays by gamma alone, lambda weighs only the next value")
def _(**i):
    def step(r, v, following, trace):
        a = r + i["gamma"] * i["lam"] * following - v + i["gamma"] * trace
        return a, a

    return _loop(i, step)


@_error("gae", "one-step advantages: no trace at all")
def _(**i):
    return _loop(i, lambda r, v, following, trace: (r + i["gamma"] * following - v, 0.0))


@_error("gae", "runs from the first token to the last")
def _(**i):
    flipped = {k: np.flip(i[k], 1) for k in ("rewards", "values", "mask")}
    return {k: np.flip(x, 1) for k, x in ref.gae(**{**i, **flipped}).items()}


@_error("gae", "the values are one position late", "critic shift by one token")
def _(**i):
    return ref.gae(**{**i, "values": np.roll(i["values"], 1, 1)})


@_error("gae", "the return is the advantage, without V")
def _(**i):
    out = ref.gae(**i)
    return {**out, "returns": out["advantages"]}


@_error("gae", "the return is made of whitened advantages", "arXiv:2403.17031, row 40: A + V first")
def _(**i):
    out = ref.gae(**i)
    a, m = out["advantages"], i["mask"]
    scaled = np.where(m, (a - a[m].mean()) / (a[m].std() + 1e-8), 0)
    return {"advantages": a, "returns": scaled + np.where(m, i["values"], 0)}


@_error("gae", "advantages from the first row alone", "PipelineRL #54")
def _(**i):
    out = ref.gae(**i)
    return {k: np.broadcast_to(x[:1], x.shape) for k, x in out.items()}


_inputs("decoupled_gae", "one lambda for both", lam_value=lambda i: i["lam"])
_inputs(
    "decoupled_gae",
    "the lambdas are swapped",
    lam=lambda i: i["lam_value"],
    lam_value=lambda i: i["lam"],
)


@_error("decoupled_gae", "advantages are the value's targets minus V")
def _(**i):
    out = ref.decoupled_gae(**i)
    return {**out, "advantages": out["returns"] - np.where(i["mask"], i["values"], 0)}


_inputs("adaptive_lambda", "the length counts padding", mask=_everywhere)
_inputs("adaptive_lambda", "the length counts observation tokens", "miles #1827", mask=_up_to_last)


@_error("adaptive_lambda", "negative for short responses")
def _(mask, alpha):
    return {"lam": 1 - 1 / (alpha * np.maximum(mask.sum(1), 1))}


@_error("adaptive_lambda", "one lambda, of the mean length")
def _(mask, alpha):
    return {"lam": np.full(len(mask), max(1 - 1 / (alpha * mask.sum(1).mean()), 0))}


@_error("turn_gae", "every token is an action")
def _(rewards, values, turns, mask, gamma, lam):
    out = ref.gae(rewards, values, mask, gamma, lam, np.zeros(len(mask)))
    return {"advantages": out["advantages"]}


@_error("turn_gae", "V of a turn is the mean over its tokens")
def _(**i):
    v = np.zeros(i["mask"].shape)
    for b, row in enumerate(i["turns"]):
        for k in range(row.max() + 1):
            v[b, row == k] = i["values"][b, row == k].mean()
    return ref.turn_gae(**{**i, "values": v})


@_error("turn_gae", "V of the last token of a turn")
def _(**i):
    flipped = {k: np.flip(i[k], 1) for k in ("rewards", "values", "mask", "turns")}
    return {"advantages": np.flip(ref.turn_gae(**{**i, **flipped})["advantages"], 1)}


@_error("turn_gae", "only the first token of a turn has the advantage")
def _(**i):
    starts = i["mask"] & (
        i["turns"] != np.pad(i["turns"], ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    )
    return {"advantages": ref.turn_gae(**i)["advantages"] * starts}


@_error("turn_gae", "all turns share the advantage of the last one")
def _(**i):
    a, out = ref.turn_gae(**i)["advantages"], np.zeros(i["mask"].shape)
    for b, t in enumerate(ref._last(i["mask"])):
        out[b] = a[b, t]
    return {"advantages": out}


@_error("turn_gae", "the reward of a turn is that of its last token")
def _(**i):
    ends = i["turns"] != np.pad(i["turns"], ((0, 0), (0, 1)), constant_values=-1)[:, 1:]
    return ref.turn_gae(**{**i, "rewards": i["rewards"] * ends})


_inputs("discounted_returns", "rewards of the padding count", mask=_everywhere)
_inputs(
    "discounted_returns",
    "gamma decays through observation tokens",
    "miles #1827",
    mask=lambda i: i["attention_mask"],
    rewards=lambda i: i["rewards"] * i["mask"],
)


@_error(
    "discounted_returns",
    "the sum starts anew at an observation: later rewards do not reach earlier turns",
    "verl #7278: REINFORCE++ until August 2026",
)
def _(rewards, mask, gamma, attention_mask):
    out, total = np.zeros(mask.shape), np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        total = np.where(mask[:, t], rewards[:, t] + gamma * total, 0.0)
        out[:, t] = total
    return {"returns": out}


_inputs("discounted_returns", "gamma is ignored (1)", gamma=lambda i: 1.0)


@_error("discounted_returns", "sum of the past, not of the future")
def _(**i):
    flipped = {k: np.flip(i[k], 1) for k in ("rewards", "mask")}
    return {"returns": np.flip(ref.discounted_returns(**{**i, **flipped})["returns"], 1)}


_inputs(
    "whiten",
    "padding is part of mean and deviation",
    "masks of GAE and whitening",
    mask=_everywhere,
)


@_error("whiten", "every row by itself", "OpenRLHF #1250: masked_normalize over the wrong axis")
def _(x, mask, rank, center):
    rows = [
        ref.whiten(x[b : b + 1], mask[b : b + 1], rank, center)["whitened"][0]
        for b in range(len(x))
    ]
    return {"whitened": np.stack(rows)}


_inputs("whiten", "the mean is removed always", center=lambda i: True)
_inputs("whiten", "the mean is never removed", center=lambda i: False)


@_error("whiten", "divided by the variance")
def _(**i):
    x, m = i["x"], i["mask"]
    out = (x - x[m].mean()) / x[m].var(ddof=1)
    return {"whitened": out if i["center"] else out + x[m].mean()}


@_error("whiten", "the mean is put back scaled")
def _(**i):
    x = i["x"]
    return {
        "whitened": ref.whiten(**i)["whitened"] if i["center"] else x / x[i["mask"]].std(ddof=1)
    }


def _by_position(i):
    """Groups of equal size in the order of rows."""
    size = len(i["group"]) // len(np.unique(i["group"]))
    return np.arange(len(i["group"])) // max(size, 1)


_POSITION = "groups are taken by position"
_INDEXED = "open-instruct #1483: prompts and responses mis-indexed"
_inputs("leave_one_out", _POSITION, _INDEXED, group=_by_position)
_inputs(
    "leave_one_out",
    "a dropped response counts in the baseline",
    "OpenRLHF PR #1239: samples without actions shift the group's baseline",
    valid=lambda i: np.ones_like(i["valid"]),
)


@_error("leave_one_out", "the response is part of its own baseline")
def _(scores, group, valid):
    return ref.group_normalize(scores, group, valid, "none")


@_error("leave_one_out", "divided by k, not by k - 1")
def _(scores, group, valid):
    out = np.zeros(len(scores))
    for rows in ref._groups(group, valid):
        out[rows] = scores[rows] - (scores[rows].sum() - scores[rows]) / len(rows)
    return {"advantages": out}


@_error("leave_one_out", "the baseline is the mean of the other rows of the batch")
def _(scores, group, valid):
    return ref.leave_one_out(scores, 0 * group, valid)


@_error("leave_one_out", "a dropped response counts as a score of 0", "None rewards filled with 0")
def _(scores, group, valid):
    return ref.leave_one_out(np.where(valid, scores, 0), group, np.ones_like(valid))


_inputs(
    "group_normalize",
    _POSITION,
    "AReaL #1454: group normalization assumed equal group sizes",
    group=_by_position,
)
_inputs(
    "group_normalize",
    "a dropped response counts in mean and deviation",
    "OpenRLHF PR #1239",
    valid=lambda i: np.ones_like(i["valid"]),
)
_inputs("group_normalize", "mean and deviation of the whole batch", group=lambda i: 0 * i["group"])
_inputs("group_normalize", "no division by the deviation", scale=lambda i: "none")
_inputs(
    "group_normalize", "the deviation of the group, whatever was asked", scale=lambda i: "group"
)


@_error(
    "group_normalize", "a dropped response counts as a score of 0", "None rewards filled with 0"
)
def _(scores, group, valid, scale):
    return ref.group_normalize(np.where(valid, scores, 0), group, np.ones_like(valid), scale)


def _rounding(scores, group, valid, scale, eps, flat=False):
    """In float32 the mean of equal scores is a rounding error away from them."""
    out = ref.group_normalize(scores, group, valid, scale)["advantages"]
    x = np.asarray(scores, np.float32)
    for rows in ref._groups(group, valid):
        if scale == "group" and len(rows) > 1:
            centered = x[rows] - np.add.accumulate(x[rows])[-1] / np.float32(len(rows))
            squares = (centered.astype(float) ** 2).sum()
            std = np.sqrt(squares / (len(rows) - 1)) if not flat or np.ptp(x[rows]) else 0.0
            out[rows] = centered / (std + eps)
    return {"advantages": out}


for _eps, _flat in (
    *((1e-4, False), (1e-6, False), (1e-8, False)),
    *((1e-6, True), (1e-8, True), (1e-9, True)),
):
    _std = "0" if _flat else "of rounding"
    _error("group_normalize", f"equal scores: a rounded mean, a std {_std}, epsilon {_eps:g}")(
        functools.partial(_rounding, eps=_eps, flat=_flat)
    )


@_error("group_normalize", "divided by the variance")
def _(scores, group, valid, scale):
    out = ref.group_normalize(scores, group, valid, scale)["advantages"].copy()
    for rows in ref._groups(group, valid):
        if scale == "group" and len(rows) > 1 and scores[rows].std() > 1e-5:
            out[rows] /= scores[rows].std(ddof=1)
    return {"advantages": out}


# -- losses ------------------------------------------------------------------------------------


def _mean(i, each, gradient):
    m = i["mask"]
    return {
        "loss": np.where(m, each, 0).sum() / m.sum(),
        "gradient": np.where(m, gradient, 0) / m.sum(),
    }


def _ratio(i):
    return np.exp(np.where(i["mask"], i["logp"] - i["old"], 0.0))


def _of_losses(families, name, found, change):
    for family in families:
        _inputs(family, name, found, **change)


_ALL = ("ppo_clip", "dual_clip", "double_sided", "cispo", "gspo")
_of_losses(
    _ALL, "the sign of the advantage is flipped", "", {"advantages": lambda i: -i["advantages"]}
)
_of_losses(_ALL, "padding is part of the loss", "verl #2506", {"mask": _everywhere})
_of_losses(
    ("ppo_clip", "dual_clip", "gspo"),
    "clip-higher is ignored: the upper bound is the lower one",
    "",
    {"clip_high": lambda i: i["clip_low"]},
)
_of_losses(
    ("ppo_clip", "gspo"),
    "the bounds are swapped",
    "",
    {"clip_high": lambda i: i["clip_low"], "clip_low": lambda i: i["clip_high"]},
)
_of_losses(
    ("ppo_clip", "gspo"),
    "no clipping at all",
    "",
    {"clip_low": lambda i: 1.0, "clip_high": lambda i: 1e9},
)
_of_losses(
    ("ppo_clip", "dual_clip"),
    "advantages stand where the mask belongs",
    "verl #2506: advantages passed as response_mask",
    {"mask": lambda i: i["advantages"] != 0},
)


@_error("ppo_clip", "maximum and minimum are mixed up")
def _(**i):
    r, a = _ratio(i), i["advantages"]
    c = np.clip(r, 1 - i["clip_low"], 1 + i["clip_high"])
    return _mean(i, np.minimum(-r * a, -c * a), np.where(-r * a <= -c * a, -r * a, 0))


@_error("ppo_clip", "only the clipped term, without the minimum")
def _(**i):
    r, a = _ratio(i), i["advantages"]
    inside = (r >= 1 - i["clip_low"]) & (r <= 1 + i["clip_high"])
    bounded = np.clip(r, 1 - i["clip_low"], 1 + i["clip_high"])
    return _mean(i, -bounded * a, np.where(inside, -r * a, 0))


_inputs(
    "ppo_clip",
    "the ratio is always 1: the anchor is computed with the new weights",
    "SkyRL #1315: old_logprobs recomputed, so that nothing is clipped",
    old=lambda i: i["logp"],
)


@_error("ppo_clip", "zero gradient everywhere", "mlx-lm-lora #50: exactly zero policy gradient")
def _(**i):
    return {"loss": ref.ppo_clip(**i)["loss"], "gradient": 0.0 * i["logp"]}


@_error("ppo_clip", "the ratio is upside down, old / new")
def _(**i):
    out = ref.ppo_clip(**{**i, "logp": i["old"], "old": i["logp"]})
    return {"loss": out["loss"], "gradient": -out["gradient"]}


@_error("ppo_clip", "mean over rows of the mean over tokens: the weights of GRPO")
def _(**i):
    rows = np.flatnonzero(i["mask"].any(1))
    names = ("logp", "old", "advantages", "mask")
    parts = [ref.ppo_clip(**{**i, **{k: i[k][b : b + 1] for k in names}}) for b in rows]
    gradient = np.zeros(i["mask"].shape)
    for b, part in zip(rows, parts, strict=True):
        gradient[b] = part["gradient"][0] / len(rows)
    return {"loss": np.mean([p["loss"] for p in parts]), "gradient": gradient}


@_error("ppo_clip", "divided by the size of the batch, padding included")
def _(**i):
    share = i["mask"].sum() / i["mask"].size
    return {k: x * share for k, x in ref.ppo_clip(**i).items()}


@_error("ppo_clip", "summed over rows, mean over the columns")
def _(**i):
    return {k: x * len(i["mask"]) for k, x in ref.ppo_clip(**i).items()}


@_error(
    "dual_clip",
    "the ceiling is never used",
    "slime #2247, miles #1729: parsed and not forwarded",
)
def _(ceiling, **i):
    return ref.ppo_clip(**i)


@_error("dual_clip", "the ceiling bounds positive advantages, too")
def _(ceiling, **i):
    r, a = _ratio(i), i["advantages"]
    out = ref.dual_clip(**i, ceiling=ceiling)
    floor = -np.minimum(np.clip(r, 1 - i["clip_low"], 1 + i["clip_high"]), 1.0) * a
    each = np.where(
        a > 0, floor, -np.where(r > ceiling, ceiling, np.maximum(r, 1 - i["clip_low"])) * a
    )
    return {**out, "loss": np.where(i["mask"], each, 0).sum() / i["mask"].sum()}


@_error("dual_clip", "the loss is bounded and the gradient is not")
def _(ceiling, **i):
    return {**ref.dual_clip(**i, ceiling=ceiling), "gradient": ref.ppo_clip(**i)["gradient"]}


@_error("dual_clip", "the ceiling is 1 + c")
def _(ceiling, **i):
    return ref.dual_clip(**i, ceiling=1 + ceiling)


@_error("double_sided", "the mask follows the sign of the advantage, as in PPO")
def _(low, high, **i):
    r, a = _ratio(i), i["advantages"]
    kept = np.where(a > 0, r < 1 + high, r > 1 - low)
    each = np.where(kept, -r * a, 0.0)
    return _mean(i, each, each)


@_error("double_sided", "ratios are clipped, not masked")
def _(low, high, **i):
    r, a = _ratio(i), i["advantages"]
    inside = (r > 1 - low) & (r < 1 + high)
    return _mean(i, -np.clip(r, 1 - low, 1 + high) * a, np.where(inside, -r * a, 0))


@_error("double_sided", "masked tokens leave the denominator")
def _(low, high, **i):
    out, r = ref.double_sided(**i, low=low, high=high), _ratio(i)
    kept = (i["mask"] & (r > 1 - low) & (r < 1 + high)).sum()
    return {k: x * i["mask"].sum() / max(kept, 1) for k, x in out.items()}


@_error("double_sided", "only the upper bound acts")
def _(low, high, **i):
    return ref.double_sided(**i, low=1.0, high=high)


@_error("cispo", "the weight keeps its gradient: the loss of PPO without a minimum")
def _(top, **i):
    r, a = _ratio(i), i["advantages"]
    w = np.minimum(r, top)
    extra = np.where(r < top, r, 0) * i["logp"]
    return _mean(i, -w * a * i["logp"], -(w + extra) * a)


@_error("cispo", "tokens over the bound lose their gradient, as in PPO")
def _(top, **i):
    r, a = _ratio(i), i["advantages"]
    w = np.where(r <= top, r, 0)
    return _mean(i, -w * a * i["logp"], -w * a)


@_error("cispo", "the weight is not bounded")
def _(top, **i):
    return ref.cispo(**i, top=1e9)


@_error("cispo", "the bound is epsilon, not 1 + epsilon")
def _(top, **i):
    return ref.cispo(**i, top=top - 1)


@_error("gspo", "the product of the ratios, not its root")
def _(**i):
    n = i["mask"].sum(1)
    gap = np.where(i["mask"], i["logp"] - i["old"], 0).sum(1)
    spread = np.where(i["mask"], (gap / 1.0)[:, None] / 1.0, 0)
    out = ref.gspo(**{**i, "logp": spread, "old": 0 * spread})
    return {"loss": out["loss"], "gradient": out["gradient"] * n[:, None]}


@_error("gspo", "the root counts padding as length")
def _(**i):
    n, t = i["mask"].sum(1, keepdims=True), i["mask"].shape[1]
    gap = np.where(i["mask"], i["logp"] - i["old"], 0) * n / t
    out = ref.gspo(**{**i, "logp": gap, "old": 0 * gap})
    return {"loss": out["loss"], "gradient": out["gradient"] * n / t}


@_error("gspo", "ratios per token, as in GRPO")
def _(**i):
    a, m = i["advantages"][:, None] + 0 * i["logp"], i["mask"]
    r = _ratio(i)
    c = np.clip(r, 1 - i["clip_low"], 1 + i["clip_high"])
    free = np.where(a > 0, r <= 1 + i["clip_high"], r >= 1 - i["clip_low"])
    share = np.where(m, 1 / m.sum(1, keepdims=True) / len(m), 0)
    return {"loss": (share * np.maximum(-r * a, -c * a)).sum(), "gradient": -share * free * r * a}


@_error("gspo", "mean over tokens, so that long responses weigh more")
def _(**i):
    out = {"loss": 0.0, "gradient": np.zeros(i["mask"].shape)}
    for b, n in enumerate(i["mask"].sum(1)):
        row = {k: i[k][b : b + 1] for k in ("logp", "old", "advantages", "mask")}
        part, share = ref.gspo(**{**i, **row}), n / i["mask"].sum()
        out["loss"] += share * part["loss"]
        out["gradient"][b] = share * part["gradient"][0]
    return out


_inputs("value_loss", "padding is part of the loss", mask=_everywhere)
_inputs("value_loss", "no clipping", clip=lambda i: 1e9)


@_error("value_loss", "minimum of the two terms, not the maximum")
def _(values, old, returns, mask, clip):
    near = old + np.clip(values - old, -clip, clip)
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    inside = (np.abs(values - old) <= clip) | (plain <= clipped)
    i = {"mask": mask}
    return _mean(i, np.minimum(plain, clipped) / 2, np.where(inside, values - returns, 0))


@_error("value_loss", "only the clipped term")
def _(values, old, returns, mask, clip):
    near = old + np.clip(values - old, -clip, clip)
    inside = np.abs(values - old) <= clip
    return _mean({"mask": mask}, (near - returns) ** 2 / 2, np.where(inside, values - returns, 0))


@_error("value_loss", "clipped around the returns")
def _(values, old, returns, mask, clip):
    return ref.value_loss(values, returns, returns, mask, clip)


@_error("value_loss", "the values themselves are clipped to +-epsilon")
def _(values, old, returns, mask, clip):
    return ref.value_loss(values, 0 * old, returns, mask, clip)


@_error(
    "value_loss", "no gradient: the values are detached", "CoursIA #15256: a critic never trained"
)
def _(**i):
    return {**ref.value_loss(**i), "gradient": 0.0 * i["values"]}


@_error("value_loss", "rollout temperature divides the values", "slime #1928")
def _(**i):
    return ref.value_loss(**{**i, "values": i["values"] / 0.7})


def _parts(i):
    for k in np.unique(i["microbatch"]):
        rows = i["microbatch"] == k
        yield {
            **i,
            "losses": i["losses"][rows],
            "mask": i["mask"][rows],
            "microbatch": i["microbatch"][rows],
        }


@_error(
    "aggregate",
    "mean of the micro-batches' means",
    "verl #6957, OpenRLHF #1216, open-instruct #1161: depends on how the batch is cut",
)
def _(**i):
    return {"loss": np.nanmean([ref.aggregate(**p)["loss"] for p in _parts(i)])}


@_error(
    "aggregate",
    "only the last micro-batch counts",
    "open-instruct #1498, DeepSpeed #6550: ZeRO-2 kept one micro-batch's gradient",
)
def _(**i):
    last = [*_parts(i)][-1]
    whole, part = i["mask"].sum(), last["mask"].sum()
    share = part / whole if i["mode"] == "token_mean" else len(last["mask"]) / len(i["mask"])
    return {"loss": ref.aggregate(**last)["loss"] * share if part else 0.0}


@_error("aggregate", "summed over micro-batches without division")
def _(**i):
    return {"loss": np.nansum([ref.aggregate(**p)["loss"] for p in _parts(i)])}


@_error(
    "aggregate",
    "masked tokens stay in the denominator",
    "TRL #6369: dapo, cispo, vespo with mask_truncated_completions",
)
def _(**i):
    losses = np.where(i["mask"], i["losses"], 0.0)
    return ref.aggregate(**{**i, "losses": losses, "mask": _everywhere(i)})


_inputs("aggregate", "padding is part of the loss", mask=_everywhere)


@_error("aggregate", "divided by the longest response, not by a constant")
def _(**i):
    longest = i["mask"].sum(1).max() if i["mode"] == "constant" else i["max_length"]
    return ref.aggregate(**{**i, "max_length": longest})


@_error("aggregate", "token and sequence means are mixed up")
def _(**i):
    other = {"token_mean": "sequence_mean", "sequence_mean": "token_mean"}.get(i["mode"], i["mode"])
    return ref.aggregate(**{**i, "mode": other})


# -- corrections and controllers ---------------------------------------------------------------

for _family in ("importance_weights", "weighted_loss"):
    _inputs(
        _family,
        "the weight is upside down, sampler / learner",
        old=lambda i: i["sampler"],
        sampler=lambda i: i["old"],
    )
    _inputs(_family, "the lower bound is ignored", low=lambda i: 0.0)
    _inputs(_family, "weights are clipped instead of masked", kind=lambda i: "truncate")
    _inputs(
        _family,
        "no correction",
        "miles #1829: stale data without any correction, by default",
        sampler=lambda i: i["old"],
    )
_inputs(
    "importance_weights", "the token's weight, whatever level was asked", level=lambda i: "token"
)
_inputs(
    "importance_weights",
    "the product of the weights, not its root",
    level=lambda i: {"geometric": "sequence"}.get(i["level"], i["level"]),
)


@_error("importance_weights", "the root counts padding as length")
def _(**i):
    if i["level"] != "geometric":
        return ref.importance_weights(**i)
    scale = i["mask"].sum(1, keepdims=True) / i["mask"].shape[1]
    gap = np.where(i["mask"], i["old"] - i["sampler"], 0) * scale
    return ref.importance_weights(**{**i, "old": gap, "sampler": 0 * gap})


_inputs("importance_weights", "padding is part of a response's weight", mask=_everywhere)


@_error("importance_weights", "the mask keeps tokens with weight 1")
def _(**i):
    out = ref.importance_weights(**i)["weights"]
    return {"weights": np.where(out > 0, 1.0, 0.0) if i["kind"] == "mask" else out}


@_error("importance_weights", "the bounds act on the log of the weight")
def _(**i):
    gap = np.where(i["mask"], i["old"] - i["sampler"], 0)
    return {"weights": np.exp(np.clip(gap, i["low"], i["high"]))}


_inputs("weighted_loss", "padding is part of the loss", mask=_everywhere)


@_error("weighted_loss", "divided by the sum of the weights")
def _(losses, old, sampler, mask, kind, low, high):
    w = np.where(mask, ref._bounded_weights(old, sampler, mask, kind, "token", low, high), 0)
    return {"loss": (w * losses).sum() / w.sum()}


@_error("adaptive_kl", "the error is not bounded to 20%")
def _(start, target, horizon, kl, steps):
    return {"coefficients": start * np.cumprod(1 + (kl / target - 1) * steps / horizon)}


@_error("adaptive_kl", "the coefficient falls when the KL is too large")
def _(start, target, horizon, kl, steps):
    error = np.clip(kl / target - 1, -0.2, 0.2)
    return {"coefficients": start * np.cumprod(1 - error * steps / horizon)}


_inputs("adaptive_kl", "responses of one rank alone", steps=lambda i: np.asarray(i["steps"]) // 2)
_inputs(
    "adaptive_kl",
    "one step per update, whatever its size",
    steps=lambda i: 1 + 0 * np.asarray(i["steps"]),
)


@_error("adaptive_kl", "the change is added, not multiplied")
def _(start, target, horizon, kl, steps):
    error = np.clip(kl / target - 1, -0.2, 0.2)
    return {"coefficients": start + np.cumsum(error * steps / horizon)}


@_error("adaptive_kl", "state lost after every update", "verl: the value is not in its checkpoints")
def _(start, target, horizon, kl, steps):
    error = np.clip(kl / target - 1, -0.2, 0.2)
    return {"coefficients": start * (1 + error * steps / horizon)}
