"""The classic API against the trainer, and learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.algorithms import ppo
from kedge.ext.trl.classic import PPOTrainer
from kedge.testing import ScriptedRollouts
from tests.classic_models import gpt2, letters, samples, t5, trainer
from tests.e2e.small import small

STEPS = 3
OPTIONS = {"kl_penalty": "abs", "horizon": 100.0, "ppo_epochs": 2, "lam": 0.9, "cliprange": 0.1}


def by_steps(data: list[Any]) -> tuple[PPOTrainer, list[dict[str, Any]]]:
    found = trainer(gpt2(), mini_batch_size=4, max_grad_norm=0.5, **OPTIONS)
    torch.nn.init.zeros_(found.model.v_head.summary.weight)
    torch.nn.init.zeros_(found.model.v_head.summary.bias)
    return found, [found.step(*batch) for batch in data]


def by_the_trainer(data: list[Any], folder: Path) -> tuple[Any, list[dict[str, float]]]:
    """The same samples: prompts from a dataset, responses from a script, scores from a list."""
    scores = iter([float(s) for _, _, row in data for s in row])

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [next(scores) for _ in completions]

    found = small(
        **{"output_dir": str(folder), "gradient_accumulation_steps": 2, "num_mini_batches": 2},
        **{"total_episodes": 8 * STEPS, "response_length": 8, "learning_rate": 1e-3},
        **{"lr_scheduler_type": "constant", "kl_coef": 0.2, "adaptive_kl": True},
        **{"kl_horizon": 100.0, "max_grad_norm": 0.5, "seed": 0, "stop_token_ids": [0]},
        **{"temperature": 1.0, "value_source": "policy", "shuffle_dataset": False},
        **{"processing_class": letters(28), "model": gpt2(), "ref_model": gpt2()},
        reward_model=None,
        train_dataset=[{"input_ids": q.tolist()} for queries, _, _ in data for q in queries],
        reward_funcs=reward,
        rollout_engine=ScriptedRollouts([responses for _, responses, _ in data]),
        algorithm=ppo(kl_estimator="abs", lam=0.9, cliprange=0.1, whiten_advantages="batch"),
    )
    found.train()
    return found, [row for row in found.state.log_history if "objective/kl" in row]


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:the KL to the reference")
def test_same_samples_same_weights_as_the_trainer(tmp_path: Path) -> None:
    data = [samples(seed=i) for i in range(STEPS)]
    own, stats = by_steps(data)
    other, rows = by_the_trainer(data, tmp_path)
    pairs = {
        "objective/kl": "objective/kl",
        "objective/kl_coef": "objective/kl_coef",
        "objective/entropy": "objective/entropy",
        "ppo/mean_scores": "objective/scores",
        "ppo/loss/policy": "loss/policy_avg",
        "ppo/loss/value": "loss/value_avg",
        "ppo/policy/clipfrac": "policy/clipfrac_avg",
        "ppo/policy/entropy": "policy/entropy_avg",
    }
    for mine, theirs in zip(stats, rows, strict=True):
        for name, key in pairs.items():
            assert mine[name] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), name
    started = dict(gpt2().named_parameters())
    for name, p in own.model.pretrained_model.named_parameters():
        q = other.model.get_parameter(name)
        torch.testing.assert_close(_pulled(name, p), _pulled(name, q), rtol=0, atol=1e-6)
        assert not torch.equal(p, started[name])
    head = other.engine.learner.value.summary
    torch.testing.assert_close(own.model.v_head.summary.weight, head.weight, rtol=0, atol=1e-6)


def _pulled(name: str, p: torch.Tensor) -> torch.Tensor:
    """A weight without what has no gradient but rounding: the key part of attention's bias."""
    return torch.cat([p[:32], p[64:]]) if name.endswith("c_attn.bias") else p


def mean_reward(found: Any, rows: int = 128) -> float:
    torch.manual_seed(7)
    queries = [torch.tensor([2 + i % 20, 3 + i % 7]) for i in range(rows)]
    return float(torch.stack(rewards(draw(found, queries))).mean())


def draw(found: Any, queries: list[torch.Tensor]) -> list[torch.Tensor]:
    rows = found.generate(
        queries, batch_size=len(queries), return_prompt=False, max_new_tokens=6, do_sample=True
    )
    return list(rows)


def rewards(responses: list[torch.Tensor]) -> list[torch.Tensor]:
    """The share of letters from the first half of the alphabet."""
    return [((r >= 2) & (r < 15)).float().mean() for r in responses]


@pytest.mark.parametrize("make", [gpt2, t5])
@pytest.mark.filterwarnings("ignore:the KL to the reference")
def test_a_rule_is_learned(make: Any) -> None:
    found = trainer(
        make(), batch_size=32, mini_batch_size=32, learning_rate=5e-3, init_kl_coef=0.02
    )
    before = mean_reward(found)
    for step in range(25):
        queries = [torch.tensor([2 + (i + step) % 20, 3 + i % 7]) for i in range(32)]
        responses = draw(found, queries)
        found.step(queries, responses, rewards(responses))
    after = mean_reward(found)
    assert before < 0.7
    assert after > before + 0.2
