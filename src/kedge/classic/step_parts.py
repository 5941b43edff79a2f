"""The steps of PPO as methods, for custom loops and for subclasses to override."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.algorithms.base import Algorithm
from kedge.backends.hf.model import set_training
from kedge.classic.accumulation import GradientAccumulator
from kedge.classic.assembly import ESTIMATORS, make_step_limits
from kedge.classic.core import entropy_from_logits, logprobs_from_logits
from kedge.classic.inputs import collate, model_inputs, pad_id, pad_right, response_mask
from kedge.classic.models.wrapper import PreTrainedModelWrapper
from kedge.classic.properties import Views
from kedge.classic.samples import check_samples
from kedge.classic.stats_recorder import OptimizerStep, over_steps, update_statistics
from kedge.math.advantage import gae
from kedge.math.kl import ESTIMATORS as KL
from kedge.math.kl import over_vocabulary
from kedge.math.loss_weights import token_mean
from kedge.math.masked import whiten
from kedge.math.rewards import place_score
from kedge.types import Experience, MicroBatch, PolicyOutput


class PPOSteps(Views):
    """The steps that ``step`` consists of.

    A subclass may override any of them: ``step`` then calls each one in turn, with the arguments
    and shapes of TRL 0.11, and uses what it returns.  Without an override, a faster path computes
    the same weights.  T is the length of the longest query with its response, minus one.
    """

    tokenizer: Any
    algorithm: Algorithm
    data_collator: Any
    _usual_collator: Any
    _gradients: GradientAccumulator

    def _step_safety_checker(
        self,
        batch_size: int,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        masks: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
        """The arguments of ``step``, checked.

        Raises:
            DataError: a list has the wrong length, or a tensor the wrong shape.
        """
        check_samples(batch_size, queries, responses, scores, masks)
        return queries, responses, scores, masks

    def prepare_model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Padded int64 [B, T + 1] ``input_ids`` and ``attention_mask`` of query and response.

        For an encoder-decoder those of the queries, and ``decoder_input_ids`` and
        ``decoder_attention_mask`` of the responses, each starting with the start token.  Rows
        are padded on the right, or by ``training_data_collator`` if given.
        """
        pad_rows = (
            partial(pad_right, pad_id(self.tokenizer))
            if self.data_collator is self._usual_collator
            else partial(collate, self.data_collator)
        )
        inputs = model_inputs(pad_rows, queries, responses, self._start_token)
        return {name: x.to(self.current_device) for name, x in inputs.items()}

    @property
    def _start_token(self) -> int | None:
        config: Any = self.learner.policy.config
        return int(config.decoder_start_token_id) if self.is_encoder_decoder else None

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

        Args:
            model: policy or reference, with a value head.
            queries: int64 [P_i] each.
            responses: int64 [R_i] each.
            model_inputs: of ``prepare_model_inputs``.
            return_logits: whether the logits are kept.
            response_masks: [R_i] each, of the trained tokens.

        Returns:
            logprobs float32 [B, T], entry t for the token at t + 1 in query and response;
            logits float32 [B, T, V] or None; values float32 [B, T] of the states before those
            tokens; and the mask int64 [B, T] of response tokens.
        """
        set_training(model, self.config.gradient_checkpointing and torch.is_grad_enabled())
        start = self._start_token
        ids = model_inputs["decoder_input_ids" if start is not None else "input_ids"]
        outputs: list[tuple[Tensor, ...]] = []
        for rows in torch.arange(len(queries)).split(self.config.mini_batch_size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            out = model(**{k: v[part] for k, v in model_inputs.items()})
            if isinstance(_unwrapped(model), PreTrainedModelWrapper):
                logits, _, values = out
            else:  # a reference without a value head
                logits, values = out.logits.float(), out.logits.new_zeros(out.logits.shape[:2])
            logits = logits[:, :-1]
            logprobs = logprobs_from_logits(logits, ids[part, 1:])
            outputs.append((logprobs, values[:, :-1], *([logits] if return_logits else [])))
        logprobs, values, *kept_logits = map(torch.cat, zip(*outputs, strict=True))
        mask = response_mask(model_inputs, queries, responses, response_masks, start=start)
        return logprobs, kept_logits[0] if return_logits else None, values, mask

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards per token: minus the KL penalty, and the score at the last token of the mask.

        Args:
            scores: float32 [B].
            logprobs: float32 [B, T]; [B, T, V] with kl_penalty="full".
            ref_logprobs: the same for the reference.
            masks: [B, T].

        Returns:
            rewards, their KL penalty part, and the KL, each float32 [B, T].
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
        return KL[ESTIMATORS[kind]](logprob, ref_logprob)

    def compute_advantages(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values on the mask, whitened advantages and returns, each float32 [B, T].

        Whitening uses only the given rows, those of this process.
        """
        kept = mask.bool()
        if self.config.whiten_rewards:
            rewards = whiten(rewards, kept, center=False)
        values = values.float() * kept
        raw = gae(rewards, values, kept, gamma=self.config.gamma, lam=self.config.lam).detach()
        return values, whiten(raw, kept), (raw + values) * kept

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

        Args:
            old_logprobs: float32 [B, T] of the sampling policy.
            values: float32 [B, T] before training on the batch.
            logits: float32 [B, T, V], for the entropy; None: reported as 0.
            vpreds: float32 [B, T], with gradient.
            logprobs: float32 [B, T], with gradient.
            mask: [B, T].
            advantages: float32 [B, T].
            returns: float32 [B, T].
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
        mean of its results.  Every process must call it.

        Args: as for ``loss``.  Returns: its statistics.
        """
        policy, value, stats = self.loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns
        )
        replaced = overridden(self)
        self._gradients.backward(
            policy + value, mask, logprobs - old_logprobs, weighted="loss" not in replaced
        )
        if self._gradients.last:
            step_limits = make_step_limits(self.config)
            self._gradients.take(
                replace(step_limits, max_kl=None) if "_early_stop" in replaced else step_limits
            )
        return stats

    def _early_stop(self, policykl: Tensor) -> bool:
        """Whether to stop the passes over the batch.  Every process must call it.

        Args:
            policykl: float [], KL to the sampling policy, nats per token.
        """
        mean = float(self.learner.total(policykl.detach().float())) / self.learner.world_size
        return make_step_limits(self.config).should_stop({"policy/policykl_avg": mean})

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """The statistics of an iteration, ``objective/*``, ``ppo/*`` and ``tokens/*``.

        They cover the rows of this process; ``gather_stats`` averages over processes.

        Args:
            kl_coef: KL coefficient used.
            **data: scores [B]; logprobs, ref_logprobs, non_score_reward, masks and kls [B, T];
                queries and responses; train_stats, one result of ``train_minibatch``, a list
                of them, or their values stacked, [n, 1] each.
        """
        train_stats = data.pop("train_stats")
        train = over_steps(train_stats if isinstance(train_stats, list) else [train_stats])
        return update_statistics(kl_coef, train_stats=train, **data)

    def gather_stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors averaged over all processes; the rest unchanged.  Every process must call it."""
        return {
            name: self.learner.total(x) / self.learner.world_size
            if isinstance(x, Tensor) and x.dtype.is_floating_point
            else x
            for name, x in stats.items()
        }


STEPS = (
    *("_step_safety_checker", "prepare_model_inputs", "batched_forward_pass"),
    *("compute_rewards", "_kl_penalty", "compute_advantages", "loss", "train_minibatch"),
    *("_early_stop", "record_step_stats", "gather_stats", "optional_peft_ctx"),
)
_DEFAULTS = {name: inspect.getattr_static(PPOSteps, name) for name in STEPS}


def overridden(trainer: Any) -> frozenset[str]:
    """Steps replaced by a subclass, or by assignment to the class or trainer."""
    names = {
        name
        for name in STEPS
        if name in vars(trainer)
        or inspect.getattr_static(type(trainer), name) is not _DEFAULTS[name]
    }
    if trainer.data_collator is not trainer._usual_collator:
        names.add("prepare_model_inputs")
    return frozenset(names)


def _unwrapped(model: Any) -> Any:
    return getattr(model, "module", model)
