"""A PPO iteration as calls to the trainer's methods, so that subclasses can override them.

Used if a subclass overrides a step of the algorithm.  Every method gets the arguments and shapes
of TRL 0.11: padded rows [B, T] of query and response, T = S - 1, where S is the
longest query with its response.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kedge.classic.core import (
    convert_to_scalar,
    logprobs_from_logits,
    stack_dicts,
    stats_to_np,
)
from kedge.classic.inputs import begun, response_mask
from kedge.classic.models.wrapper import PreTrainedModelWrapper
from kedge.classic.samples import Samples
from kedge.classic.scores import Scores
from kedge.classic.stats_recorder import LISTS, STAGES
from kedge.engine.seeds import seed_for
from kedge.errors import DataError

if TYPE_CHECKING:
    from kedge.classic.trainer import PPOTrainer

Stats = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Batch:
    """Rows on the trainer's device, with all inputs of ``train_minibatch``."""

    queries: list[Tensor]  # int64 [P_i] each
    responses: list[Tensor]  # int64 [R_i] each; of an encoder-decoder with its start token
    inputs: Mapping[str, Tensor]  # of prepare_model_inputs
    before: tuple[Tensor, Tensor]  # log-probabilities and values float32 [B, T]
    masks: Tensor  # int64 [B, T]
    targets: tuple[Tensor, Tensor]  # advantages and returns float32 [B, T]


def step_by_step(trainer: PPOTrainer, samples: Samples, scores: Scores, *, masked: bool) -> Stats:
    """One PPO iteration; ``masked``: whether ``response_masks`` were given."""
    clock = [time.perf_counter()]
    kl_coef = float(trainer.kl_ctl.value)
    with torch.no_grad():
        batch, record = _experience(trainer, samples, scores, masked, clock)
    step_stats = _optimize(trainer, batch)
    clock.append(time.perf_counter())
    stats = trainer.record_step_stats(kl_coef=kl_coef, train_stats=_stacked(step_stats), **record)
    if trainer.is_distributed:
        stats = trainer.gather_stats(_without_arrays(stats))
    stats = convert_to_scalar(stats_to_np(stats))
    if "objective/kl" not in stats:
        raise DataError(
            "record_step_stats must return 'objective/kl', which the KL controller needs; "
            "start from super().record_step_stats(kl_coef, **data)"
        )
    learner = trainer.learner
    stats["ppo/learning_rate"] = float(learner.optimizer.param_groups[0]["lr"])
    kl = float(learner.total(torch.tensor(float(stats["objective/kl"]), dtype=torch.float64)))
    world = learner.world_size
    trainer.kl_ctl.update(kl / world, trainer.config.batch_size * world)
    learner.advance_version()
    trainer.current_step += 1
    clock.append(time.perf_counter())
    seconds = [end - begin for begin, end in pairwise(clock)] + [clock[-1] - clock[0]]
    return stats | {f"time/ppo/{name}": x for name, x in zip(STAGES, seconds, strict=True)}


def _experience(
    trainer: PPOTrainer, samples: Samples, scores: Scores, masked: bool, clock: list[float]
) -> tuple[Batch, dict[str, Any]]:
    """Forward passes, rewards and advantages; also what ``record_step_stats`` is given."""
    device, start = trainer.current_device, trainer._start_token
    full, adapter = trainer.config.kl_penalty == "full", trainer.ref_model is None
    queries = [q.to(device) for q in samples.queries]
    responses = [begun(r, start).to(device) for r in samples.responses]
    response_masks = [
        torch.cat([m.new_ones(len(r) - len(m)), m]).long().to(device)
        for m, r in zip(samples.masks, responses, strict=True)
    ]
    inputs = trainer.prepare_model_inputs(queries, responses)

    def forward(model: Any, masks: list[Tensor] | None = None) -> Any:
        return trainer.batched_forward_pass(
            model, queries, responses, inputs, return_logits=full, response_masks=masks
        )

    with trainer.accelerator.autocast():
        logprobs, logits, values, masks = forward(trainer.model, response_masks if masked else None)
        with trainer.optional_peft_ctx() if adapter else nullcontext():
            ref_logprobs, ref_logits, *_ = forward(
                trainer.model if adapter else _with_head(trainer)
            )
    _check_shapes("batched_forward_pass", masks, logprobs=logprobs, values=values)
    if full:
        pair = _over_vocabulary(logits), _over_vocabulary(ref_logits)
    else:
        pair = logprobs, ref_logprobs
    clock.append(time.perf_counter())
    rewards, penalty, kls = trainer.compute_rewards(scores.whole.to(device), *pair, masks)
    _check_shapes("compute_rewards", masks, rewards=rewards, non_score_reward=penalty, kls=kls)
    if scores.tokens is not None:
        places = response_mask(inputs, queries, responses, None, start=start)
        rewards = rewards + _on_tokens(scores.tokens, samples, places) * masks
    clock.append(time.perf_counter())
    values, advantages, returns = trainer.compute_advantages(values, rewards, masks)
    _check_shapes(
        "compute_advantages", masks, values=values, advantages=advantages, returns=returns
    )
    clock.append(time.perf_counter())
    batch = Batch(
        queries=queries,
        responses=responses,
        inputs=inputs,
        before=(logprobs.float(), values.float()),
        masks=masks,
        targets=(advantages.float(), returns.float()),
    )
    record = {
        "scores": scores.sums.to(device),
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "non_score_reward": penalty,
        "masks": masks,
        "queries": queries,
        "responses": responses,
        "kls": kls,
    }
    return batch, record


def _over_vocabulary(logits: Tensor | None) -> Tensor:
    if logits is None:
        raise DataError(
            'kl_penalty="full" needs logits, but batched_forward_pass(return_logits=True) '
            "returned None"
        )
    return logprobs_from_logits(logits.float(), logits, gather=False)


def _with_head(trainer: PPOTrainer) -> Any:
    """The reference, wrapped with a value head if it has none, so that it returns three items."""
    if isinstance(trainer.ref_model, PreTrainedModelWrapper):
        return trainer.ref_model
    with torch.random.fork_rng():
        return type(trainer.model)(trainer.ref_model)


def _check_shapes(method: str, mask: Tensor, **tensors: Any) -> None:
    """Reject other shapes, which torch would silently broadcast over tokens."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.shape != mask.shape:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise DataError(
                f"{method} must return {name} as a tensor of the mask's shape {tuple(mask.shape)}, "
                f"got {got}"
            )


def _on_tokens(rewards: Tensor, samples: Samples, places: Tensor) -> Tensor:
    """Rewards per response token [B, R] scattered to ``places`` of a grid [B, T]."""
    rows = [x[: len(r)] for x, r in zip(rewards, samples.responses, strict=True)]
    grid = torch.zeros(places.shape, device=places.device)
    grid[places.bool()] = torch.cat(rows).to(grid)
    return grid


def _optimize(trainer: PPOTrainer, batch: Batch) -> list[Stats]:
    """All passes over the batch; returns the statistics of every mini-batch."""
    c, stats = trainer.config, []
    shuffle = torch.Generator().manual_seed(seed_for(c.seed, "shuffle", trainer.current_step))
    for _ in range(c.ppo_epochs):
        order = torch.randperm(len(batch.queries), generator=shuffle)
        for rows in order.split(c.backward_batch_size or c.batch_size):
            parts = rows.split(c.mini_batch_size)
            step_stats = _optimizer_step(trainer, batch, parts)
            stats += step_stats
            counts = [float(batch.masks[part].sum()) for part in parts]
            if c.early_stopping and trainer._early_stop(_policy_kl(step_stats, counts)):
                return stats
    return stats


def _optimizer_step(trainer: PPOTrainer, batch: Batch, parts: Sequence[Tensor]) -> list[Stats]:
    accelerator, gradients = trainer.accelerator, trainer._gradients
    previous_steps, stats = accelerator.gradient_accumulation_steps, []
    accelerator.gradient_accumulation_steps = len(parts)
    try:
        with gradients.optimizer_step([batch.masks[part] for part in parts]):
            for i, part in enumerate(parts):
                accelerator.sync_gradients = gradients.last = i == len(parts) - 1
                stats.append(_minibatch(trainer, batch, part))
    finally:
        accelerator.gradient_accumulation_steps, accelerator.sync_gradients = previous_steps, True
    return stats


def _minibatch(trainer: PPOTrainer, batch: Batch, rows: Tensor) -> Stats:
    index = rows.tolist()
    with trainer.accelerator.autocast():
        logprobs, logits, vpreds, _ = trainer.batched_forward_pass(
            trainer.model,
            [batch.queries[i] for i in index],
            [batch.responses[i] for i in index],
            {name: x[index] for name, x in batch.inputs.items()},
            return_logits=True,
        )
    old_logprobs, values = (x[index] for x in batch.before)
    advantages, returns = (x[index] for x in batch.targets)
    return trainer.train_minibatch(
        old_logprobs, values, logprobs, logits, vpreds, batch.masks[index], advantages, returns
    )


def _policy_kl(step_stats: list[Stats], counts: list[float]) -> Tensor:
    """KL to the sampling policy over one optimizer step, nats per token."""
    name = "policy/policykl"
    if any(name not in stats for stats in step_stats):
        raise DataError(
            f"early_stopping needs {name!r} in the statistics of train_minibatch; "
            "return it from loss, or set early_stopping=False"
        )
    kls = torch.stack([torch.as_tensor(x[name]).detach().float().mean() for x in step_stats])
    weights = torch.tensor(counts, device=kls.device)
    return (kls * weights).sum() / weights.sum().clamp(min=1)


def _stacked(collected: list[Stats]) -> dict[str, Tensor]:
    """Statistics of mini-batches: [n, 1] each; per-token numbers concatenated to [1, N]."""
    tensors = [
        {n: torch.as_tensor(x).detach().cpu() for n, x in stats.items()} for stats in collected
    ]
    lists = {
        name: torch.cat([stats.pop(name).flatten() for stats in tensors])[None]
        for name in LISTS
        if name in tensors[0]
    }
    return stack_dicts(tensors) | lists


def _without_arrays(stats: Mapping[str, Any]) -> Stats:
    """Convert arrays to numpy: they differ in length, so only scalars are gathered."""
    return {
        name: x.cpu().numpy() if isinstance(x, Tensor) and x.numel() != 1 else x
        for name, x in stats.items()
    }
