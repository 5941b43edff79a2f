"""Estimated time of an iteration: floating-point operations, bytes, seconds.

A matrix product of a model with N weights costs 2 N operations a token forward and 4 N backward
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1).  While responses are sampled every step reads
all weights and the cache once for the whole batch, however small it is (Pope et al. 2022,
arXiv:2211.05102), so that a step takes the longer of its operations and its bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kedge.cli.planning.memory import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device.

    Args:
        name: for people.
        flops: operations a second that matrix products reach.
        bandwidth: bytes a second that weights and caches are read with.
        link: bytes a second at which new weights reach an engine.
        width: bytes of a number in products and in the cache.
    """

    name: str
    flops: float
    bandwidth: float
    link: float
    width: int


# What large matrix products and long reads reach: 0.45 and 0.7 of the data sheet.
KNOWN = {
    "a100": Hardware(name="A100", flops=140e12, bandwidth=1.4e12, link=20e9, width=2),
    "h100": Hardware(name="H100", flops=445e12, bandwidth=2.3e12, link=40e9, width=2),
    "h200": Hardware(name="H200", flops=445e12, bandwidth=3.3e12, link=40e9, width=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the cost of a model follows from."""

    body: int  # weights of the layers, without embedding and head
    shape: Shape

    def forward(self, tokens: float, *, context: float, heads: float = 0.0) -> float:
        """Operations for ``tokens`` that see ``context`` tokens each; ``heads`` get logits."""
        attention = 2 * self.shape.layers * 2 * self.shape.hidden * context
        head = 2 * self.shape.hidden * self.shape.vocab
        return tokens * (2 * self.body + attention) + heads * head

    @property
    def weights(self) -> int:
        """Weights that a step of sampling reads."""
        return self.body + self.shape.hidden * self.shape.vocab


def body_parameters(parameters: int, shape: Shape, *, tied: bool) -> int:
    """Weights of the layers alone."""
    return parameters - (1 if tied else 2) * shape.hidden * shape.vocab


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One iteration.

    Args:
        policy: the policy; the reference has its size.
        value: the value model, or None.
        reward: the reward model, or None.
        reference: whether there is a reference.
        rows: responses.
        prompt: tokens of a prompt, on average.
        response: tokens of a response, on average.
        group: responses to each prompt, whose prompt is read once.
        epochs: passes over the batch.
        checkpointing: activations are computed again in the backward pass.
        recorded: log-probabilities are taken from sampling, not computed again.
    """

    policy: Model
    value: Model | None
    reward: Model | None
    reference: bool
    rows: int
    prompt: float
    response: float
    group: int = 1
    epochs: int = 4
    checkpointing: bool = False
    recorded: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of the batch, prompts and responses."""
        return self.rows * (self.prompt + self.response)


STAGES = ("generate", "reward", "annotate", "train", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Devices, and the seconds of each stage on them."""

    learners: int
    engines: int  # 0: the learners sample, too
    seconds: dict[str, float]

    @property
    def sampling(self) -> float:
        """What an engine is busy with: generating, scoring, loading weights."""
        return sum(self.seconds[name] for name in ("generate", "reward", "sync"))

    @property
    def learning(self) -> float:
        """What a learner is busy with."""
        return self.seconds["annotate"] + self.seconds["train"]

    @property
    def update(self) -> float:
        """Seconds of an iteration: the sum on shared devices, else the maximum of both."""
        return (
            self.sampling + self.learning if not self.engines else max(self.sampling, self.learning)
        )


def operations(job: Job) -> dict[str, float]:
    """Operations of each stage."""
    seen = (job.prompt + job.response) / 2
    answered = job.rows * job.response

    def once(model: Model | None, *, logits: bool) -> float:
        if model is None:
            return 0.0
        return model.forward(job.tokens, context=seen, heads=answered if logits else 0.0)

    prefill = job.policy.forward(job.rows / job.group * job.prompt, context=job.prompt / 2)
    decode = job.policy.forward(answered, context=job.prompt + job.response / 2, heads=answered)
    policy, value = once(job.policy, logits=True), once(job.value, logits=False)
    passes = job.epochs * (4 if job.checkpointing else 3)
    return {
        "generate": prefill + decode,
        "reward": once(job.reward, logits=False),
        "annotate": (not job.recorded) * policy + job.reference * policy + value,
        "train": passes * (policy + value),
        "sync": 0.0,
    }


def plan_split(job: Job, device: Hardware, *, learners: int, engines: int) -> Split:
    """Seconds of each stage with so many devices; ``engines`` 0 is in turn on the learners."""
    work = operations(job)
    samplers = engines or learners
    model = job.policy
    rows = math.ceil(job.rows / samplers)
    cache = rows * model.shape.layers * model.shape.cache * (job.prompt + job.response / 2)
    read = job.response * (model.weights + cache) * device.width / device.bandwidth
    seconds = {name: work[name] / device.flops for name in STAGES}
    seconds["generate"] = max(seconds["generate"] / samplers, read)
    seconds["reward"] /= learners
    seconds["annotate"] /= learners
    seconds["train"] /= learners
    seconds["sync"] = model.weights * device.width / device.link if engines else 0.0
    return Split(learners=learners, engines=engines, seconds=seconds)


def splits(job: Job, device: Hardware, devices: int) -> list[Split]:
    """Every way to share ``devices``, fastest first; in turn on all of them is one."""
    found = [plan_split(job, device, learners=devices, engines=0)]
    found += [
        plan_split(job, device, learners=devices - engines, engines=engines)
        for engines in range(1, devices)
    ]
    return sorted(found, key=lambda split: split.update)


def measured(clock: Callable[[], float] = time.perf_counter) -> Hardware:
    """This machine's processor, from a fraction of a second of products and reads."""
    a, b = torch.randn(512, 1024), torch.randn(1024, 1024)
    big = torch.randn(32 << 20)  # 128 MiB, beyond the caches

    def best(work: Callable[[], object]) -> float:
        spent = []
        for _ in range(5):
            begin = clock()
            work()
            spent.append(clock() - begin)
        return min(spent)

    flops = 2 * a.shape[0] * b.numel() / best(lambda: a @ b)
    read = big.numel() * 4 / best(big.sum)
    return Hardware(name="this processor", flops=flops, bandwidth=read, link=read, width=4)


def hardware(name: str) -> Hardware | None:
    """A device by its name, ``cpu`` for this machine; None if it is not known."""
    if name == "cpu":
        return measured()
    return KNOWN.get(name)
