"""bf16 on a GPU: log-probabilities, the ratio, and the embedded engine against the learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kedge import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from kedge.ops.linear_logprob import Head, linear_logprob
from kedge.testing import tiny_policy
from tests.e2e import test_low_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def history(kind: Any, config: Any, folder: Path, **changes: Any) -> list[dict[str, float]]:
    """Metrics of two iterations of a four-layer model in bf16, after preflight."""
    options: dict[str, Any] = {
        "use_cpu": False, "per_device_train_batch_size": 2, "num_generations": 4,
        "response_length": 33, "preflight": True, "learning_rate": 1e-3,
        "local_rollout_forward_batch_size": 16,
    }  # fmt: skip
    model = tiny_policy(
        "qwen2", vocab_size=32, hidden_size=256, layers=4, heads=4, initializer_range=0.1
    )
    return test_low_precision.history(kind, config, folder, model, **options | changes)


@pytest.mark.parametrize(("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_one_step_has_a_ratio_of_exactly_one(kind: Any, config: Any, tmp_path: Path) -> None:
    test_low_precision.check_ratios_are_one(history(kind, config, tmp_path))


def test_the_embedded_engine_agrees_with_the_learner(tmp_path: Path) -> None:
    rows = history(GRPOTrainer, GRPOConfig, tmp_path, num_ppo_epochs=2)
    gaps = [row["rollout/logprob_gap"] for row in rows if "rollout/logprob_gap" in row]
    assert gaps
    assert max(gaps) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_accumulates_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 896, generator=generator).to(dtype)
    weight = (torch.randn(151_936, 896, generator=generator) * 0.05).to(dtype)
    labels = torch.randint(0, 151_936, (300,), generator=generator)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1)
    expected = exact.gather(-1, labels[:, None])[:, 0]
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        logprobs, _ = linear_logprob(hidden.cuda(), Head(weight.cuda()), labels.cuda())
    # Products of bf16 numbers are exact in float32; a bf16 result would be off by 0.06.
    assert (logprobs.double().cpu() - expected).abs().max() < 2e-3
