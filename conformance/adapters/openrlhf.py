"""OpenRLHF: losses, KL, rewards and GAE; CONFORMANCE_OPENRLHF may name its folder.

Inputs are handed over as they are; the scores of a group become a row, as in its trainer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import (
    definitions,
    excerpt,
    installed_version,
    library,
    neighbors,
    stub,
    tensors,
    with_gradient,
)

torch._dynamo.config.disable = True
stub(
    "ray", "vllm", "flash_attn", "deepspeed", "ring_flash_attn", "optree", "torchdata", "pylatexenc"
)
sys.modules["flash_attn.ops.triton.cross_entropy"] = None  # the branch without its kernel
root = Path(library("CONFORMANCE_OPENRLHF", "openrlhf").__file__).parent
from openrlhf.models import loss as losses_module
from openrlhf.models import utils
from openrlhf.trainer.ppo_utils import kl_controller, length_penalty

LIBRARY = "OpenRLHF"
VERSION = installed_version("openrlhf", os.environ.get("CONFORMANCE_OPENRLHF"))
MAKER = root / "trainer" / "ppo_utils" / "experience_maker.py"
_advantages, _returns = definitions(
    MAKER,
    "get_advantages_and_returns",
    "get_cumulative_returns",
    owner="RemoteExperienceMaker",
    torch=torch,
)
DOCUMENTED = {
    "kl/*-far_apart": "a comment of compute_approx_kl: the final cap",
}
NOTES = {
    "group_normalize": "two groups in a batch; where a batch has one, 0.3 eight times gives 0.91",
    "gae": "at gamma = lambda = 1, its defaults, it agrees (case turns-gamma_1)",
    "discounted_returns": "at gamma = 1, its default, it agrees",
}
NOT_CALLABLE = {
    "full_kl": "no such option",
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "credit per token",
    "cispo": "not among its losses",
    "double_sided": "not among its losses",
    "response_mask": "the engine's finish reason, not the ids",
    "running_moments": "no such option",
}


def logprobs(logits, tokens, mask, temperature):
    return utils.log_probs_from_logits(*tensors(logits, tokens), temperature)


def entropy(logits, mask, temperature):
    return {"entropy": utils.compute_entropy(tensors(logits) / temperature)}


def kl(logp, ref, mask, estimator):
    if estimator == "abs":
        raise NotOffered("k1, k2 and k3")
    return utils.compute_approx_kl(*tensors(logp, ref), kl_estimator=estimator)


def token_rewards(scores, logp, ref, mask, kl_coef):
    s, p, q, m = tensors(scores, logp, ref, mask)
    return utils.compute_reward(s, kl_coef, utils.compute_approx_kl(p, q), action_mask=m)


def gae(rewards, values, mask, gamma, lam, last_values):
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    r, v, m = tensors(rewards, values, mask)
    a, g = _advantages(None, v, r, m, gamma, lam)
    return {"advantages": a, "returns": g}


def discounted_returns(rewards, mask, gamma):
    return _returns(None, *tensors(rewards, mask), gamma)


def whiten(x, mask, rank, center):
    """The block of ``compute_advantages_and_returns``, over all experiences of the batch."""
    if not center:
        raise NotOffered("advantages are centered")
    parts = [
        SimpleNamespace(
            advantages=tensors(x[rank == r]), action_mask=tensors(mask[rank == r]).float()
        )
        for r in sorted({int(r) for r in rank})
    ]
    args = SimpleNamespace(algo=SimpleNamespace(advantage=SimpleNamespace(no_std_norm=False)))
    excerpt(
        MAKER,
        "all_advantages = torch.cat(",
        "return experiences",
        torch=torch,
        experiences=parts,
        args=args,
    )
    return torch.cat([part.advantages for part in parts])


def _estimator(name, scores, group, valid):
    n = neighbors(group, valid)
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=n),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=name)),
    )
    rewards = tensors(scores).reshape(-1, n)
    found = excerpt(
        MAKER,
        'if args.algo.advantage.estimator == "rloo"',
        "rewards = rewards.reshape(-1)[indices]",
        torch=torch,
        args=args,
        rewards=rewards,
    )
    return found["rewards"].reshape(-1)


def leave_one_out(scores, group, valid):
    return _estimator("rloo", scores, group, valid)


def group_normalize(scores, group, valid, scale):
    if scale == "batch":
        raise NotOffered("deviation of the group or none")
    return _estimator({"group": "group_norm", "none": "dr_grpo"}[scale], scores, group, valid)


def _loss(logp, old, advantages, mask, **options):
    o, a, m = tensors(old, advantages, mask)
    loss = losses_module.PolicyLoss(**options)
    return with_gradient(lambda x: loss(x, o, a, m.to(x.dtype)), logp)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    return _loss(logp, old, advantages, mask, clip_eps_low=clip_low, clip_eps_high=clip_high)


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    options = {"clip_eps_low": clip_low, "clip_eps_high": clip_high, "dual_clip": ceiling}
    return _loss(logp, old, advantages, mask, **options)


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    options = {"clip_eps_low": clip_low, "clip_eps_high": clip_high, "policy_loss_type": "gspo"}
    return _loss(logp, old, advantages[:, None] + 0 * logp, mask, **options)


def value_loss(values, old, returns, mask, clip):
    o, g, m = tensors(old, returns, mask)
    loss = losses_module.ValueLoss(clip_eps=clip)
    return with_gradient(lambda v: loss(v, o, g, m), values)


def aggregate(losses, mask, microbatch, mode, max_length):
    """With the global totals that the trainer passes."""
    if mode == "constant":
        raise NotOffered("token mean and sequence mean")
    x, m = tensors(losses, mask)
    total = 0.0
    for k in sorted({int(k) for k in microbatch}):
        rows = torch.from_numpy(microbatch == k)
        total = total + losses_module.aggregate_loss(
            x[rows],
            m[rows],
            mode == "token_mean",
            batch_num_tokens=float(m.sum()),
            global_batch_size=float(len(m)),
        )
    return total


def _corrected(old, sampler, mask, losses, mode, level, low, high, tokens=None):
    """PolicyLoss on policy, so that the loss of a token is -A times its weight."""
    o, s, m, x = tensors(old, sampler, mask, losses)
    loss = losses_module.PolicyLoss(
        is_correction_level=level, is_correction_mode=mode, is_correction_threshold=[low, high]
    )
    return loss(o, o, -x, m.to(o.dtype), rollout_log_probs=s, batch_num_tokens=tokens)[0]


def importance_weights(old, sampler, mask, kind, level, low, high):
    if level != "token":
        raise NotOffered("sequences are kept or dropped by their mean; weights are per token")
    one = torch.ones(mask.shape).numpy().astype(old.dtype)
    out = torch.zeros(mask.shape)
    for b, t in zip(*mask.nonzero(), strict=True):
        here = mask * 0 != 0
        here[b, t] = True
        out[b, t] = _corrected(
            old, sampler, here, one, {"truncate": "clip"}.get(kind, kind), level, low, high
        )
    return out


def weighted_loss(losses, old, sampler, mask, kind, low, high):
    mode = {"truncate": "clip"}.get(kind, kind)
    return _corrected(old, sampler, mask, losses, mode, "token", low, high)


def adaptive_kl(start, target, horizon, kl, steps):
    control, out = kl_controller.AdaptiveKLController(start, target, horizon), []
    for now, n in zip(kl, steps, strict=True):
        control.update(now, n)
        out.append(control.value)
    return out


def overlong(lengths, longest, buffer):
    batch = SimpleNamespace(response_length=tensors(lengths), rewards=torch.zeros(len(lengths)))
    length_penalty.apply_overlong_penalty([batch], longest, buffer)
    return batch.rewards


def eos_penalty(scores, ended, penalty, how):
    if how == "subtract" or penalty >= 0:
        raise NotOffered("a negative coefficient replaces the score, another one scales it")
    batch = SimpleNamespace(truncated=~tensors(ended), rewards=tensors(scores))
    length_penalty.apply_stop_properly_penalty([batch], penalty)
    return batch.rewards
