"""A learner, an engine and prompts of a few numbers each: the loop without any model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.records.protocols import LossFn, ShouldApply, always
from kedge.records.types import (
    Experience,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    PromptBatch,
    Receipt,
    Rollout,
    Sampling,
)

VOCAB, WIDTH = 6, 4


def prefix(lengths: list[int], width: int = WIDTH) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


class ToyPrompts:
    """Prompts of two tokens; the batch of a step depends on the step alone."""

    def __init__(self, prompts: int = 3, group: int = 2) -> None:
        self.prompts, self.group = prompts, group

    def batch(self, step: int) -> PromptBatch:
        ids = torch.randint(0, VOCAB, (self.prompts, 2), generator=_rng(step))
        rows = self.prompts * self.group
        return PromptBatch(
            ids=ids.repeat_interleave(self.group, 0),
            mask=torch.ones(rows, 2, dtype=torch.bool),
            group=torch.arange(self.prompts).repeat_interleave(self.group),
            row=torch.arange(rows),
        )


class ToyLearner:
    """A policy of one logit per token, a value of one number; Adam."""

    rank, world_size, low_precision, shares_prompts = 0, 1, False, False

    def __init__(self, lr: float = 0.1) -> None:
        self.logits = torch.zeros(VOCAB, requires_grad=True)
        self.value = torch.zeros(1, requires_grad=True)
        self.reference = torch.zeros(VOCAB)
        self.lr = lr
        self.optimizer = torch.optim.Adam([self.logits, self.value], lr=lr)
        self.version = 0
        self.log: list[str] = []

    def _respond(self, ids: Tensor) -> PolicyOutput:
        logp = self.logits.log_softmax(0)
        entropy = -(logp.exp() * logp).sum().expand(ids.shape)
        return PolicyOutput(
            logprobs=logp[ids], entropy=entropy, values=self.value.repeat(*ids.shape)
        )

    @torch.no_grad()
    def compute_logprobs(
        self, rollout: Rollout, *, values: bool, reference: bool, full_kl: bool
    ) -> ModelOutputs:
        out = self._respond(rollout.ids)
        ref = self.reference.log_softmax(0)[rollout.ids] if reference else None
        return ModelOutputs(
            logprobs=out.logprobs, entropy=out.entropy, ref_logprobs=ref, values=out.values
        )

    def optimizer_step(
        self,
        step: Iterable[MicroBatch],
        loss: LossFn,
        *,
        only_value: bool = False,
        should_apply: ShouldApply = always,
    ) -> dict[str, float]:
        self.log.append(f"learn {self.version}")
        self.optimizer.zero_grad()
        metrics: dict[str, float] = {}
        for mb in step:
            out = loss(self._respond(mb.rows.ids), mb)
            (out.parts["value"] if only_value else out.total).backward()
            for name, x in out.metrics.items():
                if not x.dim():  # the others are log ratios of tokens
                    metrics[name] = metrics.get(name, 0.0) + float(x.detach())
        grad = self.logits.grad
        norm = 0.0 if grad is None else float(grad.norm())
        if should_apply(metrics):
            self.optimizer.step()
        return metrics | {"grad_norm/policy": norm, "lr": self.lr}

    def forward_no_grad(self, rows: Experience, *, values: bool = True) -> PolicyOutput:
        output = self._respond(rows.ids)
        return output if values else replace(output, values=None)

    def advance_version(self) -> None:
        self.version += 1

    def weights(self) -> Mapping[str, Tensor]:
        return {"logits": self.logits.detach().clone()}

    def fingerprint(self) -> str:
        return repr(self.logits.tolist())

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, local: Experience) -> Experience:
        return local

    def state_dict(self) -> dict[str, Any]:
        return {
            "logits": self.logits.detach().clone(),
            "value": self.value.detach().clone(),
            "optimizer": _copy(self.optimizer.state_dict()),
            "version": self.version,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.logits.copy_(state["logits"])
            self.value.copy_(state["value"])
        self.optimizer.load_state_dict(_copy(state["optimizer"]))
        self.version = state["version"]


class ToyEngine:
    """Samples from a copy of the toy policy."""

    shares_weights = False
    logprob_kind: Literal["sampled", "raw", "none"] = "sampled"

    def __init__(self, log: list[str] | None = None) -> None:
        self.logits, self.version = torch.zeros(VOCAB), -1
        self.log = [] if log is None else log

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        self.logits, self.version = weights["logits"], version
        return Receipt(version=version, fingerprint=repr(self.logits.tolist()))

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        self.log.append(f"generate with {self.version}")
        rows = len(prompts)
        logp = self.logits.log_softmax(0)
        ids = torch.multinomial(
            logp.exp().expand(rows, VOCAB), WIDTH, replacement=True, generator=_rng(seed)
        )
        mask = prefix([1 + (seed + i) % WIDTH for i in range(rows)])
        return Rollout(
            prompts=prompts,
            ids=ids * mask,
            loss_mask=mask,
            response_mask=mask,
            terminated=mask.sum(1) < WIDTH,
            policy_version=torch.full((rows,), self.version),
            behavior_logprobs=logp[ids],
        )


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed % 2**63)


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _copy(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_copy(v) for v in tree]
    return tree.clone() if isinstance(tree, Tensor) else tree
