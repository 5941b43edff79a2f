"""The stages of one training step, each a function of the record before it.

collect -> make_experience -> optimize (cut -> Learner.update, once per optimizer step)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from statistics import fmean

import torch
from torch import Tensor

from kedge.algorithms.base import AdvantageInputs, Algorithm
from kedge.engine.batch_metrics import batch_metrics
from kedge.engine.early_stopping import StepLimits
from kedge.engine.metrics import Tally, reduce_metrics
from kedge.errors import ConfigError, RewardError, RolloutError
from kedge.math.importance import Correction, importance_weights
from kedge.math.loss_weights import WEIGHTINGS, row_mean
from kedge.protocols import Learner, RewardSource, RolloutEngine, Total
from kedge.types import (
    AdvantageOutput,
    Experience,
    MicroBatch,
    ModelOutputs,
    PromptBatch,
    RewardOutput,
    Rollout,
    Sampling,
)


def collect(
    prompts: PromptBatch,
    engine: RolloutEngine,
    reward_source: RewardSource,
    *,
    sampling: Sampling,
    seed: int,
    clock: Callable[[], float],
    greedy: bool = False,
    on_rollout: Callable[[Rollout], None] = lambda rollout: None,
) -> tuple[Rollout, RewardOutput, dict[str, float]]:
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
    reward_output = reward_source.score(rollout)
    if greedy and reward_output.greedy_scores is None:
        reward_output = _with_baseline(
            reward_output, prompts, engine, reward_source, sampling=sampling, seed=seed
        )
    times = {"time/rollout": sampled - begin, "time/reward": clock() - sampled}
    return rollout, reward_output, times


def _with_baseline(
    reward_output: RewardOutput,
    prompts: PromptBatch,
    engine: RolloutEngine,
    reward_source: RewardSource,
    *,
    sampling: Sampling,
    seed: int,
) -> RewardOutput:
    """The reward output with greedy scores; where those fail, the group's rows are not valid."""
    _, group = prompts.group.unique(return_inverse=True)
    order = torch.arange(len(prompts), device=group.device)
    first = order.new_full((int(group.max()) + 1,), len(prompts))
    first = first.scatter_reduce(0, group, order, "amin")
    argmax = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    found = reward_source.score(engine.generate(prompts.rows(first), sampling=argmax, seed=seed))
    return replace(
        reward_output,
        greedy_scores=found.scores[group],
        valid=reward_output.valid & found.valid[group],
    )


def make_experience(
    rollout: Rollout,
    reward_output: RewardOutput,
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
    _check_scores(reward_output)
    rollout = replace(rollout, loss_mask=rollout.loss_mask & reward_output.valid[:, None])
    note = learner.compute_logprobs(
        rollout,
        values=algo.needs_values,
        reference=algo.needs_reference,
        full_kl=algo.needs_full_kl,
    )
    stale = (rollout.version >= 0) & (rollout.version < learner.version)
    sampled, own = rollout.behavior_logprobs, note.logprobs
    if sampled is not None and correction is None:
        note = replace(note, logprobs=torch.where(stale[:, None], sampled, own))
    inputs = AdvantageInputs(
        rollout=rollout, reward_output=reward_output, model_outputs=note, total=learner.total
    )
    advantage_output = algo.compute_advantages(inputs, kl_coef)
    _check_credit(advantage_output, algo, rollout.loss_mask)
    tally = Tally()
    if sampled is not None and own is not sampled:
        gap = (sampled - own).abs()
        tally.mean("rollout/logprob_gap", gap, rollout.loss_mask & ~stale[:, None])
        tally.mean("rollout/stale_gap", gap, rollout.loss_mask & stale[:, None])
    if correction is not None:
        advantage_output = _corrected(advantage_output, rollout, own, correction, tally)
    lag = (learner.version - rollout.version).clamp(min=0)
    tally.mean("rollout/lag", lag, rollout.version >= 0)
    metrics = batch_metrics(inputs, advantage_output, kl_coef, tally)
    metrics |= {
        f"log/{n}": mean for n, mean in reduce_metrics(reward_output.metrics, learner).items()
    }
    return _experience(rollout, note, advantage_output), metrics


def _check_scores(reward_output: RewardOutput) -> None:
    bad = reward_output.valid & ~reward_output.scores.isfinite()
    if bad.any():
        row = int(bad.nonzero()[0])
        raise RewardError(
            f"the score of row {row} is {float(reward_output.scores[row])}; a reward must be a"
            f" finite"
            " number. A weighted sum may overflow; a source of your own may divide by zero, and can"
            " mark a row as not valid instead"
        )


def _check_credit(advantage_output: AdvantageOutput, algo: Algorithm, mask: Tensor) -> None:
    """A field of another shape would spread over tokens by torch's rules of broadcasting."""
    for field in fields(advantage_output):
        x = getattr(advantage_output, field.name)
        if x is not None and x.shape != mask.shape:
            raise ConfigError(
                f"the credit of {algo.name} has {field.name} of shape {tuple(x.shape)}; every field"
                f" holds one number per response token, {tuple(mask.shape)} here: a number per"
                " response is x[:, None] * inputs.rollout.loss_mask"
            )
    if not bool(advantage_output.advantages[mask].isfinite().all()):
        raise ConfigError(f"the credit of {algo.name} has advantages that are not finite")


def _corrected(
    advantage_output: AdvantageOutput, rollout: Rollout, own: Tensor, how: Correction, tally: Tally
) -> AdvantageOutput:
    """Advantages weighed for what sampled their tokens.

    Losses are proportional to positive factors of an advantage, so this is the weight of the token
    in the loss, whatever the algorithm.
    """
    if rollout.behavior_logprobs is None:
        raise RolloutError(
            f"sampler_correction={how.kind!r} weighs tokens by learner against sampler, and the"
            " rollout engine records no log-probabilities; use one that does, or leave it out"
        )
    weight = importance_weights(own, rollout.behavior_logprobs, rollout.loss_mask, how)
    tally.mean("rollout/correction_weight", weight, rollout.loss_mask)
    free = replace(how, kind="truncate", high=float("inf"), low=0.0)
    bounded = weight != importance_weights(own, rollout.behavior_logprobs, rollout.loss_mask, free)
    tally.mean("rollout/correction_bounded", bounded, rollout.loss_mask)
    return replace(advantage_output, advantages=advantage_output.advantages * weight)


def _experience(
    rollout: Rollout, note: ModelOutputs, advantage_output: AdvantageOutput
) -> Experience:
    mask = rollout.loss_mask
    if advantage_output.loss_mask is not None:
        mask = mask & advantage_output.loss_mask
    return Experience(
        prompt_ids=rollout.prompts.ids,
        prompt_mask=rollout.prompts.mask,
        ids=rollout.ids,
        loss_mask=mask,
        response_mask=rollout.response_mask,
        value_mask=mask if advantage_output.value_mask is None else advantage_output.value_mask,
        old_logprobs=note.logprobs,
        ref_logprobs=note.ref_logprobs,
        old_values=note.values,
        rewards=advantage_output.rewards,
        advantages=advantage_output.advantages,
        returns=advantage_output.returns,
        behavior_logprobs=rollout.behavior_logprobs,
        allowed_tokens=rollout.allowed_tokens,
    )


def cut(
    experience: Experience, index: Tensor, algo: Algorithm, micro_rows: int, total: Total
) -> Iterator[MicroBatch]:
    """One optimizer step's rows as micro-batches; weights are fixed before the cut.

    Rows of like length go together, which saves padding and changes no number.
    """
    lengths = (experience.prompt_mask.sum(1) + experience.response_mask.sum(1))[index]
    step = experience.rows(index[lengths.argsort(descending=True, stable=True)])
    weigh = WEIGHTINGS[algo.weighting]
    token, value, row = (
        weigh(step.loss_mask, total),
        weigh(step.value_mask, total),
        row_mean(step.loss_mask, total),
    )
    for part in torch.arange(len(step)).split(micro_rows):
        yield MicroBatch(
            rows=step.rows(part),
            token_weight=token[part],
            value_weight=value[part],
            row_weight=row[part],
        )


def optimize(
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
    step_limits: StepLimits | None = None,
) -> dict[str, float]:
    """``epochs`` passes over the experience, ``minibatches`` optimizer steps each.

    Mini-batches are drawn from the rows of all ranks, so which rows share one does not depend on
    the number of ranks; each rank works on an equal share of every mini-batch.
    """
    shuffle = torch.Generator().manual_seed(seed)
    share = slice(None)
    if minibatches > 1 and learner.world_size > 1:
        experience, share = learner.pool(experience), slice(learner.rank, None, learner.world_size)
    limits = step_limits or StepLimits()
    history: list[dict[str, float]] = []

    def should_apply(metrics: Mapping[str, float]) -> bool:
        good = limits.should_apply(metrics)
        if good:
            before_step()
        return good

    for _ in range(epochs):
        order = torch.randperm(len(experience), generator=shuffle)
        for index in order.chunk(minibatches):
            step = cut(experience, index[share], algo, micro_rows, learner.total)
            found = learner.optimizer_step(
                step, algo.loss, only_value=only_value, should_apply=should_apply
            )
            history.append(found)
            after_step()
            if limits.should_stop(found):
                return _over_steps(history)
    return _over_steps(history)


def _over_steps(history: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of an update."""
    metrics = {name: fmean(h[name] for h in history if name in h) for name in history[0]}
    ratios = [h["val/ratio"] for h in history if "val/ratio" in h]
    if len(ratios) > 1:
        mean = fmean(ratios)
        metrics["val/ratio_var"] = sum((r - mean) ** 2 for r in ratios) / (len(ratios) - 1)
    elif ratios:
        metrics["val/ratio_var"] = 0.0
    return metrics
