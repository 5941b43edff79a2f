"""TRL 0.11, the classic PPOTrainer; CONFORMANCE_TRL_0_11 may name the folder that holds it.

Inputs are handed over as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from ppo_conformance import NotOffered
from ppo_conformance.adapting import definitions, installed_version, tensors, with_gradient

FOLDER = os.environ.get("CONFORMANCE_TRL_0_11")
LIBRARY = "TRL"
VERSION = installed_version("trl", FOLDER)


def _sources():
    """The files themselves: with newer versions of transformers the package does not import."""
    root = Path(FOLDER, "trl") if FOLDER else Path(find_spec("trl").submodule_search_locations[0])
    core = definitions(
        root / "core.py",
        *("flatten_dict", "logprobs_from_logits", "masked_mean", "masked_var", "masked_whiten"),
        *("clip_by_value", "entropy_from_logits"),
        torch=torch,
        F=F,
        Mapping=Mapping,
    )
    names = SimpleNamespace(**{f.__name__: f for f in core})
    trainer = root / "trainer" / "ppo_trainer.py"
    methods = definitions(
        trainer,
        *_METHODS,
        owner="PPOTrainer",
        torch=torch,
        F=F,
        warnings=SimpleNamespace(warn=print),
        **vars(names),
    )
    controller = definitions(root / "trainer" / "utils.py", "AdaptiveKLController", np=np)
    moments = definitions(
        root / "trainer" / "utils.py", "RunningMoments", torch=torch, dataclass=dataclass
    )
    return names, dict(zip(_METHODS, methods, strict=True)), controller, moments


_METHODS = ("compute_rewards", "_kl_penalty", "compute_advantages", "loss")
core, methods, Controller, Moments = _sources()
NOTES = {
    "gae": "its defaults are gamma 1 and lambda 0.95; with lambda 1 it agrees (case turns-gamma_1)",
    "token_rewards": "fails, rather than differs, on a response without tokens; `generate` keeps "
    "the end token, so only a user's own responses can be empty",
}
NOT_CALLABLE = {
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "credit per token",
    "response_mask": "inline in _generate_batched",
    **dict.fromkeys(
        ("leave_one_out", "group_normalize", "dual_clip", "double_sided"), "not in PPO"
    ),
    **dict.fromkeys(
        ("cispo", "gspo", "importance_weights", "weighted_loss", "overlong"), "not in PPO"
    ),
    "eos_penalty": "no such option",
    "discounted_returns": "no such option",
}


def _trainer(**config):
    """A stand-in for ``self`` with the real methods."""
    options = {"kl_penalty": "kl", "whiten_rewards": False, "vf_coef": 1.0, "ratio_threshold": 1e9}
    self = SimpleNamespace(config=SimpleNamespace(**{**options, **config}))
    self._kl_penalty = lambda *args: methods["_kl_penalty"](self, *args)
    return self


def logprobs(logits, tokens, mask, temperature):
    if temperature != 1:
        raise NotOffered("the trainer knows no temperature")
    return core.logprobs_from_logits(*tensors(logits, tokens))


def entropy(logits, mask, temperature):
    if temperature != 1:
        raise NotOffered("the trainer knows no temperature")
    each = core.entropy_from_logits(tensors(logits))
    return {"entropy": each, "mean": core.masked_mean(each, tensors(mask))}


def kl(logp, ref, mask, estimator):
    kinds = {"k1": "kl", "k2": "mse", "abs": "abs"}
    if estimator not in kinds:
        raise NotOffered("kl, abs, mse and full")
    return methods["_kl_penalty"](_trainer(kl_penalty=kinds[estimator]), *tensors(logp, ref))


def full_kl(logits, ref_logits, mask):
    """The trainer hands over log-probabilities of the vocabulary."""
    p, q = (F.log_softmax(x, -1) for x in tensors(logits, ref_logits))
    return methods["_kl_penalty"](_trainer(kl_penalty="full"), p, q)


def token_rewards(scores, logp, ref, mask, kl_coef):
    self = _trainer()
    self.kl_ctl = SimpleNamespace(value=kl_coef)
    return methods["compute_rewards"](self, *tensors(scores, logp, ref, mask))[0]


def gae(rewards, values, mask, gamma, lam, last_values):
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    r, v, m = tensors(rewards, values, mask)
    v, _, returns = methods["compute_advantages"](_trainer(gamma=gamma, lam=lam), v, r, m)
    return {"advantages": returns - v, "returns": returns}  # before it whitens the advantages


def whiten(x, mask, rank, center):
    """Every process whitens its own rows."""
    out = torch.zeros(x.shape)
    for r in {int(r) for r in rank}:
        rows = torch.from_numpy(rank == r)
        out[rows] = core.masked_whiten(tensors(x)[rows], tensors(mask)[rows], shift_mean=center)
    return out


def _losses(logp, old, advantages, mask, values, old_values, returns, **config):
    o, a, m, ov, g = tensors(old, advantages, mask, old_values, returns)
    logits = torch.zeros(*mask.shape, 2)
    return methods["loss"](_trainer(**config), o, ov, logits, values, logp, m, a, g)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    if clip_low != clip_high:
        raise NotOffered("one cliprange")
    zero, config = 0 * old, {"cliprange": clip_low, "cliprange_value": 1.0}
    v = tensors(zero)
    return with_gradient(
        lambda x: _losses(x, old, advantages, mask, v, zero, zero, **config)[0], logp
    )


def value_loss(values, old, returns, mask, clip):
    zero, config = 0 * old, {"cliprange": 1.0, "cliprange_value": clip}
    p = tensors(zero)
    return with_gradient(
        lambda v: _losses(p, zero, zero, mask, v, old, returns, **config)[1], values
    )


def running_moments(scores):
    """On one process."""
    found = Moments(SimpleNamespace(use_distributed=False)), [], []
    for batch in scores:
        found[0].update(tensors(batch))
        found[1].append(found[0].mean)
        found[2].append(found[0].std)
    return {"mean": found[1], "std": found[2]}


def aggregate(losses, mask, microbatch, mode, max_length):
    """``loss`` takes the mean over a micro-batch; accelerate divides by their number."""
    if mode != "token_mean":
        raise NotOffered("mean over tokens")
    if len(set(np.bincount(microbatch).tolist())) > 1:
        raise NotOffered("micro-batches have equally many rows")
    x, m = tensors(losses, mask)
    parts = [torch.from_numpy(microbatch == k) for k in {int(k) for k in microbatch}]
    return sum(core.masked_mean(x[rows], m[rows]) for rows in parts) / len(parts)


def adaptive_kl(start, target, horizon, kl, steps):
    control, out = Controller(start, target, horizon), []
    for now, n in zip(kl, steps, strict=True):
        control.update(now, n)
        out.append(control.value)
    return out
