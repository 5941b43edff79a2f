"""Evaluation: sample, score, compare with the reference.  Nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kedge.engine.metrics import Tally
from kedge.engine.seeds import seed_for
from kedge.engine.stages import collect
from kedge.protocols import Learner, PromptSource, RewardSource, RolloutEngine
from kedge.types import RewardOutput, Rollout, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    metrics: dict[str, float]  # without the eval_ prefix
    samples: list[tuple[Rollout, RewardOutput]]  # this rank's rows
    scores: Tensor  # float64 [rows], of all ranks in order; NaN where there is none


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
    """Score responses to evaluation prompts.

    Args:
        source: batch i holds the prompts of evaluation batch i.
        batches: how many batches there are.
        rows: responses in all; rows of the last batch beyond it are repeats and are left out.
        rollouts: the sampler.
        reward_source: the reward.
        learner: the models, for the KL to the reference.
        sampling: how to sample; usually colder than in training.
        reference: whether there is a reference.
        seed: base of the random streams.
        clock: seconds.
    """
    tally, samples = Tally(), []
    begin, scored = clock(), torch.zeros(2, rows, dtype=torch.float64)
    for i in range(batches):
        prompts = source.batch(i)
        rollout, reward_output, _ = collect(
            prompts,
            rollouts,
            reward_source,
            sampling=sampling,
            seed=seed_for(seed, "evaluate", i),
            clock=clock,
        )
        place = prompts.row + i * _global_rows(prompts.row, learner)
        keep = reward_output.valid & (place < rows)
        scored += everywhere(rows, place[keep].cpu(), reward_output.scores[keep].cpu())
        tally.mean("objective/scores", reward_output.scores, keep)
        for name, part in reward_output.components.items():
            tally.mean(f"rewards/{name}", part, keep & ~part.isnan())
        tally.mean("completions/mean_length", rollout.response_mask.sum(1), keep)
        tally.mean("completions/truncated_ratio", ~rollout.terminated, keep)
        if reference:
            # What the sampler recorded is of a colder distribution than the one that trains.
            fresh = replace(rollout, behavior_logprobs=None)
            note = learner.compute_logprobs(fresh, values=False, reference=True, full_kl=False)
            assert note.ref_logprobs is not None
            kl = ((note.logprobs - note.ref_logprobs) * rollout.loss_mask).sum(1)
            tally.mean("objective/kl", kl, keep)
        samples.append((rollout, reward_output))
    metrics = tally.read(learner.total)
    metrics["time/step"] = clock() - begin
    sums, counts = learner.total(scored).cpu()
    return Evaluation(metrics=metrics, samples=samples, scores=sums / counts)  # 0 / 0 is NaN


def _global_rows(row: torch.Tensor, learner: Learner) -> int:
    return int(learner.total(torch.tensor(float(len(row)), dtype=torch.float64)))


def pass_at_k(samples: Tensor, solved: Tensor, k: int) -> Tensor:
    """Probability that at least one of k of a task's samples solves it.

    ``1 - C(n - c, k) / C(n, k)``: unbiased, where ``1 - (1 - c/n)^k`` is not.  As a product,
    ``1 - prod_{j<k} (n - c - j) / (n - j)``, it needs no large number.
    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Args:
        samples: int [G]; n, samples drawn for each task, at least k.
        solved: int [G]; c, how many of them solve it.
        k: samples that one may try.

    Returns:
        float64 [G].

    Raises:
        ValueError: a task has fewer than k samples.
    """
    if k < 1 or bool((samples < k).any()):
        raise ValueError(f"pass@{k} needs k >= 1 and at least k samples of every task")
    n, failed = samples.double(), (samples - solved).double()
    miss = torch.ones_like(n)
    for j in range(k):
        miss = miss * ((failed - j).clamp(min=0) / (n - j))
    return 1 - miss


def solved(scores: Tensor, *, per_prompt: int, success: float) -> dict[str, float]:
    """``accuracy`` and ``pass@k`` for k = 2, 4, ... up to the completions of a prompt.

    Args:
        scores: float64 [rows], those of a prompt together; NaN where there is none.  Such a
            response counts neither way, and a prompt with fewer than k others is left out of
            pass@k.
        per_prompt: completions of each prompt.
        success: a score at least this solves the prompt.
    """
    tasks = scores.view(-1, per_prompt)
    known = ~tasks.isnan()
    samples, good = known.sum(1), ((tasks >= success) & known).sum(1)
    found: dict[str, float] = {}
    for k in _sizes(per_prompt):
        enough = samples >= k
        if enough.any():
            name = "accuracy" if k == 1 else f"pass@{k}"
            found[name] = float(pass_at_k(samples[enough], good[enough], k).mean())
    return found


def win_rate(scores: Tensor, start: Tensor) -> dict[str, float]:
    """``win_rate``: share of responses that score more than the start's, ties count half.

    Args:
        scores: float64 [rows]; NaN where there is none.
        start: the starting policy's scores of the same rows.
    """
    both = ~(scores.isnan() | start.isnan())
    if not both.any():
        return {}
    now, then = scores[both], start[both]
    return {"win_rate": float(((now > then).double() + 0.5 * (now == then)).mean())}


def _sizes(most: int) -> list[int]:
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return powers if most in powers else [*powers, most]


def everywhere(rows: int, index: Tensor, values: Tensor) -> Tensor:
    """A vector to be summed over ranks: this rank's values and a count of them, [2, rows]."""
    out = torch.zeros(2, rows, dtype=torch.float64)
    out[0, index] = values.double()
    out[1, index] = 1.0
    return out
