"""Evaluation: sample, score, compare with the reference.  Nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kedge.engine.metrics import Tally
from kedge.engine.seeds import seed_for
from kedge.engine.stages import collect
from kedge.engine.verdicts import everywhere
from kedge.protocols import Learner, PromptSource, RewardSource, RolloutEngine
from kedge.types import Judgement, Rollout, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    metrics: dict[str, float]  # without the eval_ prefix
    samples: list[tuple[Rollout, Judgement]]  # this rank's rows
    scores: Tensor  # float64 [rows], of all ranks in order; NaN where there is none


def evaluate(
    source: PromptSource,
    *,
    batches: int,
    rows: int,
    rollouts: RolloutEngine,
    judge: RewardSource,
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
        judge: the reward.
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
        rollout, judgement, _ = collect(
            prompts,
            rollouts,
            judge,
            sampling=sampling,
            seed=seed_for(seed, "evaluate", i),
            clock=clock,
        )
        place = prompts.row + i * _global_rows(prompts.row, learner)
        keep = judgement.valid & (place < rows)
        scored += everywhere(rows, place[keep].cpu(), judgement.scores[keep].cpu())
        tally.mean("objective/scores", judgement.scores, keep)
        for name, part in judgement.parts.items():
            tally.mean(f"rewards/{name}", part, keep & ~part.isnan())
        tally.mean("completions/mean_length", rollout.present.sum(1), keep)
        tally.mean("completions/truncated_ratio", ~rollout.finished, keep)
        if reference:
            # What the sampler recorded is of a colder distribution than the one that trains.
            fresh = replace(rollout, behavior_logprobs=None)
            note = learner.annotate(fresh, values=False, reference=True, full_kl=False)
            assert note.ref_logprobs is not None
            kl = ((note.logprobs - note.ref_logprobs) * rollout.mask).sum(1)
            tally.mean("objective/kl", kl, keep)
        samples.append((rollout, judgement))
    metrics = tally.read(learner.total)
    metrics["time/step"] = clock() - begin
    sums, counts = learner.total(scored).cpu()
    return Evaluation(metrics=metrics, samples=samples, scores=sums / counts)  # 0 / 0 is NaN


def _global_rows(row: torch.Tensor, learner: Learner) -> int:
    return int(learner.total(torch.tensor(float(len(row)), dtype=torch.float64)))
