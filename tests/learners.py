"""Small rollouts, experiences and learners for tests."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainingArguments

from kedge.algorithms import ppo
from kedge.learner.learner import HFLearner
from kedge.learner.reference import frozen_copy
from kedge.learner.settings import LearnerSettings
from kedge.loop.batch_metrics import batch_metrics
from kedge.loop.stages import make_experience, micro_batches
from kedge.models.value_head import ScalarHead, load_value
from kedge.records.types import Experience, PromptBatch, RewardOutput, Rollout
from kedge.testing import tiny_policy, tiny_reward_model

VOCAB = 64
SLOTS = 9  # of the response, where no padding is added


def rollout(rows=6, prompt=7, response=SLOTS, *, seed=0, extra_padding=0) -> Rollout:
    """Prompts of 1..prompt tokens; responses of 0..response tokens (row 1 is empty)."""
    g = torch.Generator().manual_seed(seed)
    plen = torch.randint(1, prompt + 1, (rows,), generator=g)
    rlen = torch.randint(1, response + 1, (rows,), generator=g)
    plen[0], rlen[0], rlen[1 % rows] = prompt, response, 0 if rows > 1 else response
    ids = torch.randint(2, VOCAB, (rows, prompt + response), generator=g)
    slots = torch.arange(prompt)
    mask = slots >= prompt - plen[:, None]
    present = torch.arange(response) < rlen[:, None]
    prompts = PromptBatch(
        ids=torch.nn.functional.pad(ids[:, :prompt] * mask, (extra_padding, 0)),
        mask=torch.nn.functional.pad(mask, (extra_padding, 0)),
        group=torch.arange(rows),
        row=torch.arange(rows),
    )
    present = torch.nn.functional.pad(present, (0, extra_padding))
    return Rollout(
        prompts=prompts,
        ids=torch.nn.functional.pad(ids[:, prompt:], (0, extra_padding)) * present,
        loss_mask=present,
        response_mask=present,
        terminated=rlen < response,
        policy_version=torch.zeros(rows, dtype=torch.int64),
    )


def random_head(size: int) -> ScalarHead:
    """A value head whose values differ between tokens."""
    head = ScalarHead(size)
    torch.nn.init.normal_(head.summary.weight, std=(size + 1) ** -0.5)
    return head


def experience(r: Rollout, *, seed=0) -> Experience:
    """Random credit on a rollout; the same on real tokens whatever the padding."""
    shape = r.ids.shape
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, shape[0], 64, generator=g)[:, :, : shape[1]] * r.response_mask
    slots = torch.arange(shape[1])
    after = (slots <= r.response_mask.sum(1)[:, None]) & (slots < SLOTS)
    return Experience(
        prompt_ids=r.prompts.ids,
        prompt_mask=r.prompts.mask,
        ids=r.ids,
        loss_mask=r.loss_mask,
        response_mask=r.response_mask,
        value_mask=after & (r.response_mask.sum(1) > 0)[:, None],
        old_logprobs=(noise[0] * 0.1 - 4) * r.response_mask,
        rewards=noise[1],
        advantages=noise[1],
        old_values=noise[2] * 0.1,
        returns=noise[2],
    )


def arguments(**options) -> TrainingArguments:
    defaults = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "use_cpu": True}
    folder = str(Path(gettempdir()) / "kedge-tests")
    return TrainingArguments(output_dir=folder, report_to=[], **{**defaults, **options})


def learner(
    family="llama",
    *,
    policy=None,
    value="model",
    reference=True,
    args=None,
    optimizers=None,
    precision="no",
    **how,
) -> HFLearner:
    policy = tiny_policy(family, vocab_size=VOCAB) if policy is None else policy
    if value == "model":
        value = load_value(tiny_reward_model(family, vocab_size=VOCAB))
    if reference is True:
        reference = frozen_copy(policy)
    return HFLearner(
        policy,
        args or arguments(),
        LearnerSettings(**{"total_iterations": 10, "max_grad_norm": 0.0, **how}),
        value=value,
        reference=reference or None,
        accelerator=Accelerator(cpu=True, mixed_precision=precision),
        optimizers=optimizers or (None, None),
    )


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients of every step."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        self.seen = []

    def step(self, closure=None):
        self.seen.append(
            [
                None if p.grad is None else p.grad.clone()
                for group in self.param_groups
                for p in group["params"]
            ]
        )


def one_rank(x):
    return x


def gradient(
    batch: Experience, algorithm, *, micro_rows=100, order=None, split=micro_batches, make=learner
):
    """Every gradient of one optimizer step over the batch, as one vector, and the metrics."""
    found = make()
    recorder = Recorder([p for p in found.module.parameters() if p.requires_grad])
    found.optimizer = recorder
    index = torch.arange(len(batch)) if order is None else order
    metrics = found.optimizer_step(
        split(batch, index, algorithm, micro_rows, one_rank), algorithm.loss
    )
    flat = [g.flatten() for g in recorder.seen[0] if g is not None]
    return torch.cat(flat), metrics


def take_step(found, batch=None, *, algo=None, **options):
    batch, algo = experience(rollout()) if batch is None else batch, algo or ppo()
    return found.optimizer_step(
        micro_batches(batch, torch.arange(len(batch)), algo, 3, one_rank), algo.loss, **options
    )


def with_metrics(
    rollout: Rollout, reward_output: RewardOutput, learner: Any, *rest: Any
) -> tuple[Experience, dict[str, float]]:
    """``make_experience``, and the metrics of the batch."""
    experience, terms = make_experience(rollout, reward_output, learner, *rest)
    return experience, batch_metrics(experience, terms, learner)
