"""Trainers learn the same from micro-batches of a number of rows and of a number of tokens."""

import pytest
import torch

from kedge.loop import stages
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
