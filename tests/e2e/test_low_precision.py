"""bf16 ratios that are exactly 1; micro-batches by rows and by tokens that train the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kedge import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from kedge.loop import stages
from kedge.testing import tiny_policy
from tests.e2e.small import PROMPTS, length_reward
from tests.e2e.strict_runs import (
    FLAGS,
    SGD,
    asynchronous,
    grpo,
    ppo_functions,
    ppo_reward_model,
    rloo_newer,
    rloo_older,
)
from tests.unit.text_toys import word_tokenizer


def history(
    kind: Any, config: Any, folder: Path, model: Any = None, **changes: Any
) -> list[dict[str, float]]:
    """Metrics of two iterations; the training pass has other shapes than the first pass."""
    options: dict[str, Any] = {
        "use_cpu": True, "per_device_train_batch_size": 1, "num_generations": 2,
        "response_length": 9, "preflight": False, "learning_rate": 1e-2,
        "local_rollout_forward_batch_size": 8, "num_ppo_epochs": 1, "temperature": 1.0,
    }  # fmt: skip
    args = config(
        output_dir=str(folder), bf16=True, report_to="none", seed=3, max_steps=2,
        gradient_accumulation_steps=8, logging_steps=1, save_strategy="no", disable_tqdm=True,
        **options | changes,
    )  # fmt: skip
    trainer = kind(
        args=args,
        processing_class=word_tokenizer(),
        model=model or tiny_policy("llama", vocab_size=32, initializer_range=0.3),
        reward_funcs=length_reward,
        train_dataset=PROMPTS[:12],
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "val/ratio" in row]


def check_ratios_are_one(rows: list[dict[str, float]]) -> None:
    assert len(rows) == 2
    for row in rows:
        assert row["val/ratio"] == pytest.approx(1.0, abs=1e-6)  # a weighted mean of ones
        assert row["policy/approxkl_avg"] == 0  # of exact ratios only
        assert row["policy/clipfrac_avg"] == 0
        assert row["grad_norm"] > 0


@pytest.mark.parametrize(("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_one_step_has_a_ratio_of_exactly_one(kind: Any, config: Any, tmp_path: Path) -> None:
    check_ratios_are_one(history(kind, config, tmp_path))


def test_the_second_step_has_a_ratio_to_the_first_policy(tmp_path: Path) -> None:
    rows = history(GRPOTrainer, GRPOConfig, tmp_path, num_ppo_epochs=2)
    assert all(row["policy/approxkl_avg"] > 0 for row in rows)


TRAINERS = {
    "ppo": ppo_reward_model,
    "ppo, value head": ppo_functions,
    "rloo, older": rloo_older,
    "rloo": rloo_newer,
    "grpo": grpo,
    "async": asynchronous,
}
ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("name", TRAINERS)
def test_equal_weights(name, tmp_path, monkeypatch):
    sizes = []
    rows_within = stages.rows_within

    def recorded(lengths, max_tokens, total):
        sizes.append(rows_within(lengths, max_tokens, total))
        return sizes[-1]

    monkeypatch.setattr(stages, "rows_within", recorded)
    weights = []
    for i, budget in enumerate((None, 14)):
        torch.manual_seed(0)
        flags = {"output_dir": str(tmp_path / str(i)), "use_cpu": True, "preflight": False}
        trainer = TRAINERS[name](
            FLAGS | SGD | ACCUMULATED | flags | {"max_tokens_per_micro_batch": budget}
        )
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        weights.append([p.detach() for p in trainer.model.parameters()])
        assert any(not torch.equal(p, q) for p, q in zip(before, weights[-1], strict=True))
    assert sizes
    assert {sum(x) for x in sizes} == {4}
    assert any(len(x) > 1 for x in sizes)
    for p, q in zip(*weights, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
