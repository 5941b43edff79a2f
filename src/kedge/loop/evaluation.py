"""Evaluation: sample, score and compare with the reference, without training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kedge.loop.metrics import MetricAccumulator, reduce_metrics
from kedge.records.protocols import Learner, PromptSource, RewardSource, RolloutEngine
from kedge.records.seeds import seed_for
from kedge.records.types import Metrics, RewardOutput, Rollout, Sampling, require
from kedge.rollout.scheduler.collector import collect


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of an evaluation."""

    metrics: dict[str, float]  # without the eval_ prefix
    samples: list[tuple[Rollout, RewardOutput]]  # this rank's rows
    scores: Tensor  # float64 [rows], all ranks in order; NaN: not scored


def evaluate(
    source: PromptSource,
    *,
    batches: int,
    rows: int,
    rollouts: RolloutEngine,
    reward_source: RewardSource,
    learner: Learner,
    sampling: Sampling,
    reference: bool,
    seed: int,
    clock: Callable[[], float],
) -> Evaluation:
    """Score ``rows`` responses to evaluation prompts, on all ranks together.

    Further rows of the last batch are repeats and are ignored.  ``sampling`` usually has a lower
    temperature than in training; the models are needed for the KL to the ``reference``, if any.
    """
    means, samples, episodes = MetricAccumulator(), [], Metrics()
    begin, totals = clock(), torch.zeros(2, rows, dtype=torch.float64)
    for i in range(batches):
        prompts = source.batch(i)
        sample = collect(
            prompts,
            rollouts,
            reward_source,
            sampling=sampling,
            seed=seed_for(seed, "evaluate", i),
            clock=clock,
        )
        rollout, reward_output = sample.rollout, sample.reward_output
        wait = getattr(rollouts, "wait_for_other_ranks", None)
        if wait is not None and getattr(rollouts, "many_turns", False):
            wait()
        all_rows = learner.all_reduce(torch.tensor(float(len(prompts)), dtype=torch.float64))
        place = prompts.row + i * int(all_rows)
        keep = reward_output.valid & (place < rows)
        index = place[keep].cpu()
        totals[0, index] += reward_output.scores[keep].cpu().double()
        totals[1, index] += 1.0
        means.mean("objective/scores", reward_output.scores, keep)
        for name, part in reward_output.components.items():
            means.mean(f"rewards/{name}", part, keep & ~part.isnan())
        means.mean("completions/mean_length", rollout.loss_mask.sum(1), keep)
        means.mean("completions/truncated_ratio", ~rollout.terminated, keep)
        if reference:
            # The recorded log-probabilities have another temperature than those of training.
            unrecorded = replace(rollout, behavior_logprobs=None)
            models = learner.compute_logprobs(
                unrecorded, values=False, reference=True, full_kl=False
            )
            kl = models.logprobs - require(models.ref_logprobs, "reference")
            kl = (kl * rollout.loss_mask).sum(1)
            means.mean("objective/kl", kl, keep)
        if rollout.episodes is not None:
            played = rollout.episodes.rows((place < rows).nonzero()[:, 0])
            episodes = episodes.merge(Metrics(played.metrics))
        samples.append((rollout, reward_output))
    metrics = means.read(learner.all_reduce)
    if any(x.episodes is not None for x, _ in samples):  # on every rank, also one of repeats alone
        metrics |= reduce_metrics(episodes.totals, learner)
    metrics["time/step"] = clock() - begin
    sums, counts = learner.all_reduce(totals).cpu()
    return Evaluation(metrics=metrics, samples=samples, scores=sums / counts)  # 0 / 0 is NaN


def pass_at_k(samples: Tensor, solved: Tensor, k: int) -> Tensor:
    """Probability that at least one of k of a task's samples solves it.

    ``1 - C(n - c, k) / C(n, k)``: unbiased, unlike ``1 - (1 - c/n)^k``.  Computed as
    ``1 - prod_{j<k} (n - c - j) / (n - j)`` to avoid large numbers.
    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Args:
        samples: int [G]; n, samples of each task, at least k.
        solved: int [G]; c, samples that solve the task.
        k: number of attempts.

    Returns:
        float64 [G].

    Raises:
        ValueError: a task has fewer than k samples.
    """
    if k < 1 or bool((samples < k).any()):
        raise ValueError(f"pass@{k} needs k >= 1 and at least k samples per task")
    n, failed = samples.double(), (samples - solved).double()
    miss = torch.ones_like(n)
    for j in range(k):
        miss = miss * ((failed - j).clamp(min=0) / (n - j))
    return 1 - miss


def solve_rates(scores: Tensor, *, per_prompt: int, success: float) -> dict[str, float]:
    """``accuracy`` and ``pass@k`` for k = 2, 4, ... up to the completions of a prompt.

    ``scores`` float64 [rows] are grouped by prompt; NaN is not scored.  Such responses are ignored,
    and prompts with fewer than k scored responses are left out of pass@k.  A score of at least
    ``success`` solves the prompt.
    """
    tasks = scores.view(-1, per_prompt)
    known = ~tasks.isnan()
    samples, good = known.sum(1), ((tasks >= success) & known).sum(1)
    metrics: dict[str, float] = {}
    for k in sorted({2**i for i in range(per_prompt.bit_length())} | {per_prompt}):
        enough = samples >= k
        if enough.any():
            name = "accuracy" if k == 1 else f"pass@{k}"
            metrics[name] = float(pass_at_k(samples[enough], good[enough], k).mean())
    return metrics


def win_rate(scores: Tensor, start: Tensor) -> dict[str, float]:
    """``win_rate``: share of responses that score more than the initial policy's; ties count half.

    ``scores`` and ``start``, of the initial policy, are float64 [rows]; NaN: not scored.
    """
    both = ~(scores.isnan() | start.isnan())
    if not both.any():
        return {}
    trained, initial = scores[both], start[both]
    wins = (trained > initial).double() + 0.5 * (trained == initial)
    return {"win_rate": float(wins.mean())}
