"""TRL's GRPOTrainer and RLOOTrainer, newest; CONFORMANCE_TRL may name the folder that holds it.

``_compute_loss`` runs as it is, with log-probabilities in place of a model; the advantages stand in
the middle of ``_generate_and_score_completions`` and those lines are run.

A dropped response has the score NaN there, as a reward function that returns None.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from ppo_conformance import NotOffered
from ppo_conformance.adapting import (
    excerpt,
    installed_version,
    library,
    neighbors,
    tensors,
    with_gradient,
)

warnings.simplefilter("ignore")
library("CONFORMANCE_TRL", "trl")
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import grpo_trainer, utils

LIBRARY = "TRL GRPO, RLOO"
VERSION = installed_version("trl", os.environ.get("CONFORMANCE_TRL"))
_CRITIC = "no value model"
NOT_CALLABLE = {
    **dict.fromkeys(("gae", "decoupled_gae", "adaptive_lambda", "turn_gae", "value_loss"), _CRITIC),
    **dict.fromkeys(
        ("token_rewards", "whiten", "discounted_returns", "adaptive_kl"), "not in GRPO"
    ),
    **dict.fromkeys(("eos_penalty", "running_moments", "full_kl"), "no such option"),
    "double_sided": "no such loss",
    "response_mask": "inline in _generate_and_score_completions",
    "weighted_loss": "needs vLLM's weights",
    "importance_weights": "inline, with vLLM alone",
}
FILE = Path(grpo_trainer.__file__)


def logprobs(logits, tokens, mask, temperature):
    """The trainer divides the logits by the temperature before this."""
    z, ids = tensors(logits, tokens)
    return utils.selective_log_softmax(z / temperature, ids)


def entropy(logits, mask, temperature):
    return {"entropy": utils.entropy_from_logits(tensors(logits) / temperature)}


def kl(logp, ref, mask, estimator):
    if estimator != "k3":
        raise NotOffered("k3")
    p, q = tensors(logp, ref)
    inputs = {"ref_per_token_logps": q}
    args = SimpleNamespace(use_bias_correction_kl=False)
    names = {"inputs": inputs, "per_token_logps": p, "self": SimpleNamespace(beta=1.0, args=args)}
    found = excerpt(
        FILE,
        'ref_per_token_logps = inputs["ref_per_token_logps"]',
        "# Importance sampling correction",
        torch=torch,
        **names,
    )
    return found["per_token_kl"]


def leave_one_out(scores, group, valid):
    """Lines of RLOOTrainer; a reward of None is NaN there."""
    n = neighbors(group)
    s = tensors(scores).masked_fill(~tensors(valid), torch.nan)
    names = {"rewards": s, "grouped_rewards": s.view(-1, n), "num_generations": n}
    found = excerpt(
        FILE.with_name("rloo_trainer.py"),
        "scorable_counts = (~torch.isnan(grouped_rewards))",
        "is_std_zero = torch.isclose(",
        torch=torch,
        nanstd=utils.nanstd,
        self=SimpleNamespace(normalize_advantages=False),
        **names,
    )
    return found["advantages"]


def group_normalize(scores, group, valid, scale):
    n = neighbors(group)
    s = tensors(scores).masked_fill(~tensors(valid), torch.nan)
    self = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale,
        reward_weights=torch.ones(1),
    )
    names = {
        "self": self,
        "rewards_per_func": s[:, None],
        "num_generations": n,
        "device": "cpu",
        "nanstd": utils.nanstd,
    }
    found = excerpt(
        FILE,
        "unscorable_mask = torch.isnan(rewards_per_func)",
        "# Slice to keep only the local part",
        torch=torch,
        **names,
    )
    return found["advantages"]


class _Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = False

    def gather(self, x):
        return x

    def reduce(self, x, reduction):
        return x


def _loss(logp, old, advantages, mask, tokens, parts=1, **options):
    """``GRPOTrainer._compute_loss``; ``tokens`` of the whole optimizer step."""
    m, o, a = tensors(
        mask.astype(logp.detach().numpy().dtype if torch.is_tensor(logp) else logp.dtype),
        old,
        advantages,
    )
    args = SimpleNamespace(
        delta=options.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=parts
    )
    settings = {
        "importance_sampling_level": "token",
        "loss_type": "dapo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
    }
    self = SimpleNamespace(
        **{**settings, **options},
        args=args,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=parts,
        accelerator=_Accelerator(),
        _metrics={"train": defaultdict(list)},
    )
    self._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros_like(logp), None)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": m,
        "advantages": a,
        "old_per_token_logps": o,
        "num_items_in_batch": torch.tensor(float(tokens)),
    }
    return grpo_trainer.GRPOTrainer._compute_loss(self, None, inputs)


def _step(logp, old, advantages, mask, **options):
    return with_gradient(lambda x: _loss(x, old, advantages, mask, mask.sum(), **options), logp)


def ppo_clip(logp, old, advantages, mask, clip_low, clip_high):
    return _step(logp, old, advantages, mask, epsilon_low=clip_low, epsilon_high=clip_high)


def dual_clip(logp, old, advantages, mask, clip_low, clip_high, ceiling):
    options = {"epsilon_low": clip_low, "epsilon_high": clip_high, "delta": ceiling}
    return _step(logp, old, advantages, mask, **options)


def cispo(logp, old, advantages, mask, top):
    return _step(logp, old, advantages, mask, loss_type="cispo", epsilon_high=top)


def gspo(logp, old, advantages, mask, clip_low, clip_high):
    options = {"epsilon_low": clip_low, "epsilon_high": clip_high, "loss_type": "grpo"}
    return _step(logp, old, advantages, mask, importance_sampling_level="sequence", **options)


def aggregate(losses, mask, microbatch, mode, max_length):
    """The loss of a token is -A with ratio 1."""
    if len(set(np.bincount(microbatch).tolist())) > 1:
        raise NotOffered("micro-batches have equally many rows")
    types = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
    parts = sorted({int(k) for k in microbatch})
    total = 0.0
    for k in parts:
        rows = microbatch == k
        zero = 0 * losses[rows]
        total += _loss(
            tensors(zero),
            zero,
            -losses[rows],
            mask[rows],
            mask.sum(),
            len(parts),
            loss_type=types[mode],
            max_completion_length=max_length,
        )
    return total


def overlong(lengths, longest, buffer):
    return get_soft_overlong_punishment(longest, buffer)([[0] * int(n) for n in lengths])
