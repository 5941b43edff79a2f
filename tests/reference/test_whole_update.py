"""One optimizer step through the public trainers, against a float64 computation of its own.

The reference shares no code with Kedge: rows one at a time without padding, plain loops for
advantages, torch's log_softmax over all logits, and one step of plain gradient descent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge import GRPOConfig, GRPOTrainer
from kedge.algorithms import reinforce_pp, rloo
from kedge.loop import updater
from kedge.records.types import RewardOutput, Rollout
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy, tiny_reward_model
from tests.e2e.small import PROMPTS, VOCAB, length_reward, rows, small
from tests.unit.text_toys import EOS, PAD, neox_reward, word_tokenizer

RATE = 0.1
DESCENT: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "num_ppo_epochs": 1,
    "total_episodes": 8,
    "per_device_train_batch_size": 8,
    "kl_coef": 0.3,
}


@dataclass
class Batch:
    """What the first update read, row by row, with the models as they were before it."""

    policy: Any
    value: Any
    reference: Any
    rollout: Rollout
    reward_output: RewardOutput
    temperature: float
    correction: tuple[str, str, float, float] | None = None  # kind, level, low, high
    rows: list[int] = field(default_factory=list)

    def tokens(self, row: int) -> tuple[list[int], list[int]]:
        prompts, r = self.rollout.prompts, self.rollout
        prompt = prompts.ids[row][prompts.mask[row]].tolist()
        return prompt, r.ids[row][r.response_mask[row]].tolist()

    def logprobs(self, model: Any, row: int) -> tuple[Tensor, Tensor]:
        """Of all tokens [R, V] and of those that were written [R]."""
        prompt, response = self.tokens(row)
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double()
        every = (logits / self.temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        return every, every.gather(1, torch.tensor(response)[:, None])[:, 0]

    def kl(self, row: int, kind: str = "k1") -> Tensor:
        with torch.no_grad():
            every, own = self.logprobs(self.policy, row)
            others, theirs = self.logprobs(self.reference, row)
        d = own - theirs
        return {
            "k1": d,
            "k2": d**2 / 2,
            "k3": torch.exp(-d) - 1 + d,
            "abs": d.abs(),
            "full": (every.exp() * (every - others)).sum(-1),
        }[kind]

    def values(self, row: int) -> Tensor:
        prompt, response = self.tokens(row)
        ids = torch.tensor([prompt + response])
        if hasattr(self.value, "summary"):  # a head on the policy
            states = self.policy(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            found = self.value.summary(states)[:, 0]
        else:
            backbone = getattr(self.value, self.value.base_model_prefix)
            found = self.value.score(backbone(input_ids=ids).last_hidden_state[0])[:, 0]
        return found[len(prompt) - 1 : -1]

    def dense(self, row: int) -> Tensor:
        own = self.reward_output.token_rewards
        count = len(self.tokens(row)[1])
        return torch.zeros(count).double() if own is None else own[row, :count].double()

    def weights(self, row: int) -> Tensor:
        """Importance weights of a row's tokens; 0 where they are rejected or too old."""
        count = len(self.tokens(row)[1])
        if self.correction is None:
            return (~self.too_old(row)).double()
        kind, level, low, high = self.correction
        with torch.no_grad():
            own = self.logprobs(self.policy, row)[1]
        gap = own - self.rollout.behavior_logprobs[row, :count].double()
        if level == "sequence":
            gap = gap.sum().expand(count)
        weight = gap.exp()
        if kind == "truncate":
            return weight.clamp(low, high)
        return weight * ((weight >= low) & (weight <= high))

    def too_old(self, row: int) -> Tensor:
        newest = self.rollout.policy_version[row]
        return self.rollout.token_versions[row, : len(self.tokens(row)[1])] < newest - 1

    def groups(self) -> Iterator[list[int]]:
        group = self.rollout.prompts.group.tolist()
        for name in dict.fromkeys(group):
            yield [row for row in self.rows if group[row] == name]

    def score(self, row: int) -> float:
        return float(self.reward_output.scores[row].double())


Objective = Callable[[Batch], Tensor]


def whitened(
    parts: list[Tensor], *, shift: bool = True, up: bool = True, counted: list[Tensor] | None = None
) -> list[Tensor]:
    whole = torch.cat(parts)
    if counted is not None:
        whole = whole[torch.cat(counted) > 0]
    mean, scale = whole.mean(), (whole.var().clamp(min=0.0 if up else 1.0) + 1e-8).rsqrt()
    return [(x - mean) * scale + (0 if shift else mean) for x in parts]


def ppo_loss(
    kind: str = "k1",
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_value: float | None = None,
    whiten: bool = True,
    whiten_rewards: bool = False,
) -> Objective:
    def loss(batch: Batch) -> Tensor:
        rewards, values, logprobs, weights, valued = [], [], [], [], []
        for row in batch.rows:
            reward = batch.dense(row) - 0.3 * batch.kl(row, kind)
            reward[-1] += batch.score(row)
            rewards.append(reward)
            values.append(batch.values(row))
            logprobs.append(batch.logprobs(batch.policy, row)[1])
            weights.append(batch.weights(row))
            valued.append((weights[-1] > 0) | batch.too_old(row))
        if whiten_rewards:
            rewards = whitened(rewards, shift=False)
        advantages = [advantage(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)]
        pull = lam if lam_value is None else lam_value
        returns = [
            advantage(r, v, gamma, pull) + v.detach() for r, v in zip(rewards, values, strict=True)
        ]
        advantages = whitened(advantages, up=False, counted=weights) if whiten else advantages
        count = sum(int((w > 0).sum()) for w in weights)
        policy = sum(
            -(w * a * (x - x.detach()).exp()).sum()
            for w, a, x in zip(weights, advantages, logprobs, strict=True)
        )
        value = sum(
            (0.5 * (v - r) ** 2 * keep).sum()
            for v, r, keep in zip(values, returns, valued, strict=True)
        )
        return policy / count + 0.1 * value / sum(int(keep.sum()) for keep in valued)

    return loss


def advantage(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    known, found, later = [*values.tolist(), 0.0], [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        later = float(rewards[t]) + gamma * known[t + 1] - known[t] + gamma * lam * later
        found[t] = later
    return torch.tensor(found, dtype=torch.float64)


def grpo_loss(how: str, *, beta: float = 0.0, scale: str = "group") -> Objective:
    def loss(batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        every = torch.tensor([batch.score(row) for row in batch.rows]).double()
        weights = {row: batch.weights(row) for row in batch.rows}
        tokens = sum(int((w > 0).sum()) for w in weights.values())
        for group in batch.groups():
            scores = torch.tensor([batch.score(row) for row in group]).double()
            spread = {"group": scores.std(), "batch": every.std(), "none": torch.ones(()) - 1e-4}
            for row, score in zip(group, scores, strict=True):
                own = batch.logprobs(batch.policy, row)[1]
                ratio = (own - own.detach()).exp()
                gain = (score - scores.mean()) / (spread[scale] + 1e-4)
                per_token = -weights[row] * gain * ratio
                if beta:
                    with torch.no_grad():
                        theirs = batch.logprobs(batch.reference, row)[1]
                    gap = theirs - own
                    kl = (gap.exp() - 1 - gap) * ratio * (weights[row] > 0)
                    per_token = per_token + beta * kl
                rows = len(batch.rows)
                share = {
                    "dapo": 1 / tokens,
                    "grpo": 1 / (rows * len(own)),
                    "dr_grpo": 1 / (rows * 6),
                }
                total = total + per_token.sum() * share[how]
        return total

    return loss


def rloo_loss(batch: Batch) -> Tensor:
    """A group of one has nothing to compare itself with: advantage 0."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch.groups():
        x = {row: batch.score(row) - 0.3 * float(batch.kl(row).sum()) for row in group}
        for row in group:
            others = [x[other] for other in group if other != row]
            gain = x[row] - sum(others) / len(others) if others else 0.0
            own = batch.logprobs(batch.policy, row)[1]
            ratios = batch.weights(row) * (own - own.detach()).exp()  # 1: the gradient of a sum
            total = total - gain * ratios.sum() / len(batch.rows)
    return total


def reinforce_loss(batch: Batch) -> Tensor:
    rewards = []
    for row in batch.rows:
        own = -0.3 * batch.kl(row)
        own[-1] += batch.score(row)
        rewards.append(own.flip(0).cumsum(0).flip(0))
    logprobs = [batch.logprobs(batch.policy, row)[1] for row in batch.rows]
    pairs = zip(whitened(rewards), logprobs, strict=True)
    total = sum(-(a * (x - x.detach()).exp()).sum() for a, x in pairs)
    return total / sum(map(len, logprobs))


def fails_on_some(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    if any(p in (PROMPTS[0]["prompt"], PROMPTS[3]["prompt"]) for p in prompts):
        raise ValueError("cannot read this one")
    return length_reward(completions)


def per_token(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    return [[0.1 * t + 0.01 * token for t, token in enumerate(row)] for row in completion_ids]


class Shifted(EmbeddedEngine):
    """Reports log-probabilities that are too small for some tokens, more so in every third row."""

    def generate(self, *given: Any, **options: Any) -> Rollout:
        rollout = super().generate(*given, **options)
        shift = 0.1 + 1.5 * (rollout.ids % 4 == 0) + 0.4 * (torch.arange(8) % 3 == 0)[:, None]
        assert rollout.behavior_logprobs is not None
        return replace(rollout, behavior_logprobs=rollout.behavior_logprobs - shift)


class Old(EmbeddedEngine):
    """The first four tokens of responses of six are two iterations older than the others."""

    def generate(self, *given: Any, **options: Any) -> Rollout:
        rollout = super().generate(*given, **options)
        versions = rollout.policy_version[:, None].expand_as(rollout.ids).clone()
        versions[rollout.response_mask.sum(1) == 6, :4] -= 2
        return replace(rollout, token_version=versions)


def shifted(make: Callable[..., Any], **options: Any) -> Any:
    policy = tiny_policy("gpt_neox", vocab_size=VOCAB, eos_token_id=EOS)
    engine = options.pop("engine", Shifted)(policy, pad_id=PAD)
    return make(model=policy, rollout_engine=engine, preflight=False, **options)


def old_tokens() -> Any:
    """What in-flight updates with max_lag=1 do, without their timing."""
    trainer = shifted(made, engine=Old)
    trainer.engine.learner.version, trainer.engine.max_token_lag = 3, 1
    return trainer


def grouped(**options: Any) -> GRPOTrainer:
    plain = small(**DESCENT).args
    kept = ("output_dir", "gradient_checkpointing", "use_cpu", "disable_tqdm")
    made = {name: getattr(plain, name) for name in kept} | DESCENT
    del made["kl_coef"], made["num_ppo_epochs"]
    made |= {"num_generations": 4, "response_length": 6, "save_strategy": "no"}
    parts = {} if "beta" not in options else {"ref_model": other()}
    parts |= {"model": tiny_policy("gpt_neox", vocab_size=VOCAB)}
    parts |= {name: options.pop(name) for name in ("model", "rollout_engine") if name in options}
    return GRPOTrainer(
        args=GRPOConfig(**made | options),
        reward_funcs=neox_reward(vocab=VOCAB),
        processing_class=word_tokenizer(),
        train_dataset=PROMPTS,
        **parts,
    )


def other() -> Any:
    return tiny_policy("gpt_neox", vocab_size=VOCAB, seed=4)


def made(**parts: Any) -> Any:
    return small(**DESCENT | {"ref_model": other()} | parts)


def pad_is_eos() -> Any:
    tokenizer = word_tokenizer(pad=False)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


DROPS: dict[str, Any] = {
    "reward_model": None,
    "reward_funcs": fails_on_some,
    "on_reward_error": "drop",
}
JUDGED_BY_VALUE: dict[str, Any] = {"value_model": neox_reward(vocab=VOCAB, seed=3)}


def both(**options: Any) -> tuple[Callable[[], Any], Objective]:
    """A case whose options the formula takes under the same names."""
    return partial(made, **options), ppo_loss(**options)


CASES: dict[str, tuple[Callable[[], Any], Objective]] = {
    "ppo": (made, ppo_loss()),
    **{
        f"ppo {kind}": (partial(made, kl_estimator=kind), ppo_loss(kind))
        for kind in ("k2", "k3", "abs", "full")
    },
    "ppo, lambdas": both(gamma=0.9, lam=0.5, lam_value=1.0),
    "ppo, raw advantages": (lambda: made(whiten_advantages=False), ppo_loss(whiten=False)),
    "ppo, whitened rewards": both(whiten_rewards=True),
    "ppo, dropped rows": (lambda: made(**DROPS, **copy.deepcopy(JUDGED_BY_VALUE)), ppo_loss()),
    "ppo, rewards per token": (lambda: made(reward_funcs=per_token), ppo_loss()),
    "ppo, a head on the policy": (lambda: made(value_source="policy"), ppo_loss()),
    "ppo, a value of another family": (
        lambda: made(value_model=tiny_reward_model("llama", vocab_size=VOCAB)),
        ppo_loss(),
    ),
    "ppo, one token": (lambda: made(response_length=1), ppo_loss()),
    "ppo, one row at a time": (
        lambda: made(per_device_train_batch_size=1, gradient_accumulation_steps=8),
        ppo_loss(),
    ),
    "ppo, groups": (lambda: made(num_generations=4), ppo_loss()),
    "ppo, recomputed activations": (lambda: made(gradient_checkpointing=True), ppo_loss()),
    "ppo, penalty": (lambda: made(missing_eos_penalty=2.0), ppo_loss()),
    "ppo, pad is eos": (lambda: made(processing_class=pad_is_eos()), ppo_loss()),
    "ppo, eos and pad in prompts": (
        lambda: made(train_dataset=[{"prompt": "w3 <eos> w4 <eos>"}, {"prompt": "<pad> w5"}]),
        ppo_loss(),
    ),
    "ppo, tied head": (
        lambda: made(model=tiny_policy("llama", vocab_size=VOCAB, tie_word_embeddings=True)),
        ppo_loss(),
    ),
    "ppo, gpt2 held to a llama": (
        lambda: made(
            model=tiny_policy("gpt2", vocab_size=VOCAB),
            ref_model=tiny_policy("llama", vocab_size=VOCAB),
        ),
        ppo_loss(),
    ),
    **{
        f"grpo {how}": (lambda how=how: grouped(loss_type=how), grpo_loss(how))
        for how in ("dapo", "grpo", "dr_grpo")
    },
    "grpo, batch": (lambda: grouped(scale_rewards="batch"), grpo_loss("dapo", scale="batch")),
    "grpo, unscaled": (lambda: grouped(scale_rewards="none"), grpo_loss("dapo", scale="none")),
    "grpo, beta": (lambda: grouped(beta=0.3), grpo_loss("dapo", beta=0.3)),
    "rloo": (lambda: made(algorithm=rloo(), num_generations=4), rloo_loss),
    "rloo, dropped rows": (lambda: made(algorithm=rloo(), num_generations=2, **DROPS), rloo_loss),
    "reinforce++": (lambda: made(algorithm=reinforce_pp()), reinforce_loss),
}


# sampler_correction, its level and bounds; some tokens or responses are beyond them.
CORRECTED: dict[str, tuple[Callable[..., Any], Objective, tuple[str, str, float, float]]] = {
    "ppo, rejected tokens": (made, ppo_loss(), ("mask", "token", 0.5, 2.0)),
    "ppo, rejected responses": (made, ppo_loss(), ("mask", "sequence", 0.2, 5.0)),
    "grpo, rejected responses": (
        partial(grouped, beta=0.3),
        grpo_loss("dapo", beta=0.3),
        ("mask", "sequence", 0.2, 5.0),
    ),
    "rloo, weights per token": (
        partial(made, algorithm=rloo(), num_generations=4),
        rloo_loss,
        ("truncate", "token", 0.0, 2.0),
    ),
}


def one_step(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Batch]:
    """Train one update; the trainer, and what it read."""
    seen: list[tuple[Rollout, RewardOutput]] = []
    real = updater.make_experience

    def watched(rollout: Rollout, reward_output: RewardOutput, *rest: Any) -> Any:
        seen.append((rollout, reward_output))
        return real(rollout, reward_output, *rest)

    monkeypatch.setattr(updater, "make_experience", watched)
    trainer = make()
    learner = trainer.engine.learner
    reference = learner.reference
    before = Batch(
        policy=copy.deepcopy(trainer.model).double(),
        value=copy.deepcopy(trainer.value_model).double() if trainer.value_model else None,
        reference=None if reference is None else copy.deepcopy(reference.model).double(),
        rollout=None,  # type: ignore[arg-type]
        reward_output=None,  # type: ignore[arg-type]
        temperature=trainer.args.temperature,
    )
    trainer.train()
    assert len(seen) == 1
    before.rollout, before.reward_output = seen[0]
    before.rows = before.reward_output.valid.nonzero()[:, 0].tolist()
    return trainer, before


def check_step(name: str, trainer: Any, batch: Batch, objective: Objective) -> None:
    objective(batch).backward()
    models = [(trainer.model, batch.policy), (trainer.value_model, batch.value)]
    largest = 0.0
    for after, before in [pair for pair in models if pair[0] is not None]:
        old = dict(before.named_parameters())
        for where, weight in after.named_parameters():
            gradient = old[where].grad
            step = torch.zeros_like(old[where]) if gradient is None else -RATE * gradient
            largest = max(largest, float(step.abs().max()))
            found = weight.detach().double() - old[where].detach()
            torch.testing.assert_close(found, step, rtol=2e-5, atol=2e-6, msg=f"{name}: {where}")
    assert largest > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_the_weights_after_a_step_are_those_of_the_formula(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, objective = CASES[name]
    check_step(name, *one_step(make, monkeypatch), objective)


@pytest.mark.parametrize("name", CORRECTED)
def test_what_is_rejected_leaves_every_mean_and_the_rest_is_weighted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, objective, correction = CORRECTED[name]
    kind, level, _, high = correction
    options = {"sampler_correction": kind, "sampler_correction_level": level}
    options |= {"sampler_correction_high": high}
    trainer, batch = one_step(lambda: shifted(make, **options), monkeypatch)
    batch.correction = correction
    weights = torch.cat([batch.weights(row) for row in batch.rows])
    if kind == "mask":
        assert 0.1 < float((weights == 0).double().mean()) < 0.9
    else:
        assert len(weights.unique()) > 1
        assert float(weights.max()) == high
    check_step(name, trainer, batch, objective)


def test_tokens_that_are_too_old_keep_their_value_target_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, batch = one_step(old_tokens, monkeypatch)
    old = torch.cat([batch.too_old(row) for row in batch.rows]).double()
    assert 0.3 < float(old.mean()) < 0.7
    assert rows(trainer)[0]["rollout/too_old_tokens"] == pytest.approx(float(old.mean()))
    check_step("too old", trainer, batch, ppo_loss())


def test_another_formula_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, batch = one_step(made, monkeypatch)
    ppo_loss(lam=0.9)(batch).backward()
    old = dict(batch.policy.named_parameters())
    gaps = [
        float((p.detach().double() - old[n].detach() + RATE * old[n].grad).abs().max())
        for n, p in trainer.model.named_parameters()
    ]
    assert max(gaps) > 1e-3
