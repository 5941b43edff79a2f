"""Every metric of a PPO update against a float64 computation that shares no code with Kedge."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from docs.generate import OF_ALGORITHM, OF_ALL_ALGORITHMS
from torch import Tensor
from transformers import TrainerCallback

from kedge.loop.metrics import NAMES
from kedge.testing import tiny_policy
from tests.e2e.small import PROMPTS, VOCAB, rows

from .test_whole_update import DROPS, Batch, advantage, made, one_step, whitened

COEF, CLIP, STEPS = 0.3, 0.01, 3
TIMED = {"eps", "tokens_per_second", *(name for name in NAMES if name.startswith("time/"))}


class Models(TrainerCallback):
    """Keeps the models as each optimizer step left them."""

    def __init__(self) -> None:
        self.value: Any = None
        self.kept: list[tuple[Any, Any]] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.kept.append(tuple(copy.deepcopy(m).double() for m in (given["model"], self.value)))  # type: ignore[arg-type]


def mean(parts: list[Tensor]) -> float:
    return torch.cat([x.detach().flatten() for x in parts]).mean().item()


def order_statistics(x: Tensor, name: str) -> dict[str, float]:
    inorder, last = x.detach().flatten().sort().values, x.numel() - 1
    places = {"min": 0, "p01": int(0.01 * last), "p99": int(0.99 * last), "max": last}
    return {f"{name}_{part}": float(inorder[place]) for part, place in places.items()}


def of_batch(b: Batch) -> dict[str, float]:
    """What is known before the first optimizer step."""
    scores = torch.tensor([b.score(row) for row in b.rows]).double()
    kls = {k: mean([b.kl(row, k).sum()[None] for row in b.rows]) for k in ("k1", "k2", "k3")}
    lengths = [len(b.tokens(row)[1]) for row in b.rows]
    ended = [bool(b.rollout.terminated[row]) for row in b.rows]
    found = {
        "objective/scores": float(scores.mean()),
        "objective/scores_std": float(scores.std(correction=0)),
        "objective/kl": kls["k1"],
        "objective/kl2": kls["k2"],
        "objective/kl3": kls["k3"],
        "objective/kl_coef": COEF,
        "objective/non_score_reward": -COEF * kls["k1"],
        "objective/rlhf_reward": float(scores.mean()) - COEF * kls["k1"],
        "objective/entropy": mean([-b.logprobs(b.policy, row)[1].sum()[None] for row in b.rows]),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/truncated_ratio": 1 - sum(ended) / len(ended),
        "val/num_eos_tokens": sum(ended),
        "rollout/dropped_rows": len(b.rollout) - len(b.rows),
        "rollout/lag": 0.0,
        "rollout/lag_max": 0.0,
        "log/reward_errors/fails_on_some": len(b.rollout) - len(b.rows),
    }
    whole = [n for n, e in zip(lengths, ended, strict=True) if e]
    for kind, number in (
        ("mean", sum(whole) / len(whole)),
        ("min", min(whole)),
        ("max", max(whole)),
    ):
        found[f"completions/{kind}_terminated_length"] = number
    sizes = [sum(len(tokens) for tokens in b.tokens(row)) for row in range(len(b.rollout))]
    found["rollout/tokens"] = found["num_tokens"] = sum(sizes)
    for name, part in b.reward_output.components.items():
        found[f"rewards/{name}"] = mean([part[row : row + 1].double() for row in b.rows])
        found[f"rewards/{name}/std"] = float(part[torch.tensor(b.rows)].double().std())
    return found


def of_tokens(b: Batch, models: list[tuple[Any, Any]]) -> dict[str, float]:
    """What the optimizer steps met, each with the models that it began with."""
    values = [b.values(row).detach() for row in b.rows]
    rewards = [-COEF * b.kl(row) for row in b.rows]
    for reward, row in zip(rewards, b.rows, strict=True):
        reward[-1] += b.score(row)
    raw = [advantage(r, v, 1.0, 0.95) for r, v in zip(rewards, values, strict=True)]
    returns = [a + v for a, v in zip(raw, values, strict=True)]
    advantages = torch.cat(whitened(raw, up=False))
    old = torch.cat([b.logprobs(b.policy, row)[1] for row in b.rows]).detach()
    start, wanted = torch.cat(values), torch.cat(returns)
    gone = {
        "val/value_mean": float(start.mean()),
        "val/return_mean": float(wanted.mean()),
        "val/raw_advantage_std": float(torch.cat(raw).std()),
        "val/advantage_std": float(advantages.std(correction=0)),
        "val/explained_variance": 1
        - float((wanted - start).var(correction=0) / wanted.var(correction=0)),
    }
    steps: list[dict[str, float]] = []
    for policy, value in models:
        now = Batch(**{**vars(b), "policy": policy, "value": value})
        pairs = [now.logprobs(policy, row) for row in b.rows]
        new = torch.cat([own for _, own in pairs])
        v = torch.cat([now.values(row) for row in b.rows])
        ratio = (new - old).exp()
        surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        near = start + (v - start).clamp(-CLIP, CLIP)
        squares = (v - wanted) ** 2, (near - wanted) ** 2
        worse = 0.5 * torch.max(*squares).mean()
        (surrogate.mean() + 0.1 * worse).backward()
        sizes = [
            sum(float((p.grad**2).sum()) for p in m.parameters() if p.grad is not None)
            for m in (policy, value)
        ]
        blocked = (advantages > 0) & (ratio > 1 + CLIP) | (advantages < 0) & (ratio < 1 - CLIP)
        entropies = [-(every.exp() * every).sum(-1) for every, _ in pairs]
        steps.append({
            "loss": surrogate.mean().item() + 0.1 * worse.item(),
            "loss/policy_avg": surrogate.mean().item(),
            "loss/value_avg": worse.item(),
            "policy/approxkl_avg": (0.5 * (new - old) ** 2).mean().item(),
            "policy/policykl_avg": (old - new).mean().item(),
            "policy/clipfrac_avg": float(blocked.double().mean()),
            "policy/entropy_avg": mean(entropies),
            "val/ratio": ratio.mean().item(),
            **order_statistics(ratio, "policy/ratio"),
            "val/clipfrac_avg": (squares[1] > squares[0]).double().mean().item(),
            "grad_norm": math.sqrt(sum(sizes)),
            "grad_norm/policy": math.sqrt(sizes[0]),
            "grad_norm/value": math.sqrt(sizes[1]),
        })  # fmt: skip
    means = {name: sum(s[name] for s in steps) / len(steps) for name in steps[0]}
    ratios = torch.tensor([s["val/ratio"] for s in steps]).double()
    for name, end in (("policy/ratio_min", min), ("policy/ratio_max", max)):
        means[name] = end(s[name] for s in steps)
    return gone | means | {"val/ratio_var": float(ratios.var())}


def test_every_metric_is_what_its_line_in_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models()

    def make() -> Any:
        trainer = made(
            num_ppo_epochs=STEPS,
            learning_rate=0.02,
            cliprange=CLIP,
            cliprange_value=CLIP,
            missing_eos_penalty=1.5,
            ref_model=tiny_policy("gpt_neox", vocab_size=VOCAB, seed=5),
            callbacks=[models],
            preflight=False,
            **DROPS,
        )
        models.value = trainer.value_model
        return trainer

    trainer, batch = one_step(make, monkeypatch)
    (row,) = rows(trainer)
    before = [(batch.policy, batch.value), *models.kept[:-1]]
    want = of_batch(batch) | of_tokens(batch, before)
    want |= {"lr": 0.02, "lr/value": 0.02, "skipped_steps": 0.0, "step": 1, "episode": 8.0}
    want |= {"epoch": 8 / len(PROMPTS)}
    assert 0 < want["policy/clipfrac_avg"] < 1  # else this shows little
    assert 0 < want["val/clipfrac_avg"] < 1
    assert want["rollout/dropped_rows"] > 0
    assert 0 < want["completions/truncated_ratio"] < 1
    assert set(row) - TIMED == set(want)
    assert {*OF_ALL_ALGORITHMS, *OF_ALGORITHM["ppo"]} - set(want) == set()
    for name in ("policy/ratio_p01", "policy/ratio_p99"):  # from a histogram
        assert math.log(row[name]) == pytest.approx(math.log(want.pop(name)), rel=6e-3)
    for name, value in want.items():
        assert row[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name
