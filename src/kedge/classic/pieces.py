"""The parts of a PPO step as functions on tensors, for programs that run their own loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.algorithms.base import Algorithm
from kedge.classic.assembly import ESTIMATORS
from kedge.classic.core import entropy_from_logits, logprobs_from_logits
from kedge.classic.inputs import model_inputs, pad_id, response_mask
from kedge.classic.statistics import over_steps, update_statistics
from kedge.classic.views import Views
from kedge.classic.watch import OptimiserStep
from kedge.math.advantage import gae
from kedge.math.kl import ESTIMATORS as KL
from kedge.math.kl import over_vocabulary
from kedge.math.masked import whiten
from kedge.math.rewards import place_score
from kedge.math.weights import token_mean
from kedge.types import Experience, Loss, MicroBatch, PolicyOutput


class Pieces(Views):
    """What ``step`` is made of.  T is the longest query with its response, minus one."""

    tokenizer: Any
    algorithm: Algorithm

    def prepare_model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Padded int64 [B, T + 1] ``input_ids`` and ``attention_mask`` of query and response.

        For an encoder-decoder those of the queries, and ``decoder_input_ids`` and
        ``decoder_attention_mask`` of the responses, each begun with the start token.
        """
        return model_inputs(
            queries,
            responses,
            pad=pad_id(self.tokenizer),
            start=self._start_token,
            device=self.learner.device,
        )

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
            response_masks: [R_i] each, of the tokens that train.

        Returns:
            logprobs float32 [B, T], entry t is of the token at t + 1 in query and response;
            logits float32 [B, T, V] or None; values float32 [B, T] of the states before those
            tokens; and the mask int64 [B, T] of response tokens.
        """
        model.eval()
        size = len(queries)
        start = self._start_token
        ids = model_inputs["decoder_input_ids" if start is not None else "input_ids"]
        found: list[tuple[Tensor, Tensor | None, Tensor]] = []
        for begin in range(0, size, self.config.mini_batch_size):
            rows = slice(begin, begin + self.config.mini_batch_size)
            logits, _, values = model(**{k: v[rows] for k, v in model_inputs.items()})
            logprobs = logprobs_from_logits(logits[:, :-1], ids[rows, 1:])
            found.append((logprobs, logits[:, :-1] if return_logits else None, values[:, :-1]))
        kept = [x for _, x, _ in found if x is not None]
        mask = response_mask(model_inputs, queries, responses, response_masks, start=start)
        return (
            torch.cat([x for x, _, _ in found]),
            torch.cat(kept) if kept else None,
            torch.cat([x for _, _, x in found]),
            mask,
        )

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards per token: minus the KL penalty, and the score at the last token of the mask.

        Args:
            scores: float32 [B].
            logprobs: float32 [B, T]; [B, T, V] with kl_penalty="full".
            ref_logprobs: the same of the reference.
            masks: [B, T].

        Returns:
            rewards, the part that is no score, and the KL, each float32 [B, T].
        """
        kind = self.config.kl_penalty
        if kind == "full":
            kls = over_vocabulary(logprobs, ref_logprobs)
        else:
            kls = KL[ESTIMATORS[kind]](logprobs, ref_logprobs)
        penalty = -self.kl_ctl.value * kls
        return penalty + place_score(scores.to(masks.device), masks.bool()), penalty, kls

    def compute_advantages(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values on the mask, whitened advantages and returns, each float32 [B, T]."""
        kept, total = mask.bool(), self.learner.total
        if self.config.whiten_rewards:
            rewards = whiten(rewards, kept, center=False, total=total)
        values = values * kept
        raw = gae(rewards, values, kept, gamma=self.config.gamma, lam=self.config.lam).detach()
        return values, whiten(raw, kept, total=total), (raw + values) * kept

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
            old_logprobs: float32 [B, T] before the update.
            values: float32 [B, T] before the update.
            logits: float32 [B, T, V], for the entropy; None leaves it 0.
            vpreds: float32 [B, T], with gradient.
            logprobs: float32 [B, T], with gradient.
            mask: [B, T].
            advantages: float32 [B, T].
            returns: float32 [B, T].
        """
        found, stats = self._loss(
            old_logprobs, values, logits, vpreds, logprobs, mask.bool(), advantages, returns
        )
        return found.parts["policy"], found.parts["value"], stats

    def _loss(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> tuple[Loss, dict[str, Tensor]]:
        total = self.learner.total
        weight = token_mean(mask, total)
        rows = Experience(
            prompt_ids=mask.new_zeros(len(mask), 0, dtype=torch.long),
            prompt_mask=mask.new_zeros(len(mask), 0),
            ids=mask.new_zeros(mask.shape, dtype=torch.long),
            mask=mask,
            present=mask,
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
        found = self.algorithm.loss(new, batch)
        seen = OptimiserStep()
        seen.add(new, batch, found)
        return found, seen.statistics(total)

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
        """One optimiser step on ``loss``, clipped, unless ``ratio_threshold`` forbids it.

        Args, Returns: as for ``loss``, its statistics.
        """
        found, stats = self._loss(
            old_logprobs, values, logits, vpreds, logprobs, mask.bool(), advantages, returns
        )
        ratio = float(self.learner.total(found.metrics["val/ratio"].detach()))
        self.learner.optimizer.zero_grad(set_to_none=True)
        if ratio <= self.config.ratio_threshold:
            self.learner.scaler.scale(found.total).backward()
            self.learner._take_step()
        self.learner.optimizer.zero_grad(set_to_none=True)
        return stats

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """The statistics of an update, ``objective/*``, ``ppo/*`` and ``tokens/*``.

        Args:
            kl_coef: used in it.
            **data: scores [B]; logprobs, ref_logprobs, non_score_reward, masks and kls [B, T];
                queries and responses; train_stats, one dictionary of ``train_minibatch``, or a
                list of them.
        """
        found = data.pop("train_stats")
        train = over_steps(found if isinstance(found, list) else [found])
        return update_statistics(kl_coef, train_stats=train, total=self.learner.total, **data)

    def gather_stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors averaged over all processes; the rest unchanged."""
        return {
            name: self.learner.total(x) / self.learner.ranks
            if isinstance(x, Tensor) and x.dtype.is_floating_point
            else x
            for name, x in stats.items()
        }
