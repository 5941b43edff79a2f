"""All metric names with their descriptions; the docs page is generated from them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from kedge.records.protocols import AllReduce, Learner
from kedge.records.types import Metrics

NAMES: dict[str, str] = {
    "episode": "responses trained on since the start of the run",
    "epoch": "passes over the training prompts",
    "eps": "episodes per second since the start of this process",
    "num_input_tokens_seen": "prompt and response tokens since the start of the run",
    "num_tokens": "prompt and response tokens sampled since the start of the run, without padding",
    "memory/peak_cpu": "MiB; peak memory of rank 0 since its start",
    "memory/peak_gpu": "MiB; peak memory of tensors on the GPU of rank 0",
    "tokens_per_second": "policy tokens sampled and trained on per second of this iteration",
    "lr": "learning rate of the policy in this iteration; 0 during value_warmup_steps",
    "lr/value": "learning rate of the value model in this iteration",
    "grad_norm": "gradient norm of all trained weights before clipping, mean over optimizer steps",
    "grad_norm/policy": "gradient norm of the policy's weights, which are clipped separately",
    "grad_norm/value": "gradient norm of the value model's weights; a value head on the policy's "
    "backbone is clipped together with the policy",
    "skipped_steps": "optimizer steps skipped because a gradient was not finite, since the start",
    "objective/kl": "nats per response; KL estimate summed over a response, mean over responses",
    "objective/kl2": "nats per response; the KL with the k2 estimator, whatever kl_estimator is",
    "objective/kl3": "nats per response; the KL with the k3 estimator, whatever kl_estimator is",
    "objective/kl_coef": "coefficient of the KL penalty used for this batch",
    "objective/entropy": "nats per response; sum of its tokens' negative log-probabilities",
    "objective/non_score_reward": "mean KL penalty per response, with stale tokens weighted",
    "objective/rlhf_reward": "score plus KL penalty, which PPO maximizes; mean over responses",
    "objective/scores": "mean score per response, including the penalty for a missing stop token",
    "objective/scores_std": "standard deviation of the scores over the batch",
    "objective/greedy_scores": "mean score of the greedy response to the same prompt (ReMax)",
    "objective/uniform_groups": "share of responses in groups whose scores are all equal",
    "policy/approxkl_avg": "nats per token; mean of 0.5 (log ratio)^2, where the ratio is to the "
    "policy that sampled the tokens or, with sampler_correction, to the policy before the "
    "iteration; per response if the ratio is clipped per response (RLOO)",
    "policy/policykl_avg": "nats per token; mean of old minus new log-probability, which is the k1 "
    "estimate of the KL to the same policy as in policy/approxkl_avg",
    "policy/clipfrac_avg": "share of tokens (RLOO: responses) that get no gradient because of the "
    "clip",
    "clip_ratio/low_mean": "share of tokens (RLOO: responses) with a negative advantage and a "
    "ratio below 1 - epsilon, which are clipped; GRPO and RLOO",
    "clip_ratio/high_mean": "share of tokens (RLOO: responses) with a positive advantage and a "
    "ratio above 1 + epsilon_high, which are clipped; GRPO and RLOO",
    "policy/entropy_avg": "nats per token; entropy of the policy during training",
    "policy/entropy_coef": "coefficient of the entropy bonus",
    "loss": "minimized loss: all terms times their coefficients, mean over optimizer steps",
    "loss/policy_avg": "policy loss, mean over optimizer steps",
    "loss/kl_avg": "KL in the loss without its coefficient beta, mean over optimizer steps",
    "loss/value_avg": "value loss without vf_coef, mean over optimizer steps",
    "val/clipfrac_avg": "share of tokens whose value loss the clip makes larger; 0 in RLOO",
    "val/ratio": "probability ratio to the same policy as in policy/approxkl_avg, mean over "
    "tokens (RLOO: responses) and optimizer steps",
    "val/ratio_var": "variance of the mean ratio over the optimizer steps of an iteration",
    "policy/ratio_min": "smallest probability ratio (as in val/ratio) of a trained token, before "
    "clipping, over all optimizer steps; per token even if the clip is per response",
    "policy/ratio_p01": "1% quantile of the importance ratios (logarithm exact to 0.6%), mean over "
    "optimizer steps",
    "policy/ratio_p99": "99% quantile of the importance ratios, mean over optimizer steps",
    "policy/ratio_max": "largest importance ratio, over tokens and optimizer steps",
    "val/num_eos_tokens": "terminated responses, which ended by themselves, in the batch on all "
    "ranks",
    "val/explained_variance": "1 - Var(return - value) / Var(return), for values before training",
    "val/advantage_std": "standard deviation of the advantages in the loss over tokens; it shrinks "
    "if a batch gives less gradient than earlier ones",
    "val/raw_advantage_std": "standard deviation of the unscaled advantages over tokens or turns",
    "val/value_mean": "mean predicted value per token",
    "val/return_mean": "mean return per token",
    "completions/mean_length": "tokens per response, including stop tokens; in episodes, only the "
    "policy's tokens",
    "completions/min_length": "tokens of the shortest response",
    "completions/max_length": "tokens of the longest response",
    "completions/mean_terminated_length": "mean_length of the terminated responses",
    "completions/min_terminated_length": "min_length of the terminated responses",
    "completions/max_terminated_length": "max_length of the terminated responses",
    "completions/truncated_ratio": "share of responses cut off by the length limit",
    "rollout/tokens": "prompt and response tokens in the batch, without padding",
    "rollout/lag": "iterations between sampling and training, for the oldest token of each "
    "response; mean over responses",
    "rollout/lag_max": "iterations since the oldest trained token on any rank was sampled",
    "rollout/too_old_tokens": "share of sampled tokens that are left out of the loss because they "
    "are older than max_lag; with sampler_correction=mask_old",
    "rollout/dropped_rows": "responses left out because their reward failed or did not apply",
    "rollout/untrained_rows": "scored responses left out of the loss because they were truncated "
    "or all scores in their group were equal",
    "rollout/resampled_groups": "groups that were replaced with other prompts because all their "
    "scores were equal",
    "rollout/correction_weight": "importance weight (learner / rollout engine), mean over tokens",
    "rollout/correction_bounded": "share of tokens whose importance weight was truncated or masked",
    "rollout/ratio_min": "smallest importance ratio (learner / rollout engine) of a trained token, "
    "before truncation or masking; only if the engine records log-probabilities",
    "rollout/ratio_p01": "1% quantile of the ratios (its logarithm is exact to 0.6%)",
    "rollout/ratio_p99": "99% quantile of the ratios",
    "rollout/ratio_max": "largest ratio",
    "rollout/logprob_gap": "nats per token; absolute difference of log-probabilities between "
    "rollout engine and learner, for tokens of the newest policy version (if there are any)",
    "rollout/sync_gap": "nats per token; absolute difference on the fixed tokens that verify a "
    "weight sync with vLLM, for the weights that sampled this batch; maximum over the engines",
    "rollout/stale_gap": "nats per token; absolute difference for responses of older weights",
    "environment/turns": "turns of the policy per episode",
    "environment/seconds": "seconds of sampling spent waiting for environments, per episode",
    "environment/model_seconds": "seconds of sampling spent in the model, per episode",
    "environment/errors": "share of episodes whose environment failed",
    "environment/ended_done": "share of episodes that ended because their environment said so; "
    "ended_truncated: because it cut them off; ended_answer: with an answer without a call; "
    "ended_turn_limit, ended_token_limit, ended_time_limit: at a limit; ended_environment_error, "
    "ended_grader_error: because the environment, or its reward, failed",
    "environment/hung_calls": "environment calls that exceeded environment_timeout and still run "
    "when an episode ends; each keeps a thread, at most environment_concurrency",
    "environment/cut_observations": "observations per episode whose middle was cut out because "
    "they left no room for a turn",
    "environment/new_contexts": "new contexts per episode (NewContext)",
    "environment/reward_per_turn": "mean reward per turn",
    "environment/last_reward_share": "share of an episode's rewards, in absolute value, that its "
    "last turn gets",
    "environment/tool_calls": "tool calls per episode",
    "environment/tool_errors": "tool calls per episode that failed; the policy gets the error",
    "environment/invalid_calls": "tool calls per episode that could not be read",
    "environment/loss_tokens": "share of response tokens that the policy produced; the others come "
    "from environments",
    "eval_loss": "minus the mean score, plus the KL times its coefficient in training; lower is "
    "better (TRL logs the surrogate loss, which does not measure quality)",
    "eval_accuracy": "share of evaluation responses that score at least eval_success_score",
    "eval_win_rate": "share of evaluation responses that score more than the initial policy's "
    "response to the same prompt; a tie counts as half",
    "time/rollout": "seconds of this iteration spent sampling",
    "time/reward": "seconds spent scoring",
    "time/annotate": "seconds spent computing log-probabilities and values before training",
    "time/update": "seconds spent on the optimizer steps",
    "time/step": "seconds of the whole iteration",
    "train_loss": "last row only: mean of loss over all iterations of the run",
    "train_runtime": "last row only: seconds that train() took",
    "train_samples_per_second": "last row only: responses trained on per second",
    "train_steps_per_second": "last row only: iterations per second",
}
# TRL's names in GRPO and RLOO -> Kedge's names; those trainers log both.
TRL_NAMES: dict[str, str] = {
    "reward": "objective/scores",
    "reward_std": "objective/scores_std",
    "frac_reward_zero_std": "objective/uniform_groups",
    "kl": "loss/kl_avg",
    "entropy": "policy/entropy_avg",
    "entropy_coef": "policy/entropy_coef",
    "clip_ratio/region_mean": "policy/clipfrac_avg",
    "completions/clipped_ratio": "completions/truncated_ratio",
    "sampling/importance_sampling_ratio/mean": "rollout/correction_weight",
    "sampling/sampling_logp_difference/mean": "rollout/logprob_gap",
    "learning_rate": "lr",
    "step_time": "time/step",
}
PREFIXES: dict[str, str] = {
    "rollout/token_lag/": "share of the trained tokens that were sampled that many iterations ago; "
    "only if a batch has tokens of different ages",
    "rewards/": "mean score from one reward source over the responses to which it applies; "
    ".../std: standard deviation of these scores",
    "eval_pass@": "unbiased estimate of the share of evaluation prompts solved by at least one of "
    "k responses (arXiv:2107.03374)",
    "eval_": "the metric of that name on the evaluation prompts, or a value from compute_metrics",
    "environment/": "numbers that environments report, mean over episodes: those in "
    "info['metrics'] are summed over an episode, and those in info itself are the last value",
    "log/": "what a reward function recorded with log_metric, mean over its calls on all ranks",
}


def check_known(metrics: Mapping[str, float]) -> None:
    """Raise KeyError for a metric without a description."""
    unknown = sorted(n for n in metrics if n not in NAMES and not n.startswith(tuple(PREFIXES)))
    if unknown:
        raise KeyError(
            f"unknown metrics {unknown}; metrics of a custom algorithm must start with log/"
            " (Kedge's own are listed in loop/metrics.py, NAMES)"
        )


class MetricAccumulator:
    """Accumulates means and sums over this rank's rows and reduces them over ranks in one call."""

    def __init__(self) -> None:
        self._means: dict[str, Tensor] = {}  # float64 [3]: sum, sum of squares, count
        self._stds: dict[str, tuple[str, bool]] = {}
        self._sums: dict[str, Tensor] = {}

    def mean(
        self, name: str, x: Tensor, keep: Tensor, *, std: str = "", unbiased: bool = False
    ) -> None:
        """Mean of ``x`` where ``keep`` (bool, the same shape); repeated calls accumulate.

        It is not reported under a name that starts with an underscore.  ``std`` names the standard
        deviation, if it is reported; ``unbiased`` divides by n - 1, and leaves it out for a single
        value.
        """
        kept = torch.where(keep, x.to(torch.float64), 0.0)
        sums = torch.stack([kept.sum(), (kept**2).sum(), keep.sum().double()]).cpu()
        self._means[name] = self._means[name] + sums if name in self._means else sums
        self._stds[name] = (std, unbiased)

    def sum(self, name: str, x: Tensor) -> None:
        """Sum of ``x``; repeated calls accumulate."""
        added = x.to(torch.float64).sum().cpu()
        self._sums[name] = self._sums[name] + added if name in self._sums else added

    def read(self, all_reduce: AllReduce) -> dict[str, float]:
        """Values over all ranks; means with count 0 are left out."""
        parts = [*self._means.values(), *(x[None] for x in self._sums.values())]
        merged = iter(all_reduce(torch.cat(parts)).tolist() if parts else [])
        metrics: dict[str, float] = {}
        for name, (std, unbiased) in self._stds.items():
            top, squares, count = next(merged), next(merged), next(merged)
            if count and not name.startswith("_"):
                metrics[name] = top / count
            if std and count > unbiased:
                variance = max(squares / count - (top / count) ** 2, 0.0)
                metrics[std] = (variance * count / (count - unbiased)) ** 0.5
        return metrics | {name: next(merged) for name in self._sums}


def reduce_metrics(totals: Mapping[str, tuple[float, float]], learner: Learner) -> dict[str, float]:
    """The mean of each name over all ranks, from (sum, count) by name; every rank must call this.

    Names may differ between ranks.
    """
    metrics = Metrics(totals)
    if learner.world_size > 1:
        metrics = Metrics()
        for text in _all_gather_text(json.dumps({k: [*v] for k, v in totals.items()}), learner):
            metrics = metrics.merge(Metrics({k: (v[0], v[1]) for k, v in json.loads(text).items()}))
    return metrics.means()


def _all_gather_text(text: str, learner: Learner) -> list[str]:
    """The texts of all ranks in rank order; each rank fills its row of a table that is summed."""
    codes = torch.tensor(list(text.encode()), dtype=torch.float64)
    sizes = torch.zeros(learner.world_size, dtype=torch.float64)
    sizes[learner.rank] = len(codes)
    widths = [int(n) for n in learner.all_reduce(sizes)]
    table = torch.zeros(learner.world_size, max(widths), dtype=torch.float64)
    table[learner.rank, : len(codes)] = codes
    rows = learner.all_reduce(table).int().tolist()
    return [bytes(row[:width]).decode() for row, width in zip(rows, widths, strict=True)]
