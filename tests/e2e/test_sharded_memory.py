"""What a rank of a sharded run holds of three models, counted in bytes at each phase."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kedge import PPOConfig, PPOTrainer
from kedge.learner import distributed, learner_state
from kedge.models.fingerprint import checksum
from kedge.testing import tiny_policy, tiny_reward_model
from tests.e2e.test_ranks import launch
from tests.ranks import leave
from tests.unit.text_toys import word_tokenizer

LAYERS = 8
SHAPE: dict[str, Any] = {"vocab_size": 32, "hidden_size": 64, "layers": LAYERS}
PROMPTS = [{"prompt": f"w{i} w{i + 1}"} for i in range(3, 16)]


def held() -> int:
    """Bytes of the weights, gradients and optimizer state (tensors with an owner in Python)."""
    storages = {}
    for x in gc.get_objects():
        kind = type(x)
        if not issubclass(kind, torch.Tensor) or issubclass(kind, DTensor) or x.is_meta:
            continue
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Peaks:
    """The most bytes of tensors made since that were held in each phase."""

    def __init__(self) -> None:
        gc.freeze()  # what exists already is not looked at again
        self.peaks: dict[str, int] = {}
        self.phase, self.step = "load", 0

    def count(self, *_: Any) -> None:
        key = self.phase if self.phase in {"load", "save"} else f"{self.phase} {self.step}"
        self.peaks[key] = max(self.peaks.get(key, 0), held())

    def within(self, phase: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return f(*args, **kwargs)
            finally:
                self.phase = before

        return timed

    def around(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count()
            result = f(*args, **kwargs)
            self.count()
            return result

        return counted


def work(folder: str, out: str) -> None:
    """What each rank does: two iterations of PPO with value model and reference, and a save."""
    checksum(torch.zeros(1))  # makes its table of 1 MiB, which is no weight
    models, peaks = Path(out).parent / "models", Peaks()
    distributed.fully_shard = peaks.around(distributed.fully_shard)  # type: ignore[assignment]
    made = PPOTrainer(
        PPOConfig(
            **{"output_dir": folder, "per_device_train_batch_size": 2, "total_episodes": 8},
            **{"num_mini_batches": 1, "num_ppo_epochs": 1, "response_length": 4},
            local_rollout_forward_batch_size=int(os.environ["RANK"]) + 1,  # unequal passes
            **{"save_strategy": "no", "preflight": False, "num_sample_generations": 0},
            **{"use_cpu": True, "disable_tqdm": True},
        ),
        word_tokenizer(),
        str(models / "policy"),
        value_model=str(models / "value"),
        reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        train_dataset=PROMPTS,
    )
    peaks.count()
    peaks.phase = "other"
    learner = made._run.learner
    engine = made._run.engine.rollout_engine
    learner.compute_logprobs = peaks.within("annotate", learner.compute_logprobs)  # type: ignore
    learner.optimizer_step = peaks.within("train", learner.optimizer_step)  # type: ignore
    engine.generate = peaks.within("sample", engine.generate)  # type: ignore[method-assign]
    advance = learner.advance_version

    def next_step() -> None:
        advance()
        peaks.step += 1

    learner.advance_version = next_step  # type: ignore[method-assign]
    for model in learner._all_models():
        for layer in model.modules():
            if isinstance(layer, distributed.GradientCheckpointingLayer):
                layer.register_forward_hook(peaks.count, prepend=True)  # before it is resharded
    learner.optimizer.register_step_pre_hook(peaks.count)
    learner.optimizer.register_step_post_hook(peaks.count)
    made.train()
    peaks.phase = "save"
    learner_state.full_on_first = peaks.around(learner_state.full_on_first)  # type: ignore
    made.save_model(folder)
    Path(f"{out}-{os.environ['RANK']}").write_text(json.dumps(peaks.peaks))
    if os.environ["RANK"] == "0":
        Path(out).write_text("[]")
    leave()


@pytest.mark.slow
def test_no_rank_holds_the_models_whole(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    policy, value = tiny_policy(**SHAPE), tiny_reward_model(**SHAPE)
    policy.save_pretrained(folder / "models" / "policy")
    value.save_pretrained(folder / "models" / "value")
    launch(folder, 2, file=__file__, ACCELERATE_USE_FSDP="true")
    size = _size(policy)
    one, two = (
        {k: x / size for k, x in json.loads((folder / f"rows.json-{r}").read_text()).items()}
        for r in range(2)
    )
    # In models: half of policy, value and reference is 1.5, of two gradients 1, of Adam's state 2.
    # Sampling gathers the policy, every other phase a layer (1 / LAYERS) or two, and the embedding.
    assert one["load"] < 2 + 0.7  # rank 0 reads policy and value; the reference is the policy
    assert two["load"] < 1.5 + 0.3
    for peaks in (one, two):
        assert 1.5 < peaks["annotate 0"] < 1.5 + 0.5
        assert 2.5 < peaks["sample 0"] < 1.5 + 1 + 0.7  # with the cache of keys and values
        assert 4.4 < peaks["train 0"] < 4.5 + 0.4
        assert peaks["annotate 1"] < 3.5 + 0.5  # the gradients are freed
        assert peaks["sample 1"] < 3.5 + 1 + 0.7
        assert max(peaks.values()) < 0.6 * (3 + 2 + 4)  # of one process with whole models
    assert two["save"] < 3.5 + 0.3
    assert one["save"] < 3.5 + 1 + 0.3  # one model at a time


def _size(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
