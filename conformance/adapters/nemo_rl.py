"""NeMo-RL: advantage estimators and losses; CONFORMANCE_NEMO_RL names its source folder.

Its loss cuts off the column before the first token, so the adapter adds one.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import definitions, tensors, with_gradient

if "CONFORMANCE_NEMO_RL" not in os.environ:
    raise ImportError("set CONFORMANCE_NEMO_RL to the folder that holds nemo_rl/")
ROOT = Path(os.environ["CONFORMANCE_NEMO_RL"]) / "nemo_rl" / "algorithms"
LIBRARY = "NeMo-RL"
VERSION = os.environ.get("CONFORMANCE_NEMO_RL_VERSION", "source")
DOCUMENTED = {
    "kl/*-far_apart": "kl_output_clamp_value, 10 by default, an option",
}
NOT_CALLABLE = {
    "logprobs": "inside its workers",
    "entropy": "inside its workers",
    "full_kl": "no such option",
    "turn_gae": "credit per token",
    "double_sided": "not among its losses",
    "adaptive_kl": "no such option",
    "eos_penalty": "configured penalties of NeMo-Gym alone",
    "response_mask": "message logs, no ids to cut",
    "running_moments": "no such option",
    "overlong": "inside its data pipeline",
    "discounted_returns": "no such option",
}
calculate_kl, baseline, masked_mean, masked_var, no_infinity = definitions(
    ROOT / "utils.py",
    *("calculate_kl", "calculate_baseline_and_std_per_prompt", "masked_mean", "masked_var"),
    "mask_out_neg_inf_logprobs",
    torch=torch,
)
_known = {
    "torch": torch,
    "calculate_kl": calculate_kl,
    "calculate_baseline_and_std_per_prompt": baseline,
    "masked_mean": masked_mean,
    "masked_var": masked_var,
}
Group, Gae, ReinforcePP = definitions(
    ROOT / "advantage_estimator.py",
    *("GRPOAdvantageEstimator", "GeneralizedAdvantageEstimator"),
    "ReinforcePlusPlusAdvantageEstimator",
    **_known,
)
_types = definitions(
    ROOT / "loss" / "interfaces.py",
    "LossType",
    "MetricNormalizer",
    "LossInputType",
    enum=__import__("enum"),
)
PolicyLoss, ValueLoss = definitions(
    ROOT / "loss" / "loss_functions.py",
    *("ClippedPGLossFn", "MseValueLossFn"),
    LossFunction=object,
    LossType=_types[0],
    MetricNormalizer=_types[1],
    LossInputType=_types[2],
    mask_out_neg_inf_logprobs=no_infinity,
    **_known,
)


def kl(logp, ref, mask, estimator):
    """With its default bounds; kl_output_clamp_value=null switches the one of the output off."""
    if estimator == "abs":
        raise NotOffered("k1, k2 and k3")
    return calculate_kl(*tensors(logp, ref), kl_type=estimator)


def _gae_estimator(gamma, lam, policy=None, value=None, alpha=0, kl_coef=0.0):
    options = {"gae_lambda": lam, "gae_gamma": gamma, "normalize_advantages": False}
    options |= {"gae_lambda_value": value, "gae_lambda_policy": policy}
    options["length_adaptive_alpha"] = alpha
    loss = SimpleNamespace(
        use_kl_in_reward=True, reference_policy_kl_penalty=kl_coef, reference_policy_kl_type="k1"
    )
    return Gae(options, loss)


def token_rewards(scores, logp, ref, mask, kl_coef):
    s, p, q, m = tensors(scores, logp, ref, mask)
    build = _gae_estimator(1.0, 1.0, kl_coef=kl_coef)._build_token_level_rewards
    return build(s, m.to(s.dtype), p, q)


def gae(rewards, values, mask, gamma, lam, last_values):
    if last_values.any():
        raise NotOffered("no bootstrap of responses that were cut off")
    r, v, m = tensors(rewards, values, mask)
    a, g = _gae_estimator(gamma, lam)._compute_gae(r, v, m.to(r.dtype))
    return {"advantages": a, "returns": g}


def decoupled_gae(rewards, values, mask, gamma, lam, lam_value):
    """``compute_advantage`` with its token-level rewards replaced by those of the case."""
    r, v, m = tensors(rewards, values, mask)
    estimator = _gae_estimator(gamma, 0.5, policy=lam, value=lam_value)
    estimator._build_token_level_rewards = lambda *_: r
    a, g = estimator.compute_advantage(None, None, m.to(r.dtype), v)
    return {"advantages": a, "returns": g}


def adaptive_lambda(mask, alpha):
    return _gae_estimator(1.0, 1.0, alpha=alpha)._resolve_lambda_policy(tensors(mask))


def whiten(x, mask, rank, center):
    """The driver holds the batch of all ranks."""
    return _gae_estimator(1.0, 1.0)._reward_whiten(*tensors(x, mask), shift_mean=center)


def _group(scores, group, valid, loo, normalize):
    if not valid.all():
        raise NotOffered("its estimator takes all responses as valid")
    config = SimpleNamespace(use_leave_one_out_baseline=loo, normalize_rewards=normalize)
    s, ids = tensors(scores, group)
    return Group(config, None).compute_advantage(ids[:, None], s, torch.ones(len(s), 1))[:, 0]


def leave_one_out(scores, group, valid):
    return _group(scores, group, valid, True, False)


def group_normalize(scores, group, valid, scale):
    if scale == "batch":
        raise NotOffered("deviation of the group or none")
    return _group(scores, group, valid, False, scale == "group")


def _config(**options):
    base = {
        "disable_ppo_ratio": False,
        "token_level_loss": True,
        "sequence_level_importance_ratios": False,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "ratio_clip_c": None,
        "reference_policy_kl_penalty": 0.0,
        "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
        "use_kl_in_reward": False,
        "use_importance_sampling_correction": False,
        "truncated_importance_sampling_type": None,
        "truncated_importance_sampling_ratio": None,
        "truncated_importance_sampling_ratio_min": None,
        "use_on_policy_kl_approximation": False,
        "force_on_policy_ratio": False,
        "use_cispo": False,
        "positive_example_nll_weight": 0.0,
    }
    return SimpleNamespace(**{**base, **options})


def _call(x, old, advantages, mask, sampler=None, tokens=None, rows=None, **options):
    """The loss function, with the column before the first token that it cuts off."""

    def pad(y):
        return torch.cat([y[:, :1], y], 1)

    m = mask.to(x.dtype)
    data = {
        "token_mask": pad(m),
        "sample_mask": mask.any(1).to(x.dtype),
        "advantages": pad(advantages),
        "prev_logprobs": pad(old),
        "generation_logprobs": pad(old if sampler is None else sampler),
    }
    tokens = m.sum() if tokens is None else tokens
    rows = mask.any(1).sum() if rows is None else rows
    return PolicyLoss(_config(**options))(x, data, rows, tokens)


def _step(logp, old, advantages, mask, **options):
    o, a, m = tensors(old, advantages, mask)
    return with_gradient(lambda x: _call(x, o, a, m, **options), logp)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    return _step(logp, old, advantages, mask, ratio_clip_min=clip_low, ratio_clip_max=clip_high)


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    options = {"ratio_clip_min": clip_low, "ratio_clip_max": clip_high, "ratio_clip_c": ceiling}
    return _step(logp, old, advantages, mask, **options)


def cispo(logp, old, advantages, mask, top):
    """Its lower bound is set to 0."""
    options = {"ratio_clip_min": 1.0, "ratio_clip_max": top - 1, "use_cispo": True}
    return _step(logp, old, advantages, mask, **options)


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    options = {"ratio_clip_min": clip_low, "ratio_clip_max": clip_high, "token_level_loss": False}
    rows = advantages[:, None] + 0 * logp
    return _step(logp, old, rows, mask, sequence_level_importance_ratios=True, **options)


def value_loss(values, old, returns, mask, clip):
    o, g, m = tensors(old, returns, mask)
    m = m.to(o.dtype)
    loss = ValueLoss(SimpleNamespace(scale=1.0, cliprange=clip))
    data = {"token_mask": m, "sample_mask": torch.ones(len(m)), "returns": g, "values": o}
    return with_gradient(lambda v: loss(v, data, len(m), m.sum()), values)


def aggregate(losses, mask, microbatch, mode, max_length):
    """The loss of a token is -A with ratio 1; global counts as in its workers."""
    if mode == "constant":
        raise NotOffered("token mean and sequence mean")
    x, m = tensors(losses, mask)
    total = 0.0
    for k in sorted({int(k) for k in microbatch}):
        rows = torch.from_numpy(microbatch == k)
        zero = 0 * x[rows]
        total = (
            total
            + _call(
                zero,
                zero,
                -x[rows],
                m[rows],
                tokens=m.sum(),
                rows=m.any(1).sum(),
                token_level_loss=mode == "token_mean",
            )[0]
        )
    return total


def weighted_loss(losses, old, sampler, mask, kind, low, high):
    o, s, x, m = tensors(old, sampler, losses, mask)
    options = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": {"truncate": "tis", "mask": "icepop"}[kind],
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }
    return _call(o, o, -x, m, sampler=s, **options)[0]


def importance_weights(old, sampler, mask, kind, level, low, high):
    """The gradient of the loss by -A, times the number of tokens."""
    if level != "token":
        raise NotOffered(
            "geometric means keep or drop sequences; bounds of sequences are not apart"
        )
    ones = torch.ones(mask.shape, dtype=tensors(old).dtype, requires_grad=True)
    o, s, m = tensors(old, sampler, mask)
    options = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": {"truncate": "tis", "mask": "icepop"}[kind],
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }
    loss = _call(o, o, -ones, m, sampler=s, **options)[0]
    return torch.autograd.grad(loss, ones)[0] * m.sum()
