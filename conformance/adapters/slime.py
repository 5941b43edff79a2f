"""slime: slime/utils/ppo_utils.py; CONFORMANCE_SLIME names its source folder.

Its rows are lists of responses without padding, and a loss mask marks the tokens of tools.  Rows of
a case are cut where their padding begins (attention_mask); tool output at their end stays, as in
slime's trainer.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import (
    definitions,
    excerpt,
    neighbors,
    stub,
    tensors,
    with_gradient,
)

if "CONFORMANCE_SLIME" not in os.environ:
    raise ImportError("set CONFORMANCE_SLIME to the folder that holds slime/")
stub("megatron")
ROOT = Path(os.environ["CONFORMANCE_SLIME"]) / "slime"
LIBRARY = "slime"
VERSION = os.environ.get("CONFORMANCE_SLIME_VERSION", "source")
NOTES = {
    "token_rewards": "an episode that ends with tool output has its score on a token of the tool",
    "gae": "at gamma = lambda = 1, its defaults, it agrees (case turns-gamma_1)",
    "discounted_returns": "at gamma = 1, its default, it agrees",
}
NOT_CALLABLE = {
    "full_kl": "no such option",
    "logprobs": "inside a vocabulary-parallel function",
    "entropy": "inside a vocabulary-parallel function",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "credit per token",
    "double_sided": "not among its losses",
    "adaptive_kl": "no such option",
    "overlong": "user code",
    "eos_penalty": "user code",
    "response_mask": "the engine's ids end with the end token",
    "running_moments": "no such option",
    "leave_one_out": "no such estimator",
    "aggregate": "closures over Megatron's parallel state",
    "value_loss": "reads values out of Megatron's logits",
}
_utils = ROOT / "utils" / "ppo_utils.py"
_names = ("compute_approx_kl", "compute_gspo_kl", "compute_policy_loss", "compute_cispo_loss")
_names += ("get_reinforce_plus_plus_returns", "get_advantages_and_returns_batch", "vanilla_gae")
_names += ("chunked_discounted_returns", "chunked_gae")
_found = SimpleNamespace(
    **dict(
        zip(_names, definitions(_utils, *_names, torch=torch, F=torch.nn.functional), strict=True)
    )
)
LOSS = ROOT / "backends" / "megatron_utils" / "loss.py"
_one_process = SimpleNamespace(all_reduce=lambda x, group: None, ProcessGroup=None)
_whiten = definitions(
    ROOT / "utils" / "distributed_utils.py",
    "distributed_masked_whiten",
    torch=torch,
    dist=_one_process,
)
_tis, _icepop = definitions(LOSS, "vanilla_tis_function", "icepop_function", torch=torch)


def _one_rank():
    """Megatron's parallel state of a single process."""
    import megatron.core

    megatron.core.mpu.get_context_parallel_world_size = lambda: 1


def kl(logp, ref, mask, estimator):
    if estimator == "abs":
        raise NotOffered("k1, k2 and k3")
    return _found.compute_approx_kl(*tensors(logp, ref), estimator)


def _responses(attention_mask):
    """Length of each response, tool output included."""
    if not attention_mask[:, 0].all():
        raise NotOffered("responses have no padding")
    return [int(n) for n in attention_mask.sum(1)]


def token_rewards(scores, logp, ref, mask, kl_coef, attention_mask):
    """The lines of PPO in ``compute_advantages_and_returns``."""
    lengths = _responses(attention_mask)
    p, q = tensors(logp, ref)
    kls = [_found.compute_approx_kl(p[b, :n], q[b, :n], "k1") for b, n in enumerate(lengths)]
    mpu = SimpleNamespace(get_context_parallel_rank=lambda: 0)
    args = SimpleNamespace(kl_coef=kl_coef)
    names = {"rewards": list(scores), "kl": kls, "args": args, "mpu": mpu}
    found = excerpt(
        LOSS,
        "old_rewards = rewards",
        "advantages, returns = get_advantages_and_returns_batch(",
        **names,
    )
    out = torch.zeros(mask.shape)
    for b, n in enumerate(lengths):
        out[b, :n] = found["rewards"][b]
    return out


def gae(rewards, values, mask, gamma, lam, last_values, attention_mask):
    """Loss masks are not handed over: tool output is part of a response."""
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    _one_rank()
    lengths = _responses(attention_mask)
    r, v = tensors(rewards, values)
    rows = range(len(lengths))
    found = _found.get_advantages_and_returns_batch(
        lengths,
        lengths,
        [v[b, : lengths[b]] for b in rows],
        [r[b, : lengths[b]] for b in rows],
        gamma,
        lam,
    )
    out = {}
    for name, parts in zip(("advantages", "returns"), found, strict=True):
        out[name] = torch.zeros(mask.shape, dtype=v.dtype)
        for b in rows:
            out[name][b, : lengths[b]] = parts[b]
    return out


def discounted_returns(rewards, mask, gamma, attention_mask):
    """REINFORCE++, with the rewards of the case in place of the KL."""
    _one_rank()
    lengths = _responses(attention_mask)
    r, m = tensors(rewards, mask.astype(rewards.dtype))
    rows = range(len(lengths))
    found = _found.get_reinforce_plus_plus_returns(
        torch.zeros(len(lengths)),
        [-r[b, :n] for b, n in enumerate(lengths)],
        [m[b, :n] for b, n in enumerate(lengths)],
        lengths,
        lengths,
        1.0,
        gamma,
    )
    out = torch.zeros(mask.shape)
    for b in rows:
        out[b, : lengths[b]] = found[b]
    return out


def whiten(x, mask, rank, center):
    """Its sums go over all processes; here one process holds all rows."""
    return _whiten(*tensors(x, mask), shift_mean=center)


def group_normalize(scores, group, valid, scale):
    """Lines of ``_post_process_rewards`` of its rollout manager."""
    if scale == "batch":
        raise NotOffered("deviation of the group or none")
    n = neighbors(group, valid)
    args = SimpleNamespace(
        n_samples_per_prompt=n,
        rollout_batch_size=len(scores) // n,
        advantage_estimator="grpo",
        grpo_std_normalization=scale == "group",
    )
    found = excerpt(
        ROOT / "ray" / "rollout.py",
        "rewards = torch.tensor(raw_rewards, dtype=torch.float)",
        "return raw_rewards, rewards.flatten().tolist()",
        torch=torch,
        raw_rewards=scores.tolist(),
        self=SimpleNamespace(args=args),
    )
    return found["rewards"].flatten()


def _token_mean(each, mask):
    """``calculate_per_token_loss``: the sum over the mask, divided by the number of tokens."""
    return torch.where(mask, each, 0.0).sum() / mask.sum()


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling=None):
    o, a, m = tensors(old, advantages, mask)
    return with_gradient(
        lambda x: _token_mean(
            _found.compute_policy_loss(o - x, a, clip_low, clip_high, ceiling)[0], m
        ),
        logp,
    )


dual_clip = ppo_clip


def cispo(logp, old, advantages, mask, top):
    """Its lower bound is set to 0."""
    o, a, m = tensors(old, advantages, mask)
    return with_gradient(
        lambda x: _token_mean(_found.compute_cispo_loss(o - x, x, a, 1.0, top - 1)[0], m), logp
    )


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    o, a, m = tensors(old, advantages, mask)
    f = m.to(o.dtype)

    def loss(x):
        rows = [x[b] for b in range(len(x))]
        kls = _found.compute_gspo_kl(rows, list(o), rows, list(f)).reshape(x.shape)
        each = _found.compute_policy_loss(kls, a[:, None].expand_as(x), clip_low, clip_high)[0]
        return ((each * f).sum(1) / f.sum(1)).mean()  # sum_of_sample_mean

    return with_gradient(loss, logp)


def importance_weights(old, sampler, mask, kind, level, low, high):
    if level != "token":
        raise NotOffered("weights of tokens")
    o, s = tensors(old, sampler)
    function = {"truncate": _tis, "mask": _icepop}[kind]
    args = SimpleNamespace(tis_clip_low=low, tis_clip=high)
    return function(
        args,
        pg_loss=torch.ones_like(o),
        train_log_probs=[o],
        rollout_log_probs=[s],
        loss_masks=None,
    )[0]


def weighted_loss(losses, old, sampler, mask, kind, low, high):
    weights = importance_weights(old, sampler, mask, kind, "token", low, high)
    x, m = tensors(losses, mask)
    return _token_mean(x * weights, m)
