"""verl: verl/trainer/ppo/core_algos.py and its helpers; CONFORMANCE_VERL may name its folder.

Reward managers place the score, so the adapter does, by the attention mask; all else is handed over
as it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import (
    excerpt,
    installed_version,
    library,
    stub,
    tensors,
    with_gradient,
)

stub("ray", "vllm", "sglang", "megatron", "torchdata", "liger_kernel", "pylatexenc")
library("CONFORMANCE_VERL", "verl")
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig

LIBRARY = "verl"
VERSION = installed_version("verl", os.environ.get("CONFORMANCE_VERL"))
DOCUMENTED = {
    "kl/k3-*": "a comment of kl_penalty_forward: for numerical stability",
}
NOTES = {
    "token_rewards": "its own tool agent stops before tool output would end a response; a user's "
    "agent loop may end with it",
    "overlong": "hardly reachable: only if max_resp_len is below data.max_response_length",
}
NOT_CALLABLE = {
    "full_kl": 'kl_penalty="full" raises NotImplementedError',
    "decoupled_gae": "one lambda",
    "adaptive_lambda": "one lambda",
    "turn_gae": "credit per token",
    "double_sided": "not among its losses",
    "eos_penalty": "no such option",
    "running_moments": "no such option",
}


def logprobs(logits, tokens, mask, temperature):
    """The actor divides the logits by the temperature in place, then calls this."""
    z, ids = tensors(logits, tokens)
    return torch_functional.logprobs_from_logits(z.div_(temperature), ids)


def entropy(logits, mask, temperature):
    z, m = tensors(logits, mask)
    each = torch_functional.entropy_from_logits(z.div_(temperature))
    return {"entropy": each, "mean": core_algos.agg_loss(each, m, "token-mean")}


def kl(logp, ref, mask, estimator):
    return core_algos.kl_penalty(*tensors(logp, ref), estimator)


def token_rewards(scores, logp, ref, mask, kl_coef, attention_mask):
    """Reward managers index the last token of the attention mask; the trainer calls the rest."""
    s, p, q, m = tensors(scores, logp, ref, attention_mask)
    if not m.any(1).all():
        raise NotOffered("reward managers index the last valid token: no empty responses")
    placed = torch.zeros_like(p)
    last = m.shape[1] - 1 - m.flip(1).int().argmax(1)
    placed[torch.arange(len(s)), last] = s
    return core_algos.compute_rewards(placed, p, q, kl_coef)


def gae(rewards, values, mask, gamma, lam, last_values):
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    r, v, m = tensors(rewards, values, mask)
    _, returns = core_algos.compute_gae_advantage_return(r, v, m.to(r.dtype), gamma, lam)
    return {"advantages": returns - v, "returns": returns}  # before it whitens the advantages


def discounted_returns(rewards, mask, gamma):
    r, m = tensors(rewards, mask.astype(rewards.dtype))
    config = type("Config", (), {"gamma": gamma})()
    return core_algos.compute_reinforce_plus_plus_outcome_advantage(r, m, config=config)[1]


def whiten(x, mask, rank, center):
    """The driver holds the batch of all ranks."""
    return torch_functional.masked_whiten(*tensors(x, mask), shift_mean=center)


def _outcome(scores, group, valid, function, **options):
    if not valid.all():
        raise NotOffered("rows are not dropped one by one")
    rewards, mask = tensors(scores[:, None]), torch.ones(len(scores), 1)
    return function(rewards.clone(), mask, np.asarray(group), **options)[0][:, 0]


def leave_one_out(scores, group, valid):
    return _outcome(scores, group, valid, core_algos.compute_rloo_outcome_advantage)


def group_normalize(scores, group, valid, scale):
    if scale == "batch":
        raise NotOffered("no deviation of the batch in GRPO")
    function = core_algos.compute_grpo_outcome_advantage
    return _outcome(scores, group, valid, function, norm_adv_by_std_in_grpo=scale == "group")


def _loss(name, logp, old, advantages, mask, mode="token-mean", **options):
    o, a, m = tensors(old, advantages, mask)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    function = core_algos.get_policy_loss_fn(name)
    return with_gradient(
        lambda x: function(
            old_log_prob=o,
            log_prob=x,
            advantages=a,
            response_mask=m.to(x.dtype),
            loss_agg_mode=mode,
            config=config,
        ),
        logp,
    )


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    """Its dual clip (c = 3 by default) is set out of reach."""
    options = {"clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "clip_ratio_c": 1e9}
    return _loss("vanilla", logp, old, advantages, mask, **options)


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    options = {"clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "clip_ratio_c": ceiling}
    return _loss("vanilla", logp, old, advantages, mask, **options)


def cispo(logp, old, advantages, mask, top):
    """Its lower bound is set to 0."""
    return _loss("cispo", logp, old, advantages, mask, clip_ratio_low=1.0, clip_ratio_high=top - 1)


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    rows = advantages[:, None] + 0 * logp
    options = {"clip_ratio_low": clip_low, "clip_ratio_high": clip_high}
    return _loss("gspo", logp, old, rows, mask, "seq-mean-token-mean", **options)


def value_loss(values, old, returns, mask, clip):
    o, g, m = tensors(old, returns, mask)
    return with_gradient(lambda v: core_algos.compute_value_loss(v, g, o, m, clip), values)


def aggregate(losses, mask, microbatch, mode, max_length):
    """With the global sizes that the engines pass: tokens and rows of the mini-batch."""
    x, m = tensors(losses, mask)
    mode = {
        "token_mean": "token-mean",
        "sequence_mean": "seq-mean-token-mean",
        "constant": "seq-mean-token-sum-norm",
    }[mode]
    total = 0.0
    for k in sorted({int(k) for k in microbatch}):
        rows = torch.from_numpy(microbatch == k)
        total = total + core_algos.agg_loss(
            x[rows],
            m[rows],
            mode,
            batch_num_tokens=int(m.sum()),
            global_batch_size=len(m),
            loss_scale_factor=max_length,
        )
    return total


def importance_weights(old, sampler, mask, kind, level, low, high):
    if level == "geometric":
        raise NotOffered("weights of tokens and of sequences")
    if kind == "truncate" and low > 0:
        raise NotOffered("truncation has no lower bound")
    o, s, m = tensors(old, sampler, mask)
    bounds = high if kind == "truncate" else f"{low}_{high}"
    weights = rollout_corr_helper.compute_rollout_correction_weights
    return weights(o - s, m.to(o.dtype), rollout_is=level, rollout_is_threshold=bounds)[0]


def weighted_loss(losses, old, sampler, mask, kind, low, high):
    if kind == "truncate":
        raise NotOffered("truncation has no lower bound")
    weights = importance_weights(old, sampler, mask, kind, "token", low, high)
    x, m = tensors(losses, mask)
    return core_algos.agg_loss(x * weights, m, "token-mean")


def adaptive_kl(start, target, horizon, kl, steps):
    control, out = core_algos.AdaptiveKLController(start, target, horizon), []
    for now, n in zip(kl, steps, strict=True):
        control.update(now, n)
        out.append(control.value)
    return out


def overlong(lengths, longest, buffer):
    """Lines of DAPORewardManager."""
    file = Path(core_algos.__file__).parents[2] / "workers" / "reward_manager" / "dapo.py"
    config = SimpleNamespace(len=buffer, penalty_factor=1.0)
    self = SimpleNamespace(overlong_buffer_cfg=config, max_resp_len=longest)
    start, stop = "overlong_buffer_len = self.overlong_buffer_cfg.len", "reward += overlong_reward"
    names = [{"self": self, "valid_response_length": int(n)} for n in lengths]
    return [excerpt(file, start, stop, **x)["overlong_reward"] for x in names]


def response_mask(tokens, eos):
    return torch_functional.get_response_mask(tensors(tokens), eos)
