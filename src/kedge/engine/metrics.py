"""The one table of metric names; the docs page is made from it, and an unknown name raises."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kedge.protocols import Learner
from kedge.types import Metrics

NAMES: dict[str, str] = {
    "episode": "responses trained on since the start of the run",
    "epoch": "passes over the training prompts",
    "eps": "episodes per second since the start of this process",
    "num_input_tokens_seen": "prompt and response tokens since the start of the run",
    "num_tokens": "prompt and response tokens sampled since the start of the run, no padding",
    "memory/peak_cpu": "MiB; the most that process 0 has held since its start",
    "memory/peak_gpu": "MiB; the most that tensors of process 0 have taken on its GPU",
    "tokens_per_second": "response tokens sampled and trained per second of this update",
    "lr": "learning rate of the policy during this update",
    "lr/value": "learning rate of the value model during this update",
    "grad_norm": "gradient norm of all trained weights before clipping, mean over optimizer steps",
    "grad_norm/policy": "the same, of the policy's weights alone",
    "grad_norm/value": "the same, of the value model's weights alone",
    "skipped_steps": "optimizer steps skipped because a gradient was not finite, since the start",
    "objective/kl": "nats per response; KL estimator summed over a response, mean over responses",
    "objective/kl2": "nats per response; the k2 estimate of the same, whatever kl_estimator says",
    "objective/kl3": "nats per response; the k3 estimate of the same, whatever kl_estimator says",
    "objective/kl_coef": "coefficient of the KL penalty used for this batch",
    "objective/entropy": "nats per response; minus the summed log-probability of its tokens",
    "objective/non_score_reward": "mean over responses of the summed KL penalty",
    "objective/rlhf_reward": "mean over responses of score plus KL penalty: what PPO maximizes",
    "objective/scores": "mean score per response, penalties for a missing stop token included",
    "objective/scores_std": "standard deviation of the scores over the batch",
    "objective/greedy_scores": "mean score of the greedy response to the same prompt (ReMax)",
    "objective/uniform_groups": "share of responses in groups of equal scores, of those in groups",
    "policy/approxkl_avg": "nats per token; 0.5 (log ratio)^2 against the anchor of the ratio: the "
    "policy that sampled, with sampler_correction the policy before the update; "
    "of whole responses where those are what is clipped (RLOO)",
    "policy/policykl_avg": "nats per token; mean of old minus new log-probability, the k1 estimate "
    "of the KL from the same policy as policy/approxkl_avg",
    "policy/clipfrac_avg": "share of tokens (RLOO: responses) that the clip left without gradient",
    "clip_ratio/low_mean": "share of tokens (RLOO: responses) clipped below: the ratio fell under "
    "1 - epsilon and the advantage is negative; GRPO and RLOO",
    "clip_ratio/high_mean": "the same above: the ratio exceeds 1 + epsilon_high and the advantage "
    "is positive",
    "policy/entropy_avg": "nats per token; entropy of the policy's distribution during the update",
    "loss": "what the optimizer minimized: the sum of all losses at their coefficients, mean over "
    "optimizer steps",
    "loss/policy_avg": "policy loss, mean over optimizer steps",
    "loss/kl_avg": "KL in the loss before beta, by its estimator, mean over optimizer steps",
    "loss/value_avg": "value loss before vf_coef, mean over optimizer steps",
    "val/clipfrac_avg": "share of tokens whose clipped value loss was the larger one",
    "val/ratio": "probability ratio against the same policy as policy/approxkl_avg, mean over "
    "tokens (RLOO: responses) and steps",
    "val/ratio_var": "variance over the optimizer steps of an update of their mean ratio",
    "val/num_eos_tokens": "responses of the batch that ended by themselves, over all ranks",
    "val/explained_variance": "1 - Var(return - value) / Var(return), values of before the update",
    "val/value_mean": "mean predicted value per token",
    "val/return_mean": "mean return per token",
    "completions/mean_length": "tokens per response, stop token included",
    "completions/min_length": "tokens of the shortest response",
    "completions/max_length": "tokens of the longest response",
    "completions/mean_terminated_length": "the same of responses that ended by themselves",
    "completions/min_terminated_length": "the same of responses that ended by themselves",
    "completions/max_terminated_length": "the same of responses that ended by themselves",
    "completions/truncated_ratio": "share of responses cut off by the length limit",
    "rollout/tokens": "prompt and response tokens of the batch, no padding",
    "rollout/lag": "updates between sampling and training, mean over responses",
    "rollout/dropped_rows": "responses left out because their reward failed or did not apply",
    "rollout/untrained_rows": "scored responses left out of the loss: truncated, or equal scores",
    "rollout/resampled_groups": "groups of equal scores sampled anew for other prompts",
    "rollout/correction_weight": "weight of learner against sampler, mean over tokens",
    "rollout/correction_bounded": "share of tokens whose weight was truncated or masked",
    "rollout/logprob_gap": "nats per token; |log-probability of the sampler - of the learner|",
    "rollout/stale_gap": "the same for responses of older weights: how far the policy has moved",
    "eval_loss": "minus the mean score, plus the KL at the coefficient that training has: lower is "
    "better (TRL logs the surrogate loss, which is the same for good and bad policies)",
    "eval_accuracy": "share of the evaluation's responses that score eval_success_score or more",
    "eval_win_rate": "share of the evaluation's responses that score more than the starting "
    "policy's to the same prompt, ties count half",
    "time/rollout": "seconds of this update spent generating",
    "time/reward": "seconds spent scoring",
    "time/annotate": "seconds spent on log-probabilities, reference and values before the update",
    "time/update": "seconds spent on the optimizer steps",
    "time/step": "seconds of the whole update",
    "train_loss": "last row: mean of loss over all updates of the run",
    "train_runtime": "last row: seconds of train()",
    "train_samples_per_second": "last row: responses trained on per second",
    "train_steps_per_second": "last row: updates per second",
}
# TRL's names in GRPO and RLOO, logged by those trainers beside the others: name there, name here.
TRL_NAMES: dict[str, str] = {
    "reward": "objective/scores",
    "reward_std": "objective/scores_std",
    "frac_reward_zero_std": "objective/uniform_groups",
    "kl": "loss/kl_avg",
    "entropy": "policy/entropy_avg",
    "clip_ratio/region_mean": "policy/clipfrac_avg",
    "completions/clipped_ratio": "completions/truncated_ratio",
    "sampling/importance_sampling_ratio/mean": "rollout/correction_weight",
    "sampling/sampling_logp_difference/mean": "rollout/logprob_gap",
    "learning_rate": "lr",
    "step_time": "time/step",
}
TRL_NOTES: dict[str, str] = {
    "reward_std": "objective/scores_std, with n - 1 in place of n",
    "kl": "loss/kl_avg; RLOO: objective/kl per token",
    "rewards/<function>/mean": "rewards/<function>",
    "<name>": "log/<name>: what a reward function gave to log_metric",
}
# What open-instruct's asynchronous PPO calls them; logged by AsyncPPOTrainer beside the others.
SEED_NAMES: dict[str, str] = {
    "training_step": "updates finished",
    "objective/loss": "loss/policy_avg + vf_coef x loss/value_avg",
    "objective/verifiable_correct_rate": "share of responses that a verifier scored above 0",
    "val/format_scores": "rewards of r1_style_format, as its weight counts them",
    "val/sequence_lengths": "completions/mean_length",
    "val/sequence_lengths_min": "completions/min_length",
    "val/sequence_lengths_max": "completions/max_length",
    "val/num_stop_token_ids": "val/num_eos_tokens",
    "val/stop_token_rate": "share of responses that ended by themselves",
    "time/training": "seconds of this update without waiting for samples",
    "time/from_scratch": "seconds since training began, in this process",
}
# Names that every algorithm logs of an update, and those that it logs beside them.
OF_ALL_ALGORITHMS = (
    *("objective/scores", "objective/scores_std", "objective/rlhf_reward"),
    *("objective/non_score_reward", "objective/kl", "objective/kl2", "objective/kl3"),
    *("objective/kl_coef", "objective/entropy"),
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg"),
    *("val/ratio", "val/ratio_var", "val/num_eos_tokens"),
)
OF_ALGORITHM = {
    "ppo": (
        *("policy/policykl_avg", "loss/value_avg", "val/clipfrac_avg"),
        *("val/explained_variance", "val/value_mean", "val/return_mean"),
    ),
    "rloo": (
        *("clip_ratio/low_mean", "clip_ratio/high_mean"),
        *("objective/uniform_groups", "rollout/untrained_rows"),
    ),
    "reinforce_pp": ("loss/kl_avg", "objective/uniform_groups"),
    "grpo": (
        *("clip_ratio/low_mean", "clip_ratio/high_mean"),
        *("loss/kl_avg", "objective/uniform_groups"),
        *("rollout/untrained_rows", "rollout/resampled_groups"),
    ),
    "remax": ("objective/greedy_scores",),
}
SEED_PREFIXES: dict[str, str] = {
    "objective/<verifier>_reward": "mean score of a verifier, over the responses that it judged",
    "objective/<verifier>_correct_rate": "share of them that it scored above 0",
}
PREFIXES: dict[str, str] = {
    "rewards/": "mean of one reward source over the responses it applies to; .../std: standard "
    "deviation over them",
    "eval_pass@": "share of evaluation prompts that at least one of so many responses solves, "
    "without bias (arXiv:2107.03374)",
    "eval_": "the same metric on the evaluation prompts",
    "log/": "what a reward function recorded through log_metric, mean over its calls on all ranks",
}


def check_known(metrics: Mapping[str, float]) -> None:
    """Raise KeyError for a metric that no table describes."""
    unknown = sorted(n for n in metrics if n not in NAMES and not n.startswith(tuple(PREFIXES)))
    if unknown:
        raise KeyError(
            f"no table says what {unknown} mean; begin the names of a rule of your own with log/"
            " (those of Kedge are in engine/metrics.py, NAMES)"
        )


class Tally:
    """Collects means and sums over this rank's rows, then adds them over all ranks in one call."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        self._sums: dict[str, Tensor | float] = {}

    def mean(self, name: str, x: Tensor, keep: Tensor) -> None:
        """Mean of ``x`` over the entries where ``keep`` (bool, the same shape); calls add up."""
        kept = torch.where(keep, x.to(torch.float64), 0.0).sum().cpu()
        top, count = self._means.get(name, (torch.zeros((), dtype=torch.float64),) * 2)
        self._means[name] = (top + kept, count + keep.sum().cpu())

    def sum(self, name: str, x: Tensor) -> None:
        """Sum of the entries of ``x``; calls add up."""
        self._sums[name] = self._sums.get(name, 0.0) + x.to(torch.float64).sum().cpu()

    def read(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Values over all ranks; the mean of nothing is left out."""
        flat = [x for pair in self._means.values() for x in pair]
        flat += [torch.as_tensor(x, dtype=torch.float64) for x in self._sums.values()]
        if not flat:
            return {}
        merged = iter(total(torch.stack(flat)).tolist())
        pairs = {name: (next(merged), next(merged)) for name in self._means}
        out = {name: top / count for name, (top, count) in pairs.items() if count}
        return out | {name: next(merged) for name in self._sums}


def reduce_metrics(said: Mapping[str, tuple[float, float]], learner: Learner) -> dict[str, float]:
    """The mean of each name over the calls of all ranks; every rank calls this.

    Args:
        said: sum and count by name; ranks need not have the same names.
        learner: knows the ranks.
    """
    found = Metrics(said)
    if learner.world_size > 1:
        found = Metrics()
        for text in _all_gather_text(json.dumps({k: [*v] for k, v in said.items()}), learner):
            found = found.merge(Metrics({k: (v[0], v[1]) for k, v in json.loads(text).items()}))
    return found.means()


def _all_gather_text(text: str, learner: Learner) -> list[str]:
    """The texts of all ranks, in rank order: each adds its own row to a table of zeros."""
    own = torch.tensor(list(text.encode()), dtype=torch.float64)
    sizes = torch.zeros(learner.world_size, dtype=torch.float64)
    sizes[learner.rank] = len(own)
    widths = [int(n) for n in learner.total(sizes)]
    table = torch.zeros(learner.world_size, max(widths), dtype=torch.float64)
    table[learner.rank, : len(own)] = own
    rows = learner.total(table).int().tolist()
    return [bytes(row[:width]).decode() for row, width in zip(rows, widths, strict=True)]
