"""The stages of one training step, each a function of the record before it.

collect -> make_experience -> optimise (cut -> Learner.update, once per optimiser step)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from statistics import fmean

import torch
from torch import Tensor

from kedge.algorithms.base import Algorithm, Evidence
from kedge.engine.brakes import Brakes
from kedge.engine.metrics import Tally
from kedge.engine.resample import rows_of
from kedge.engine.said import said_by_all
from kedge.errors import ConfigError, RewardError, RolloutError
from kedge.math.advantage import group_count, group_std
from kedge.math.kl import k2, k3
from kedge.math.offpolicy import Correction, importance_weights
from kedge.math.weights import WEIGHTINGS, row_mean
from kedge.protocols import Learner, RewardSource, RolloutEngine, Total
from kedge.types import (
    Annotation,
    Credit,
    Experience,
    Judgement,
    MicroBatch,
    PromptBatch,
    Rollout,
    Sampling,
)


def collect(
    prompts: PromptBatch,
    engine: RolloutEngine,
    judge: RewardSource,
    *,
    sampling: Sampling,
    seed: int,
    clock: Callable[[], float],
    greedy: bool = False,
    on_rollout: Callable[[Rollout], None] = lambda rollout: None,
) -> tuple[Rollout, Judgement, dict[str, float]]:
    """Sample one response per prompt row and score it; also the seconds each took.

    With ``greedy`` the most likely response to each prompt is scored too, as the baseline.
    ``on_rollout`` sees the responses before anything is scored.
    """
    begin = clock()
    rollout = engine.generate(prompts, sampling=sampling, seed=seed)
    if len(rollout) != len(prompts):
        raise RolloutError(
            f"{type(engine).__name__}.generate returned {len(rollout)} rows for {len(prompts)}"
            " prompts; it must return one response per prompt row, in order"
        )
    if not rollout.ids.shape[1]:
        raise RolloutError(
            f"{type(engine).__name__}.generate returned responses without any token; a response"
            " holds at least one, its stop token included"
        )
    on_rollout(rollout)
    sampled = clock()
    judgement = judge.score(rollout)
    if greedy and judgement.baseline is None:
        judgement = _with_baseline(judgement, prompts, engine, judge, sampling=sampling, seed=seed)
    times = {"time/rollout": sampled - begin, "time/reward": clock() - sampled}
    return rollout, judgement, times


def _with_baseline(
    judgement: Judgement,
    prompts: PromptBatch,
    engine: RolloutEngine,
    judge: RewardSource,
    *,
    sampling: Sampling,
    seed: int,
) -> Judgement:
    """The judgement with greedy scores; where those fail, the group's rows are not valid."""
    _, group = prompts.group.unique(return_inverse=True)
    order = torch.arange(len(prompts), device=group.device)
    first = order.new_full((int(group.max()) + 1,), len(prompts))
    first = first.scatter_reduce(0, group, order, "amin")
    argmax = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    found = judge.score(engine.generate(rows_of(prompts, first), sampling=argmax, seed=seed))
    return replace(
        judgement, baseline=found.scores[group], valid=judgement.valid & found.valid[group]
    )


def make_experience(
    rollout: Rollout,
    judgement: Judgement,
    learner: Learner,
    algo: Algorithm,
    kl_coef: float,
    correction: Correction | None = None,
) -> tuple[Experience, dict[str, float]]:
    """Ask the models what they think of the rollout, and assign credit.

    The ratio's anchor is the learner, and for stale rows what sampled them.  With a ``correction``
    it is the learner for all rows, and advantages are weighed by learner against sampler, bounded:
    decoupled PPO (Hilton et al. 2021, arXiv:2110.00641; Fu et al. 2025, arXiv:2505.24298, eq. 5).
    """
    if not float(learner.total(judgement.valid.sum())):
        raise RewardError(
            f"none of the {len(rollout)} responses of this batch could be scored; see the log for"
            ' the first failure, or use on_reward_error="raise" to stop at it'
        )
    _check_scores(judgement)
    rollout = replace(rollout, mask=rollout.mask & judgement.valid[:, None])
    note = learner.annotate(
        rollout,
        values=algo.needs_values,
        reference=algo.needs_reference,
        full_kl=algo.needs_full_kl,
    )
    stale = (rollout.version >= 0) & (rollout.version < learner.version)
    sampled, own = rollout.behavior_logprobs, note.logprobs
    if sampled is not None and correction is None:
        note = replace(note, logprobs=torch.where(stale[:, None], sampled, own))
    evidence = Evidence(rollout=rollout, judgement=judgement, annotation=note, total=learner.total)
    credit = algo.credit(evidence, kl_coef)
    _check_credit(credit, algo, rollout.mask)
    tally = Tally()
    if sampled is not None and own is not sampled:
        gap = (sampled - own).abs()
        tally.mean("rollout/logprob_gap", gap, rollout.mask & ~stale[:, None])
        tally.mean("rollout/stale_gap", gap, rollout.mask & stale[:, None])
    if correction is not None:
        credit = _corrected(credit, rollout, own, correction, tally)
    lag = (learner.version - rollout.version).clamp(min=0)
    tally.mean("rollout/lag", lag, rollout.version >= 0)
    _describe_batch(tally, evidence, credit, kl_coef)
    metrics = tally.read(learner.total) | _lengths(rollout, judgement.valid, learner.total)
    metrics["objective/kl_coef"] = kl_coef
    said = said_by_all(judgement.said, learner)
    metrics |= {f"log/{name}": mean for name, mean in said.items()}
    _derive(metrics)
    return _experience(rollout, note, credit), metrics


def _check_scores(judgement: Judgement) -> None:
    bad = judgement.valid & ~judgement.scores.isfinite()
    if bad.any():
        row = int(bad.nonzero()[0])
        raise RewardError(
            f"the score of row {row} is {float(judgement.scores[row])}; a reward must be a finite"
            " number. A weighted sum may overflow; a source of your own may divide by zero, and can"
            " mark a row as not valid instead"
        )


def _check_credit(credit: Credit, algo: Algorithm, mask: Tensor) -> None:
    """A field of another shape would spread over tokens by torch's rules of broadcasting."""
    for field in fields(credit):
        x = getattr(credit, field.name)
        if x is not None and x.shape != mask.shape:
            raise ConfigError(
                f"the credit of {algo.name} has {field.name} of shape {tuple(x.shape)}; every field"
                f" holds one number per response token, {tuple(mask.shape)} here: a number per"
                " response is x[:, None] * evidence.rollout.mask"
            )
    if not bool(credit.advantages[mask].isfinite().all()):
        raise ConfigError(f"the credit of {algo.name} has advantages that are not finite")


def _corrected(
    credit: Credit, rollout: Rollout, own: Tensor, how: Correction, tally: Tally
) -> Credit:
    """Advantages weighed for what sampled their tokens.

    Losses are proportional to positive factors of an advantage, so this is the weight of the token
    in the loss, whatever the algorithm.
    """
    if rollout.behavior_logprobs is None:
        raise RolloutError(
            f"sampler_correction={how.kind!r} weighs tokens by learner against sampler, and the"
            " rollout engine records no log-probabilities; use one that does, or leave it out"
        )
    weight = importance_weights(own, rollout.behavior_logprobs, rollout.mask, how)
    tally.mean("rollout/correction_weight", weight, rollout.mask)
    free = replace(how, kind="truncate", high=float("inf"))
    bounded = weight != importance_weights(own, rollout.behavior_logprobs, rollout.mask, free)
    tally.mean("rollout/correction_bounded", bounded, rollout.mask)
    return replace(credit, advantages=credit.advantages * weight)


def _experience(rollout: Rollout, note: Annotation, credit: Credit) -> Experience:
    mask = rollout.mask if credit.mask is None else rollout.mask & credit.mask
    return Experience(
        prompt_ids=rollout.prompts.ids,
        prompt_mask=rollout.prompts.mask,
        ids=rollout.ids,
        mask=mask,
        present=rollout.present,
        value_mask=mask if credit.value_mask is None else credit.value_mask,
        old_logprobs=note.logprobs,
        ref_logprobs=note.ref_logprobs,
        old_values=note.values,
        rewards=credit.rewards,
        advantages=credit.advantages,
        returns=credit.returns,
        behavior_logprobs=rollout.behavior_logprobs,
        support=rollout.support,
    )


def _describe_batch(tally: Tally, e: Evidence, credit: Credit, kl_coef: float) -> None:
    """What the batch was like, rows that could not be scored left out."""
    valid, mask, note = e.judgement.valid, e.rollout.mask, e.annotation
    scores = e.judgement.scores
    tally.mean("objective/scores", scores, valid)
    tally.mean("_scores_squared", scores.double() ** 2, valid)
    if e.judgement.baseline is not None:
        tally.mean("objective/greedy_scores", e.judgement.baseline, valid)
    for name, part in e.judgement.parts.items():
        tally.mean(f"rewards/{name}", part, valid & ~part.isnan())
    tally.mean("objective/entropy", -(note.logprobs * mask).sum(1), valid)
    if credit.kl is not None:
        kl = (credit.kl * mask).sum(1)
        tally.mean("objective/kl", kl, valid)
        tally.mean("objective/non_score_reward", -kl_coef * kl, valid)
    if note.ref_logprobs is not None:
        for name, estimate in (("objective/kl2", k2), ("objective/kl3", k3)):
            tally.mean(name, (estimate(note.logprobs, note.ref_logprobs) * mask).sum(1), valid)
    if credit.returns is not None and note.values is not None:
        where = mask if credit.value_mask is None else credit.value_mask
        error = credit.returns.double() - note.values
        tally.mean("val/value_mean", note.values, where)
        tally.mean("val/return_mean", credit.returns, where)
        tally.mean("_return_squared", credit.returns.double() ** 2, where)
        tally.mean("_error", error, where)
        tally.mean("_error_squared", error**2, where)
    if credit.mask is not None:
        left_out = mask.any(1) & ~(mask & credit.mask).any(1)
        tally.sum("rollout/untrained_rows", left_out)
    group = e.rollout.prompts.group
    spread = group_std(scores, group, valid)
    tally.mean("objective/uniform_groups", spread == 0, valid & (group_count(group, valid) > 1))
    tally.sum("val/num_eos_tokens", e.rollout.finished & valid)
    tally.sum("rollout/dropped_rows", ~valid)
    tally.mean("completions/truncated_ratio", ~e.rollout.finished, valid)


def _derive(metrics: dict[str, float]) -> None:
    """Metrics that are functions of other means; the private inputs are removed."""
    score = metrics["objective/scores"]
    metrics["objective/rlhf_reward"] = score + metrics.get("objective/non_score_reward", 0.0)
    metrics["objective/scores_std"] = max(metrics.pop("_scores_squared") - score**2, 0.0) ** 0.5
    if "_return_squared" in metrics:
        spread = metrics.pop("_return_squared") - metrics["val/return_mean"] ** 2
        left = metrics.pop("_error_squared") - metrics.pop("_error") ** 2
        if spread > 0:
            metrics["val/explained_variance"] = 1 - left / spread


def _lengths(rollout: Rollout, valid: Tensor, total: Total) -> dict[str, float]:
    """Mean, shortest and longest response over all ranks, from one histogram."""
    lengths = rollout.present.sum(1)[valid]
    widest = _bound(rollout.ids.shape[1], total)
    histogram = total(torch.bincount(lengths.cpu(), minlength=widest + 1).double())
    seen = histogram.nonzero().squeeze(1)
    if not len(seen):
        return {}
    mean = (histogram * torch.arange(widest + 1)).sum() / histogram.sum()
    return {
        "completions/mean_length": float(mean),
        "completions/min_length": float(seen[0]),
        "completions/max_length": float(seen[-1]),
    }


def _bound(x: int, total: Total) -> int:
    """At least the largest ``x`` of any rank: their sum."""
    return int(total(torch.tensor(float(x), dtype=torch.float64)))


def cut(
    experience: Experience, index: Tensor, algo: Algorithm, micro_rows: int, total: Total
) -> Iterator[MicroBatch]:
    """One optimiser step's rows as micro-batches; weights are fixed before the cut.

    Rows of like length go together, which saves padding and changes no number.
    """
    lengths = (experience.prompt_mask.sum(1) + experience.present.sum(1))[index]
    step = experience.rows(index[lengths.argsort(descending=True, stable=True)])
    weigh = WEIGHTINGS[algo.weighting]
    token, value, row = (
        weigh(step.mask, total),
        weigh(step.value_mask, total),
        row_mean(step.mask, total),
    )
    for part in torch.arange(len(step)).split(micro_rows):
        yield MicroBatch(
            rows=step.rows(part),
            token_weight=token[part],
            value_weight=value[part],
            row_weight=row[part],
        )


def optimise(
    experience: Experience,
    learner: Learner,
    algo: Algorithm,
    *,
    epochs: int,
    minibatches: int,
    micro_rows: int,
    seed: int,
    only_value: bool = False,
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
    brakes: Brakes | None = None,
) -> dict[str, float]:
    """``epochs`` passes over the experience, ``minibatches`` optimiser steps each.

    Mini-batches are drawn from the rows of all ranks, so which rows share one does not depend on
    the number of ranks; each rank works on an equal share of every mini-batch.
    """
    shuffle = torch.Generator().manual_seed(seed)
    share = slice(None)
    if minibatches > 1 and learner.ranks > 1:
        experience, share = learner.pool(experience), slice(learner.rank, None, learner.ranks)
    limits = brakes or Brakes()
    history: list[dict[str, float]] = []

    def admit(metrics: Mapping[str, float]) -> bool:
        good = limits.admits(metrics)
        if good:
            before_step()
        return good

    for _ in range(epochs):
        order = torch.randperm(len(experience), generator=shuffle)
        for index in order.chunk(minibatches):
            step = cut(experience, index[share], algo, micro_rows, learner.total)
            found = learner.update(step, algo.loss, only_value=only_value, admit=admit)
            history.append(found)
            after_step()
            if limits.ends(found):
                return _over_steps(history)
    return _over_steps(history)


def _over_steps(history: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimiser steps of an update."""
    metrics = {name: fmean(h[name] for h in history if name in h) for name in history[0]}
    ratios = [h["val/ratio"] for h in history if "val/ratio" in h]
    if len(ratios) > 1:
        mean = fmean(ratios)
        metrics["val/ratio_var"] = sum((r - mean) ** 2 for r in ratios) / (len(ratios) - 1)
    elif ratios:
        metrics["val/ratio_var"] = 0.0
    return metrics
