"""The steps of PPO as methods, and an iteration that calls them one by one.

The iteration is used if a subclass overrides a step.  Every method gets the arguments and shapes of
TRL 0.11: padded rows [B, T] of query and response, T = S - 1, where S is the longest query with
its response.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from kedge.algorithms.base import Algorithm
from kedge.data.prompts import pad_id
from kedge.ext.trl.classic.assembly import check_reference, frozen_reference, inner_model
from kedge.ext.trl.classic.config import PPOConfig
from kedge.ext.trl.classic.core import (
    convert_to_scalar,
    entropy_from_logits,
    logprobs_from_logits,
    stack_dicts,
    stats_to_np,
)
from kedge.ext.trl.classic.models import PreTrainedModelWrapper
from kedge.ext.trl.classic.samples import (
    Samples,
    check_samples,
    pad_tensors,
    response_mask,
    total_scores,
    with_start,
)
from kedge.ext.trl.classic.stats_recorder import (
    LISTS,
    STAGES,
    OptimizerStep,
    over_steps,
    update_statistics,
)
from kedge.learner.learner import HFLearner
from kedge.loop.control import KL, RATIO, StepLimits
from kedge.loop.updater import Updater
from kedge.math.advantage import gae
from kedge.math.kl import ESTIMATORS as KL_ESTIMATORS
from kedge.math.kl import over_vocabulary
from kedge.math.losses import token_mean
from kedge.math.masked import whiten
from kedge.math.rewards import place_score
from kedge.models.model import set_training
from kedge.records.errors import ConfigError, DataError
from kedge.records.seeds import seed_for
from kedge.records.types import Experience, MicroBatch, PolicyOutput, RewardOutput

Stats = dict[str, Any]
ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "full": "full"}
STEPS = (  # methods that a subclass may override or assign
    *("_step_safety_checker", "prepare_model_inputs", "batched_forward_pass"),
    *("compute_rewards", "_kl_penalty", "compute_advantages", "loss", "train_minibatch"),
    *("_early_stop", "record_step_stats", "gather_stats", "optional_peft_ctx"),
)


def _const(name: str, read: Callable[[Any], bool]) -> Any:
    """A property that accepts only its own value, since TRL's subclasses assign it."""

    def assign(self: Any, value: Any) -> None:
        if value is not read(self):
            raise ConfigError(
                f"{name} is {read(self)} for this trainer and cannot be changed to {value!r}"
            )

    return property(read, assign)


class PPOSteps:
    """The parts of ``step`` as methods, and the state they read."""

    config: PPOConfig
    model: Any
    tokenizer: Any
    accelerator: Accelerator
    learner: HFLearner
    algorithm: Algorithm
    data_collator: Any
    _usual_collator: Any
    _updater: Updater
    _ref_model: Any
    _gradients: GradientAccumulator
    _device: torch.device | None = None

    is_encoder_decoder = _const("is_encoder_decoder", lambda self: self.config.is_encoder_decoder)
    is_peft_model = _const("is_peft_model", lambda self: self.config.is_peft_model)
    is_distributed = _const("is_distributed", lambda self: self.learner.world_size > 1)

    @property
    def kl_ctl(self) -> Any:
        """The KL controller; ``kl_ctl.value`` is the coefficient."""
        return self._updater.kl

    @kl_ctl.setter
    def kl_ctl(self, controller: Any) -> None:
        self._updater.kl = controller

    @property
    def current_step(self) -> int:
        """Calls of ``step`` so far; the step in trackers and checkpoints."""
        return self._updater.step

    @current_step.setter
    def current_step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"current_step must be a whole number of at least 0, got {step!r}")
        self._updater.step = step

    @property
    def current_device(self) -> torch.device:
        """Device of the models and of the tensors in the steps of PPO."""
        return self._device or self.learner.device

    @current_device.setter
    def current_device(self, device: torch.device | str | int) -> None:
        chosen, here = torch.device(device), self.learner.device
        indices = {chosen.index, here.index} - {None}
        if chosen.type != here.type or len(indices) > 1:
            raise ConfigError(
                f"current_device={str(chosen)!r}, but the models are on {str(here)!r}; select the "
                "device with the launcher, or with PPOConfig(accelerator_kwargs=...)"
            )
        self._device = chosen

    @property
    def ref_model(self) -> Any:
        """The reference; None: the policy without its adapter."""
        return self._ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        check_reference(model)
        if model is None and not self.is_peft_model:
            raise ConfigError("ref_model=None needs a PEFT policy; assign a model")
        if model is not None and inner_model(model) is self.model.pretrained_model:
            raise ConfigError(
                "ref_model must not be the policy itself, which changes during training; assign "
                "create_reference_model(trainer.model)"
            )
        device = self.learner.device
        self.learner.reference = frozen_reference(self.model, model, device)
        for frozen in self.learner.reference.separate_models:
            frozen.to(device)
        self._ref_model = model

    def optional_peft_ctx(self) -> AbstractContextManager[Any]:
        """A context in which the adapter is disabled, so that the policy is its reference."""
        if not self.is_peft_model:
            return nullcontext()
        block: AbstractContextManager[Any] = self.model.pretrained_model.disable_adapter()
        return block

    @property
    def _step_limits(self) -> StepLimits:
        c = self.config
        return StepLimits(
            max_ratio=c.ratio_threshold,
            max_kl=1.5 * c.target_kl if c.early_stopping else None,
            keep_last=c.early_stopping_keeps_step,
        )

    def _overridden(self) -> frozenset[str]:
        """Steps replaced by a subclass, or by assignment to the class or the trainer."""
        names = {
            name
            for name in STEPS
            if name in vars(self) or inspect.getattr_static(type(self), name) is not _DEFAULTS[name]
        }
        if self.data_collator is not self._usual_collator:
            names.add("prepare_model_inputs")
        self._accumulates = "train_minibatch" in names  # then the optimizer is wrapped
        scaled = self.learner.scaler.is_enabled()
        if self._accumulates and (scaled or self.is_distributed):
            where = "with fp16" if scaled else f"with {self.learner.world_size} processes"
            raise ConfigError(
                f"{type(self).__name__} overrides train_minibatch, which takes the optimizer step; "
                f"{where} its gradients would be {'unscaled' if scaled else 'summed'} too late. "
                "Override loss instead, which train_minibatch calls, or use "
                + ("bf16" if scaled else "one process")
            )
        return frozenset(names)

    def _step_safety_checker(
        self,
        batch_size: int,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        masks: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
        """Check the arguments of ``step``."""
        check_samples(batch_size, queries, responses, scores, masks)
        return queries, responses, scores, masks

    @property
    def _start_token(self) -> int | None:
        """The start token of an encoder-decoder's responses; None: decoder only."""
        config: Any = self.learner.policy.config
        return int(config.decoder_start_token_id) if self.is_encoder_decoder else None

    def prepare_model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Padded int64 [B, T + 1] ``input_ids`` and ``attention_mask`` of query and response.

        For an encoder-decoder, these are of the queries; ``decoder_input_ids`` and
        ``decoder_attention_mask`` of the responses, each starting with the start token.  Rows
        are padded on the right, or by ``training_data_collator`` if given.
        """

        def pad_rows(rows: Sequence[Tensor]) -> dict[str, Tensor]:
            if self.data_collator is self._usual_collator:
                mask = pad_tensors([torch.ones_like(x, dtype=torch.long) for x in rows])
                ids = pad_tensors([x.long() for x in rows], pad_id(self.tokenizer))
                return {"input_ids": ids, "attention_mask": mask}
            batch = self.data_collator(
                [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in rows]
            )
            return {name: x for name, x in batch.items() if name != "labels"}

        start = self._start_token
        if start is None:
            pairs = zip(queries, responses, strict=True)
            inputs = pad_rows([torch.cat([q, r.to(q)]) for q, r in pairs])
        else:
            decoder = pad_rows([with_start(r, start) for r in responses])
            inputs = pad_rows(queries)
            inputs |= {f"decoder_{k}": decoder[k] for k in ("input_ids", "attention_mask")}
        return {name: x.to(self.current_device) for name, x in inputs.items()}

    def batched_forward_pass(
        self,
        model: Any,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        model_inputs: Mapping[str, Tensor],
        return_logits: bool = False,
        response_masks: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Run a model over rows, ``mini_batch_size`` at a time, in evaluation mode.

        Returns logprobs float32 [B, T], entry t for the token at t + 1 in query and response;
        logits float32 [B, T, V] or None; values float32 [B, T] of the states before those tokens;
        and the mask int64 [B, T] of response tokens, of the trained ones with ``response_masks``.
        """
        set_training(model, self.config.gradient_checkpointing and torch.is_grad_enabled())
        start = self._start_token
        ids = model_inputs["decoder_input_ids" if start is not None else "input_ids"]
        outputs: list[tuple[Tensor, ...]] = []
        for rows in torch.arange(len(queries)).split(self.config.mini_batch_size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            out = model(**{k: v[part] for k, v in model_inputs.items()})
            if isinstance(getattr(model, "module", model), PreTrainedModelWrapper):
                logits, _, values = out
            else:  # a reference without a value head
                logits, values = out.logits.float(), out.logits.new_zeros(out.logits.shape[:2])
            logits = logits[:, :-1]
            logprobs = logprobs_from_logits(logits, ids[part, 1:])
            outputs.append((logprobs, values[:, :-1], *([logits] if return_logits else [])))
        logprobs, values, *all_logits = map(torch.cat, zip(*outputs, strict=True))
        mask = response_mask(model_inputs, queries, responses, response_masks, start=start)
        return logprobs, all_logits[0] if return_logits else None, values, mask

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards, their KL penalty part, and the KL, each float32 [B, T].

        The score [B] goes to the last token of the mask.  Log-probabilities are float32 [B, T];
        [B, T, V] with kl_penalty="full".
        """
        pairs = zip(logprobs, ref_logprobs, strict=True)
        kls = torch.stack([self._kl_penalty(new, ref) for new, ref in pairs])
        penalty = -self.kl_ctl.value * kls
        return penalty + place_score(scores.to(masks.device), masks.bool()), penalty, kls

    def _kl_penalty(self, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        """KL per token float32 [T] of one row, from [T], or [T, V] with kl_penalty="full"."""
        kind = self.config.kl_penalty
        if kind == "full":
            return over_vocabulary(logprob, ref_logprob)
        return KL_ESTIMATORS[ESTIMATORS[kind]](logprob, ref_logprob)

    def compute_advantages(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values on the mask, whitened advantages and returns, each float32 [B, T].

        Whitening uses only the given rows, those of this process.
        """
        trained = mask.bool()
        if self.config.whiten_rewards:
            rewards = whiten(rewards, trained, center=False)
        values = values.float() * trained
        raw = gae(rewards, values, trained, gamma=self.config.gamma, lam=self.config.lam).detach()
        return values, whiten(raw, trained), (raw + values) * trained

    def loss(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Policy loss, value loss times ``vf_coef``, and the statistics of one mini-batch.

        All [B, T], ``logprobs`` and ``vpreds`` with gradient; ``logits`` [B, T, V] are for the
        entropy only, which is 0 with None.
        """
        mask = mask.bool()
        weight = token_mean(mask, lambda x: x)
        rows = Experience(
            prompt_ids=mask.new_zeros(len(mask), 0, dtype=torch.long),
            prompt_mask=mask.new_zeros(len(mask), 0),
            ids=mask.new_zeros(mask.shape, dtype=torch.long),
            loss_mask=mask,
            response_mask=mask,
            value_mask=mask,
            old_logprobs=old_logprobs,
            rewards=torch.zeros_like(old_logprobs),
            advantages=advantages,
            old_values=values,
            returns=returns,
        )
        entropy = torch.zeros_like(logprobs) if logits is None else entropy_from_logits(logits)
        new = PolicyOutput(logprobs=logprobs, entropy=entropy.detach(), values=vpreds)
        batch = MicroBatch(
            rows=rows, token_weight=weight, value_weight=weight, row_weight=weight.sum(1)
        )
        result = self.algorithm.loss(new, batch)
        recorder = OptimizerStep()
        recorder.add(new, batch, result)
        return result.parts["policy"], result.parts["value"], recorder.statistics(lambda x: x)

    def train_minibatch(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logprobs: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> dict[str, Tensor]:
        """One optimizer step on ``loss`` with gradient clipping, subject to ``ratio_threshold``.

        Within ``step``, gradients accumulate and the last mini-batch takes the optimizer step.
        The gradient is the mean over the tokens of all processes; if ``loss`` is overridden, the
        mean of its results.  Every process must call it.  Returns the statistics of ``loss``.
        """
        policy, value, stats = self.loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns
        )
        replaced = self._overridden()
        self._gradients.backward(
            policy + value, mask, logprobs - old_logprobs, weighted="loss" not in replaced
        )
        if self._gradients.last:
            limits = self._step_limits
            self._gradients.take(
                replace(limits, max_kl=None) if "_early_stop" in replaced else limits
            )
        return stats

    def _early_stop(self, policykl: Tensor) -> bool:
        """Whether to stop at this KL to the sampling policy; every process must call it."""
        mean = float(self.learner.all_reduce(policykl.detach().float())) / self.learner.world_size
        return self._step_limits.should_stop({"policy/policykl_avg": mean})

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """The statistics of an iteration, ``objective/*``, ``ppo/*`` and ``tokens/*``.

        They cover the rows of this process; ``gather_stats`` averages over processes.  ``data``:
        scores [B]; logprobs, ref_logprobs, non_score_reward, masks and kls [B, T]; queries and
        responses; train_stats, one result of ``train_minibatch``, a list of them, or their values
        stacked, [n, 1] each.
        """
        train_stats = data.pop("train_stats")
        train = over_steps(train_stats if isinstance(train_stats, list) else [train_stats])
        return update_statistics(kl_coef, train_stats=train, **data)

    def gather_stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors averaged over all processes; the rest unchanged.  Every process must call it."""
        return {
            name: self.learner.all_reduce(x) / self.learner.world_size
            if isinstance(x, Tensor) and x.dtype.is_floating_point
            else x
            for name, x in stats.items()
        }


_DEFAULTS = {name: inspect.getattr_static(PPOSteps, name) for name in STEPS}


@dataclass(slots=True)
class GradientAccumulator:
    """Sums the gradients of ``parts`` mini-batches on each rank, then takes the optimizer step.

    The gradient is the mean over mini-batches and ranks; with ``weighted`` losses, each is
    weighted by its trained tokens, so that it is the mean over the tokens of the optimizer step.
    """

    learner: HFLearner
    parts: int = 1
    last: bool = True  # whether the next mini-batch is the last of its optimizer step
    _tokens: Tensor | None = None  # trained tokens per mini-batch, averaged over parts and ranks
    _sums: Tensor | None = None  # float64 [3]: sums of ratios and policy KL, number of tokens

    @contextmanager
    def optimizer_step(
        self, accelerator: Accelerator, masks: list[Tensor]
    ) -> Iterator[Iterator[None]]:
        """Context in which mini-batches with these masks [b, T] form one optimizer step.

        Yields an iterator to advance before each mini-batch; it tells accelerate, too, which one
        is the last.
        """
        previous_steps = accelerator.gradient_accumulation_steps
        accelerator.gradient_accumulation_steps = self.parts = len(masks)
        self._tokens = self._mean(torch.stack([m.sum() for m in masks]).sum()) / self.parts
        self._sums = None

        def mini_batches() -> Iterator[None]:
            for i in range(self.parts):
                accelerator.sync_gradients = self.last = i == self.parts - 1
                yield

        try:
            yield mini_batches()
        finally:
            accelerator.gradient_accumulation_steps = previous_steps
            accelerator.sync_gradients = True
            self.parts, self.last, self._tokens, self._sums = 1, True, None, None

    def _mean(self, x: Tensor) -> Tensor:
        return self.learner.all_reduce(x.float()) / self.learner.world_size

    def backward(
        self, loss: Tensor, mask: Tensor, log_ratio: Tensor, *, weighted: bool = True
    ) -> None:
        """Add the gradient of a mini-batch's mean loss; ``log_ratio`` [b, T]: new to old policy."""
        if not loss.requires_grad:
            raise ConfigError(
                "loss() must return tensors with gradient; compute them from logprobs and vpreds"
            )
        if self._sums is None:
            self.learner.optimizer.zero_grad(set_to_none=True)
            self._sums = torch.zeros(3, dtype=torch.float64)
        count = mask.sum().float()
        mean_tokens = self._mean(count) if self._tokens is None else self._tokens
        weight = count / mean_tokens.clamp(min=1) if weighted else torch.ones_like(count)
        self.learner.scaler.scale(loss * weight / (self.parts * self.learner.world_size)).backward()
        off = torch.where(mask.bool(), log_ratio.detach(), 0.0).double()
        ratios = torch.where(mask.bool(), off.exp(), 0.0).sum()
        self._sums += torch.stack([ratios, -off.sum(), count.double()]).cpu()

    def take(self, step_limits: StepLimits) -> None:
        """Take the optimizer step, subject to ``step_limits``."""
        assert self._sums is not None  # ``backward`` comes first
        ratios, kl, count = self.learner.all_reduce(self._sums).tolist()
        if step_limits.should_apply({RATIO: ratios / max(count, 1), KL: kl / max(count, 1)}):
            self.learner._take_step()
        self.learner.optimizer.zero_grad(set_to_none=True)
        self._sums = None


def step_by_step(
    trainer: PPOSteps, samples: Samples, scores: RewardOutput, *, masked: bool
) -> Stats:
    """One PPO iteration; ``masked``: whether ``response_masks`` were given."""
    clock = [time.perf_counter()]
    kl_coef = float(trainer.kl_ctl.value)
    with torch.no_grad():
        inputs, targets, record = _experience(trainer, samples, scores, masked, clock)
    collected = _optimize(trainer, inputs, targets, record)
    clock.append(time.perf_counter())
    # Per mini-batch [n, 1] each; per-token numbers are concatenated to [1, N].
    train_stats = [{n: torch.as_tensor(x).detach().cpu() for n, x in s.items()} for s in collected]
    lists = {
        name: torch.cat([part.pop(name).flatten() for part in train_stats])[None]
        for name in LISTS
        if name in train_stats[0]
    }
    stats = trainer.record_step_stats(
        kl_coef=kl_coef, train_stats=stack_dicts(train_stats) | lists, **record
    )
    if trainer.is_distributed:  # arrays differ in length across ranks, so only scalars are gathered
        stats = trainer.gather_stats(
            {
                name: x.cpu().numpy() if isinstance(x, Tensor) and x.numel() != 1 else x
                for name, x in stats.items()
            }
        )
    stats = convert_to_scalar(stats_to_np(stats))
    if "objective/kl" not in stats:
        raise DataError(
            "record_step_stats must return 'objective/kl', which the KL controller needs; "
            "start from super().record_step_stats(kl_coef, **data)"
        )
    learner = trainer.learner
    stats["ppo/learning_rate"] = float(learner.optimizer.param_groups[0]["lr"])
    kl = float(learner.all_reduce(torch.tensor(float(stats["objective/kl"]), dtype=torch.float64)))
    world = learner.world_size
    trainer.kl_ctl.update(kl / world, trainer.config.batch_size * world)
    learner.advance_version()
    trainer.current_step += 1
    clock.append(time.perf_counter())
    seconds = [end - begin for begin, end in pairwise(clock)] + [clock[-1] - clock[0]]
    return stats | {f"time/ppo/{name}": x for name, x in zip(STAGES, seconds, strict=True)}


def _experience(
    trainer: PPOSteps, samples: Samples, scores: RewardOutput, masked: bool, clock: list[float]
) -> tuple[Mapping[str, Tensor], dict[str, Tensor], Stats]:
    """Forward passes, rewards and advantages.

    Returns the inputs of ``prepare_model_inputs``; old_logprobs, values, mask, advantages and
    returns [B, T] as ``loss`` takes them; and what ``record_step_stats`` is given.
    """
    device, start = trainer.current_device, trainer._start_token
    full, reference = trainer.config.kl_penalty == "full", trainer.ref_model
    queries = [q.to(device) for q in samples.queries]
    responses = [with_start(r, start).to(device) for r in samples.responses]
    response_masks = [
        torch.cat([m.new_ones(len(r) - len(m)), m]).long().to(device)
        for m, r in zip(samples.masks, responses, strict=True)
    ]
    inputs = trainer.prepare_model_inputs(queries, responses)
    if reference is not None and not isinstance(reference, PreTrainedModelWrapper):
        with torch.random.fork_rng():  # with a value head the model returns three items
            reference = type(trainer.model)(reference)

    def forward(model: Any, masks: list[Tensor] | None = None) -> Any:
        return trainer.batched_forward_pass(
            model, queries, responses, inputs, return_logits=full, response_masks=masks
        )

    with trainer.accelerator.autocast():
        logprobs, logits, values, mask = forward(trainer.model, response_masks if masked else None)
        with trainer.optional_peft_ctx() if reference is None else nullcontext():
            ref_logprobs, ref_logits, *_ = forward(reference or trainer.model)
    _check_shapes("batched_forward_pass", mask, logprobs=logprobs, values=values)
    pair = logprobs, ref_logprobs
    if full:
        if logits is None or ref_logits is None:
            raise DataError(
                'kl_penalty="full" needs logits, but batched_forward_pass(return_logits=True) '
                "returned None"
            )
        pair = logits.float().log_softmax(-1), ref_logits.float().log_softmax(-1)
    clock.append(time.perf_counter())
    rewards, penalty, kls = trainer.compute_rewards(scores.scores.to(device), *pair, mask)
    _check_shapes("compute_rewards", mask, rewards=rewards, non_score_reward=penalty, kls=kls)
    if scores.token_rewards is not None:  # from [B, R] to response positions
        places = response_mask(inputs, queries, responses, None, start=start)
        numbers = [
            x[: len(r)] for x, r in zip(scores.token_rewards, samples.responses, strict=True)
        ]
        grid = torch.zeros(places.shape, device=places.device)
        grid[places.bool()] = torch.cat(numbers).to(grid)
        rewards = rewards + grid * mask
    clock.append(time.perf_counter())
    values, advantages, returns = trainer.compute_advantages(values, rewards, mask)
    targets = {"values": values, "advantages": advantages, "returns": returns}
    _check_shapes("compute_advantages", mask, **targets)
    clock.append(time.perf_counter())
    record = {
        **{"scores": total_scores(scores).to(device), "queries": queries, "responses": responses},
        **{"logprobs": logprobs, "ref_logprobs": ref_logprobs, "masks": mask},
        **{"non_score_reward": penalty, "kls": kls},
    }
    targets = {name: x.float() for name, x in targets.items()}
    return inputs, {"old_logprobs": logprobs.float(), "mask": mask, **targets}, record


def _check_shapes(method: str, mask: Tensor, **tensors: Any) -> None:
    """Reject wrong shapes, which torch would silently broadcast over tokens."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.shape != mask.shape:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise DataError(
                f"{method} must return {name} as a tensor of the mask's shape {tuple(mask.shape)}, "
                f"got {got}"
            )


def _optimize(
    trainer: PPOSteps, inputs: Mapping[str, Tensor], targets: dict[str, Tensor], record: Stats
) -> list[Stats]:
    """All passes over the batch; returns the statistics of every mini-batch."""
    c, stats, mask = trainer.config, [], targets["mask"]
    shuffle = torch.Generator().manual_seed(seed_for(c.seed, "shuffle", trainer.current_step))
    for _ in range(c.ppo_epochs):
        order = torch.randperm(len(mask), generator=shuffle)
        for rows in order.split(c.backward_batch_size or c.batch_size):
            parts = [part.tolist() for part in rows.split(c.mini_batch_size)]
            step_stats = []
            masks = [mask[part] for part in parts]
            with trainer._gradients.optimizer_step(trainer.accelerator, masks) as mini_batches:
                for part, _ in zip(parts, mini_batches, strict=True):
                    with trainer.accelerator.autocast():
                        logprobs, logits, vpreds, _ = trainer.batched_forward_pass(
                            trainer.model,
                            [record["queries"][i] for i in part],
                            [record["responses"][i] for i in part],
                            {name: x[part] for name, x in inputs.items()},
                            return_logits=True,
                        )
                    old, values, *rest = (targets[name][part] for name in _TARGETS)
                    step_stats.append(
                        trainer.train_minibatch(old, values, logprobs, logits, vpreds, *rest)
                    )
            stats += step_stats
            counts = [float(m.sum()) for m in masks]
            if c.early_stopping and trainer._early_stop(_policy_kl(step_stats, counts)):
                return stats
    return stats


_TARGETS = ("old_logprobs", "values", "mask", "advantages", "returns")


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
