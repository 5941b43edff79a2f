"""Inputs of the cases, and the script that writes ``cases/*.json``.

    python -m ppo_conformance.recipes

Numbers are multiples of 1/64, so that they are the same in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ppo_conformance import compare, mutants
from ppo_conformance.cases import FOLDER, Case
from ppo_conformance.families import FAMILIES
from ppo_conformance.references import first

Recipe = tuple[str, str, dict[str, Any]]  # name, about, inputs
RECIPES: dict[str, Callable[[], list[Recipe]]] = {}
BIG = 1000.0  # what stands in padding
FULL = [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
PADDED = [[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
HOLES = [[1, 1, 0, 0, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0]]
OBSERVATION_LAST = [[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 1, 1]]
LEFT = [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
MASKS = {
    "full": (FULL, "no padding"),
    "padded": (PADDED, "rows of unequal length; padding holds large numbers"),
    "holes": (HOLES, "tool output between the policy's tokens; it holds large numbers"),
    "observation last": (OBSERVATION_LAST, "some rows end with tool output"),
    "left padding": (LEFT, "padding on the left"),
    "one token": ([[1, 0, 0], [1, 0, 0], [0, 1, 0]], "rows with a single token"),
}


def _recipes(family: str):
    def add(function):
        RECIPES[family] = function
        return function

    return add


class Numbers:
    """Seeded numbers that float32 holds exactly."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0):
        """Multiples of 1/64."""
        return np.round(self.rng.normal(size=shape) * scale * 64) / 64

    def outside(self, x, mask, value: float = BIG):
        """``x`` with ``value`` outside the mask."""
        return np.where(mask, x, value)


def _masks(*names: str):
    for seed, name in enumerate(names or MASKS):
        table, about = MASKS[name]
        yield name, about, np.array(table, bool), Numbers(seed + 10)


def _after_the_end(mask):
    """Padding after the last token of each row."""
    return np.cumsum(mask[:, ::-1], 1)[:, ::-1] == 0


def _case(name, about, **inputs) -> Recipe:
    return name, about, inputs


# -- distributions -----------------------------------------------------------------------------


def _logits(n: Numbers, mask, words=5):
    return n.normal(*mask.shape, words, scale=2.0)


@_recipes("logprobs")
def _():
    settings = {"full": 1.0, "padded": 0.5, "holes": 2.0, "left padding": 0.75}
    for name, about, m, n in _masks(*settings):
        z, tokens = _logits(n, m), n.rng.integers(0, 5, m.shape)
        t = settings[name]
        yield _case(f"{name}, T {t}", about, logits=z, tokens=tokens, mask=m, temperature=t)
    m, n = np.array([[1, 1, 1]], bool), Numbers(1)
    z = _logits(n, m) * 64
    ids = z.argmin(-1)
    yield _case("large logits", "exp would overflow", logits=z, tokens=ids, mask=m, temperature=1.0)
    z = np.where(np.arange(5) < 2, _logits(n, m), -1e9)
    ids = np.array([[0, 1, 0]])
    about = "top-k: words that were not allowed have logit -1e9"
    yield _case("words left out", about, logits=z, tokens=ids, mask=m, temperature=0.5)
    z = np.zeros((1, 3, 4))
    about = "uniform over four words: -log 4"
    ids = np.array([[0, 1, 3]])
    yield _case("uniform", about, logits=z, tokens=ids, mask=m, temperature=0.7)


@_recipes("entropy")
def _():
    settings = {"full": 1.0, "padded": 0.5, "holes": 2.0, "left padding": 1.5}
    for name, about, m, n in _masks(*settings):
        t = settings[name]
        yield _case(f"{name}, T {t}", about, logits=_logits(n, m), mask=m, temperature=t)
    m = np.array([[1, 1]], bool)
    yield _case("uniform", "log 8", logits=np.zeros((1, 2, 8)), mask=m, temperature=0.5)
    z = np.array([[[40.0, 0, 0, 0], [0, 40.0, 0, 0]]])
    yield _case("certain", "0, not NaN", logits=z, mask=m, temperature=1.0)


@_recipes("kl")
def _():
    for kind in ("k1", "k2", "k3", "abs"):
        for name, about, m, n in _masks("padded", "holes"):
            p, q = -abs(n.normal(*m.shape)), -abs(n.normal(*m.shape))
            yield _case(f"{kind}, {name}", about, logp=p, ref=q, mask=m, estimator=kind)
    m = np.array([[1, 1, 1]], bool)
    p, q = np.array([[-1.0, -0.5, -2.0]]), np.array([[-1.0, -0.5, -2.0]])
    yield _case("k3, equal", "0", logp=p, ref=q, mask=m, estimator="k3")
    p, q = np.array([[-12.0, -6.0, -1.0]]), np.array([[-1.0, -1.0, -18.0]])
    for kind in ("k1", "k2", "k3"):
        about = "log-ratios of 5 to 17: libraries that bound the estimate differ here"
        yield _case(f"{kind}, far apart", about, logp=p, ref=q, mask=m, estimator=kind)
    p = np.array([[-1.0, -0.5, -2.0]])
    about = "differences of 1/4096: k3 by exp(x) - 1 - x loses digits in float32"
    near = p + np.array([[1, -1, 2]]) / 4096
    yield _case("k1, close", about, logp=p, ref=near, mask=m, estimator="k1")


@_recipes("full_kl")
def _():
    for name, about, m, n in _masks("full", "padded", "holes", "left padding"):
        yield _case(name, about, logits=_logits(n, m), ref_logits=_logits(n, m), mask=m)
    z = np.array([[[3.0, 1, 0, -1]]])
    m = np.array([[1]], bool)
    yield _case("equal", "0", logits=z, ref_logits=z + 5, mask=m)
    z, q = np.array([[[0.0, 0, -1e9]]]), np.array([[[0.0, 1.0, 2.0]]])
    about = "the policy cannot say one word: 0 log 0 = 0"
    yield _case("probability 0", about, logits=z, ref_logits=q, mask=m)


# -- rewards -----------------------------------------------------------------------------------


@_recipes("token_rewards")
def _():
    for name, about, m, n in _masks():
        p, q = -abs(n.normal(*m.shape)), -abs(n.normal(*m.shape))
        s = n.normal(len(m), scale=2.0)
        yield _case(name, about, scores=s, logp=p, ref=q, mask=m, kl_coef=0.125)
    m = np.array(PADDED, bool)
    n = Numbers(3)
    p, s = -abs(n.normal(*m.shape)), np.array([0.0, -1.5, 2.0])
    yield _case("beta 0", "scores alone", scores=s, logp=p, ref=p - 1, mask=m, kl_coef=0.0)
    m = np.array([[1, 1, 0], [0, 0, 0]], bool)
    p, s = np.full(m.shape, -1.0), np.array([1.0, 7.0])
    about = "a response without tokens has no reward"
    yield _case("empty response", about, scores=s, logp=p, ref=p - 0.5, mask=m, kl_coef=0.5)


@_recipes("overlong")
def _():
    share = np.array([0, 1, 50, 75, 76, 80, 88, 99, 100])  # percent of the limit
    limits = {
        "ramp": (100, 25),
        "short_buffer": (100, 1),
        "buffer is all": (100, 100),
        "paper": (20480, 4096),
    }
    yield from [
        _case(name, "", lengths=share * high // 100, longest=high, buffer=buffer)
        for name, (high, buffer) in limits.items()
    ]
    about = "a response of several turns may be longer than the limit of one: -1"
    yield _case("beyond the limit", about, lengths=np.array([64, 65, 200]), longest=64, buffer=16)


@_recipes("eos_penalty")
def _():
    s, e = np.array([2.0, -3.0, 0.5, 0.0]), np.array([1, 0, 0, 1], bool)
    yield from [
        _case(f"{how}, {p}", "", scores=s, ended=e, penalty=p, how=how)
        for how in ("replace", "subtract")
        for p in (-1.0, 1.0)
    ]
    yield _case(
        "replace by 0", "a penalty of 0 is one", scores=s, ended=e, penalty=0.0, how="replace"
    )
    about = "all of them end"
    yield _case("all ended", about, scores=s, ended=e | True, penalty=-1.0, how="replace")


@_recipes("response_mask")
def _():
    rows = {
        "one end": [[5, 6, 2, 0, 0], [5, 2, 0, 0, 0], [7, 8, 9, 5, 2]],
        "padding is the end token": [[5, 6, 2, 2, 2], [5, 2, 2, 2, 2], [2, 2, 2, 2, 2]],
        "no end": [[5, 6, 7, 8, 9], [5, 6, 2, 0, 0]],
        "tokens after the end": [[5, 2, 7, 2, 9], [5, 6, 2, 8, 8]],
        "at once": [[2, 0, 0], [2, 2, 0]],
        "id 0": [[5, 0, 3, 0, 1], [5, 6, 7, 8, 9]],
    }
    yield from [
        _case(name, "", tokens=np.array(x), eos=0 if name == "id 0" else 2)
        for name, x in rows.items()
    ]


@_recipes("running_moments")
def _():
    for seed, (name, shift) in enumerate(
        {"drift": 3.0, "steady": 0.0, "large mean": 1000.0}.items()
    ):
        x = Numbers(seed).normal(4, 6) + shift * np.arange(4)[:, None]
        yield _case(name, "", scores=x)
    yield _case("two scores", "", scores=np.array([[1.0, 3.0], [3.0, 5.0], [9.0, 9.0]]))


# -- advantages --------------------------------------------------------------------------------


def _trajectory(n: Numbers, m, fill=BIG):
    return {
        "rewards": n.outside(n.normal(*m.shape), m, 0.0),
        "values": n.outside(n.normal(*m.shape), m, fill),
        "mask": m,
    }


@_recipes("gae")
def _():
    zero = np.zeros(3)
    for name, about, m, n in _masks():
        x = _trajectory(n, m, 0.0 if name == "full" else BIG)
        yield _case(name, about, **x, gamma=0.9, lam=0.95, last_values=zero)
    m, n = np.array(PADDED, bool), Numbers(7)
    x = _trajectory(n, m, 0.0)
    for g, lam in ((1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.9, 1.0), (0.5, 0.5)):
        about = "zeros in the padding"
        yield _case(f"gamma {g}, lambda {lam}", about, **x, gamma=g, lam=lam, last_values=zero)
    about = "the first and the third row were cut off: V after their last token counts"
    after = np.array([2.0, 0.0, -1.5])
    yield _case("cut off", about, **x, gamma=0.9, lam=0.95, last_values=after)
    x = _trajectory(n, np.array(HOLES, bool))
    yield _case("cut off with holes", about, **x, gamma=0.9, lam=0.95, last_values=after)
    x["rewards"] = np.array([[0, 2.0, 0, 0, 0, 1.0, 0, 0], [0] * 7 + [3.0], [0, 0, 1.0] + [0] * 5])
    x["values"] = np.where(x["mask"], 0.5, -BIG)
    about = "rewards at the ends of turns, constant values, gamma 1, lambda 1"
    yield _case("turns, gamma 1", about, **x, gamma=1.0, lam=1.0, last_values=zero)
    x["rewards"] = np.where(x["mask"], 0.25, 0)
    x["values"] = np.where(x["mask"], 256.0, np.where(_after_the_end(x["mask"]), BIG, 0.0))
    about = "V = 256 on the policy's tokens, 0 on tool output"
    yield _case("large values", about, **x, gamma=1.0, lam=0.95, last_values=zero)


@_recipes("decoupled_gae")
def _():
    pairs = {
        "full": (0.95, 1.0),
        "padded": (0.5, 1.0),
        "holes": (0.95, 1.0),
        "left padding": (1.0, 0.5),
    }
    for name, about, m, n in _masks(*pairs):
        lam, target = pairs[name]
        yield _case(name, about, **_trajectory(n, m), gamma=0.9375, lam=lam, lam_value=target)
    x = _trajectory(Numbers(5), np.array(PADDED, bool))
    yield _case(
        "lambda 0 and 1", "one step and Monte Carlo", **x, gamma=1.0, lam=0.0, lam_value=1.0
    )


@_recipes("adaptive_lambda")
def _():
    yield from [
        _case(name, about, mask=m, alpha=0.5)
        for name, about, m, _ in _masks("padded", "holes", "left padding")
    ]
    long = np.arange(64)[None] < np.array([[64], [20], [21], [5]])
    about = "alpha of the paper: 0 up to 20 tokens"
    yield _case("alpha 0.05", about, mask=long, alpha=0.05)
    yield _case(
        "alpha 1",
        "0.9 for ten tokens",
        mask=np.arange(12)[None] < np.array([[10], [1]]),
        alpha=1.0,
    )


TURNS = [[0, 0, -1, 1, 1, 1, -1, 2], [0, 0, 0, -1, -1, 1, -1, -1], [0, -1, -1, -1, -1, -1, -1, -1]]


@_recipes("turn_gae")
def _():
    turns = np.array(TURNS)
    mask = turns >= 0
    for seed, (g, lam) in enumerate(((1.0, 1.0), (0.9, 0.95), (1.0, 0.95), (0.5, 0.0))):
        x = _trajectory(Numbers(seed + 20), mask)
        yield _case(f"gamma {g}, lambda {lam}", "", **x, turns=turns, gamma=g, lam=lam)
    x = _trajectory(Numbers(30), mask)
    same = {**x, "values": np.where(mask, 0.25 + turns, BIG)}
    about = "V is the same at all tokens of a turn: its mean or its last token would do, too"
    yield _case("equal values in a turn", about, **same, turns=turns, gamma=0.9, lam=0.9)
    x["rewards"] = np.where(mask, 0.5, 0.0)
    yield _case(
        "rewards inside turns",
        "the turn's reward is their sum",
        **x,
        turns=turns,
        gamma=0.9,
        lam=0.9,
    )
    ends = np.where(turns != np.pad(turns, ((0, 0), (0, 1)), constant_values=-1)[:, 1:], 1.0, 0.0)
    x["rewards"] = np.where(mask, ends, 0.0)
    yield _case("rewards at the ends", "", **x, turns=turns, gamma=0.75, lam=0.5)


@_recipes("discounted_returns")
def _():
    for name, about, m, n in _masks("full", "padded", "holes", "left padding"):
        r = np.where(_after_the_end(m), BIG, n.outside(n.normal(*m.shape), m, 0.0))
        yield _case(f"{name}, gamma 0.9", about, rewards=r, mask=m, gamma=0.9)
    m = np.array(PADDED, bool)
    r = np.where(m, Numbers(9).normal(*m.shape), BIG)
    yield _case("rewards in padding", "KL of padding, say", rewards=r, mask=m, gamma=1.0)
    r = np.where(np.arange(6)[None] == m.sum(1)[:, None] - 1, 1.0, 0.0)
    yield _case("score at the end", "gamma 1: the score everywhere", rewards=r, mask=m, gamma=1.0)


@_recipes("whiten")
def _():
    for name, about, m, n in _masks("full", "padded", "holes", "observation last", "left padding"):
        x = n.outside(n.normal(*m.shape, scale=2.0) + 3, m, BIG)
        for center in (True, False) if name in ("padded", "holes") else (True,):
            label = name if center else f"{name}, mean kept"
            yield _case(label, about, x=x, mask=m, rank=np.zeros(3, int), center=center)
    m = np.array([*PADDED, *[[1, 0, 0, 0, 0, 0]] * 3], bool)
    n = Numbers(40)
    x = n.normal(*m.shape) + np.arange(6)[:, None]
    rank = np.array([0, 0, 0, 1, 1, 1])
    for center in (True, False):
        about = "rows of two processes: one mean and one deviation for both"
        label = "two ranks" if center else "two ranks, mean kept"
        yield _case(label, about, x=x, mask=m, rank=rank, center=center)


GROUPS = {
    "equal groups": ([0, 0, 0, 1, 1, 1, 2, 2, 2], None, "rows in order"),
    "mixed order": ([0, 1, 2, 0, 1, 2, 0, 1, 2], None, "rows of a group are not neighbors"),
    "unequal groups": ([0, 0, 0, 0, 1, 1, 2, 2, 2], None, "4, 2 and 3 responses"),
    "dropped rows": (
        [0, 0, 0, 0, 1, 1, 1, 1],
        [1, 1, 0, 1, 1, 0, 1, 1],
        "two responses were dropped",
    ),
    "one alone": ([0, 0, 0, 1, 2, 2], None, "a prompt with one response: nothing to compare"),
    "alone after a drop": ([0, 0, 0, 1, 1], [1, 1, 1, 1, 0], "one of two was dropped"),
}


def _group_inputs(name, seed):
    group, valid, about = GROUPS[name]
    group = np.array(group)
    valid = np.ones(len(group), bool) if valid is None else np.array(valid, bool)
    scores = Numbers(seed).normal(len(group), scale=2.0) + 1
    return about, {"scores": np.where(valid, scores, BIG), "group": group, "valid": valid}


@_recipes("leave_one_out")
def _():
    for seed, name in enumerate(GROUPS):
        about, x = _group_inputs(name, seed + 50)
        yield _case(name, about, **x)
    x = {
        "scores": np.array([1.0, 1.0, 0.0, 0.0]),
        "group": np.zeros(4, int),
        "valid": np.ones(4, bool),
    }
    yield _case("right or wrong", "2/3 and -2/3", **x)
    x = {**x, "scores": np.full(4, 0.75)}
    yield _case("equal scores", "0", **x)


@_recipes("group_normalize")
def _():
    for seed, name in enumerate(GROUPS):
        about, x = _group_inputs(name, seed + 60)
        scales = ("group", "batch", "none") if seed in (1, 2, 3) else ("group",)
        yield from [_case(f"{name}, {scale}", about, **x, scale=scale) for scale in scales]
    four = {"group": np.array([0, 0, 0, 0, 1, 1, 1, 1]), "valid": np.ones(8, bool)}
    x = {**four, "scores": np.array([0.75] * 4 + [1.0, 0.0, 1.0, 0.0])}
    yield _case(
        "equal scores, group", "a group without differences has advantage 0", **x, scale="group"
    )
    near = np.array([0.3 + 0.6, 0.9, np.float32(0.3) + np.float32(0.6), 0.9], np.float32)
    x = {**four, "scores": np.concatenate([near.astype(float), [1.0, 0.0, 1.0, 0.0]])}
    about = "0.3 + 0.6 against 0.9: one float32 unit apart, equal on paper; at most 0.1"
    yield (*_case("nearly equal, group", about, **x, scale="group"), {"atol": 0.1})
    x = {
        **four,
        "scores": np.concatenate([[1000.3 + 0.6, 1000.9] * 2, [1.0, 0.0, 1.0, 0.0]])
        .astype(np.float32)
        .astype(float),
    }
    x["scores"][:4] = np.array(
        [1000.9, 1000.9, np.nextafter(np.float32(1000.9), np.float32(0)), 1000.9], np.float32
    )
    about = "1000.9, one of them a float32 unit lower; at most 0.1"
    yield (*_case("nearly equal and large, group", about, **x, scale="group"), {"atol": 0.1})


# -- losses ------------------------------------------------------------------------------------

GAPS = np.array([0.0, 0.125, -0.125, 0.5, -0.5, 1.5, -1.5, 0.25])  # logp - old


def _update(n: Numbers, m):
    old = -abs(n.normal(*m.shape)) - 0.25
    gap = np.resize(GAPS, m.shape)[:, ::-1] if m.shape[1] % 2 else np.resize(GAPS, m.shape)
    a = n.normal(*m.shape) + 1 / 128
    return {"logp": np.where(m, old + gap, -3.0), "old": old, "advantages": a, "mask": m}


def _loss_recipes(options: dict[str, Any], sequence=False, extra=()):
    for name, about, m, n in _masks("full", "padded", "holes", "left padding"):
        x = _update(n, m)
        if sequence:
            x["advantages"] = np.array([1.5, -0.75, 0.5])
        yield _case(name, about, **x, **options)
    m = np.array(FULL, bool)
    x = _update(Numbers(77), m)
    if sequence:
        x["advantages"] = np.array([1.0, -1.0, 0.5])
    about = "on policy: ratio 1, the gradient is that of the policy gradient"
    yield _case("on policy", about, **{**x, "old": x["logp"]}, **options)
    for name, sign in (("positive advantages", 1), ("negative advantages", -1)):
        yield _case(
            name, "", **{**x, "advantages": sign * (abs(x["advantages"]) + 0.25)}, **options
        )
    yield from [_case(name, about, **x, **{**options, **changed}) for name, about, changed in extra]


@_recipes("ppo_clip")
def _():
    higher = ("clip-higher", "0.2 below, 0.28 above", {"clip_low": 0.2, "clip_high": 0.28})
    wide = ("clip 0.1 and 0.6", "", {"clip_low": 0.1, "clip_high": 0.6})
    return _loss_recipes({"clip_low": 0.2, "clip_high": 0.2}, extra=(higher, wide))


@_recipes("dual_clip")
def _():
    lower = ("ceiling 1.5", "", {"ceiling": 1.5})
    options = {"clip_low": 0.2, "clip_high": 0.28, "ceiling": 3.0}
    return _loss_recipes(options, extra=(lower,))


@_recipes("double_sided")
def _():
    wide = ("software agents", "0.8 and 3 of the paper", {"low": 0.8, "high": 3.0})
    return _loss_recipes({"low": 0.3, "high": 0.5}, extra=(wide,))


@_recipes("cispo")
def _():
    return _loss_recipes(
        {"top": 1.5}, extra=(("top 5", "", {"top": 5.0}), ("top 1.2", "", {"top": 1.2}))
    )


@_recipes("gspo")
def _():
    paper = ("paper", "3e-4 and 4e-4", {"clip_low": 3e-4, "clip_high": 4e-4})
    return _loss_recipes({"clip_low": 0.1, "clip_high": 0.15}, sequence=True, extra=(paper,))


@_recipes("value_loss")
def _():
    for name, about, m, n in _masks("full", "padded", "holes", "left padding"):
        old = n.normal(*m.shape)
        x = {
            "values": n.outside(old + np.resize(GAPS, m.shape), m),
            "old": old,
            "returns": n.normal(*m.shape) + 1 / 128,
        }
        yield _case(name, about, **x, mask=m, clip=0.2)
    yield _case("wide clip", "nothing is clipped", **x, mask=m, clip=16.0)
    m = np.ones((1, 4), bool)
    x = {
        "old": np.zeros((1, 4)),
        "values": np.array([[1.0, -1.0, 1.0, 0.125]]),
        "returns": np.array([[2.0, 2.0, 0.5, 1.0]]),
    }
    yield _case("by hand", "G - V: 1, 3, -0.5, 0.875; clipped at 0.5", **x, mask=m, clip=0.5)


@_recipes("aggregate")
def _():
    m = np.array([*PADDED, [1, 1, 1, 1, 1, 1]], bool)
    n = Numbers(90)
    x = n.outside(n.normal(*m.shape) + 1, m)
    cuts = {
        "one micro-batch": [0, 0, 0, 0],
        "two micro-batches": [0, 0, 1, 1],
        "unequal micro-batches": [0, 0, 0, 1],
    }
    for mode in ("token_mean", "sequence_mean", "constant"):
        for name, cut in cuts.items():
            yield _case(
                f"{mode}, {name}",
                "the cut must not change the loss",
                losses=x,
                mask=m,
                microbatch=np.array(cut),
                mode=mode,
                max_length=8,
            )
    dropped = m.copy()
    dropped[3] = False
    about = "the last response was cut off and left out as a whole"
    for mode in ("token_mean", "sequence_mean", "constant"):
        for name in ("one micro-batch", "two micro-batches"):
            yield _case(
                f"{mode}, row left out, {name}",
                about,
                losses=x,
                mask=dropped,
                microbatch=np.array(cuts[name]),
                mode=mode,
                max_length=8,
            )


# -- corrections and controllers ---------------------------------------------------------------


def _pair(n: Numbers, m, small=False):
    old = -abs(n.normal(*m.shape)) - 0.25
    gap = np.resize(GAPS, m.shape)
    if small:  # for weights of whole responses
        gap = gap / 8 + np.array([[1 / 32], [-1 / 4], [1 / 8]])
    return {"old": n.outside(old + gap, m, -1.0), "sampler": n.outside(old, m, -4.0), "mask": m}


@_recipes("importance_weights")
def _():
    bounds = {"token": (0.75, 2.0), "sequence": (0.75, 2.0), "geometric": (0.9, 1.1)}
    for kind in ("truncate", "mask"):
        for level, (low, high) in bounds.items():
            for name, about, m, n in _masks("padded", "holes"):
                yield _case(
                    f"{kind}, {level}, {name}",
                    about,
                    **_pair(n, m, level != "token"),
                    kind=kind,
                    level=level,
                    low=low,
                    high=high,
                )
    x = _pair(Numbers(4), np.array(PADDED, bool))
    yield _case("no lower bound", "", **x, kind="truncate", level="token", low=0.0, high=2.0)


@_recipes("weighted_loss")
def _():
    for kind in ("truncate", "mask"):
        for name, about, m, n in _masks("full", "padded", "holes"):
            x = _pair(n, m)
            yield _case(
                f"{kind}, {name}",
                about,
                losses=n.outside(n.normal(*m.shape) + 1, m),
                **x,
                kind=kind,
                low=0.75,
                high=1.5,
            )


@_recipes("adaptive_kl")
def _():
    kl = {
        "too large": [12.0, 7.0, 6.5],
        "too small": [0.0, 1.0, 5.5],
        "mixed": [6.0, 12.0, 5.0, 60.0, 6.75, -2.0],
    }
    yield from [
        _case(
            name,
            "",
            start=0.15,
            target=6.0,
            horizon=10000,
            kl=np.array(x),
            steps=np.full(len(x), 512),
        )
        for name, x in kl.items()
    ]
    yield _case(
        "two ranks",
        "n counts the responses of all ranks",
        start=0.05,
        target=0.5,
        horizon=1000,
        kl=np.array([0.25, 1.0, 0.5]),
        steps=np.array([64, 64, 32]),
    )
    yield _case(
        "on target",
        "nothing changes",
        start=0.2,
        target=6.0,
        horizon=100,
        kl=np.array([6.0, 6.0]),
        steps=np.array([50, 50]),
    )


# -- writing -----------------------------------------------------------------------------------


def build(family: str) -> list[Case]:
    """The cases of a family, with expected outputs and the errors that each one tells apart."""
    f, function = FAMILIES[family], getattr(first, family)
    cases = []
    for name, about, inputs, *changed in RECIPES[family]():
        tolerance = changed[0] if changed else {}
        case = Case(
            f,
            f"{family}/{name.replace(', ', '-').replace(' ', '_')}",
            about,
            inputs,
            function(**inputs),
            tolerance=tolerance,
        )
        for convention, keywords in f.conventions.items():
            other = function(**inputs, **keywords)
            if compare.differences(case, other):
                case.conventions[convention] = other
        for mutant in mutants.of(family):
            if compare.verdict(case, mutant(**inputs)).differs:
                case.tells_apart.append(mutant.name)
        cases.append(case)
    return cases


def main() -> None:
    """Write all files."""
    for family in FAMILIES:
        data = {"family": family, "cases": [case.as_json() for case in build(family)]}
        lines = json.dumps(data["cases"]).replace('{"name": ', '\n{"name": ')
        text = f'{{"family": "{family}", "cases": {lines}}}\n'
        (Path(FOLDER) / f"{family}.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
