"""``train_layers`` of a trainer: what trains, what is refused, what the plan counts."""

from __future__ import annotations

import pytest
from peft import LoraConfig

from kedge.cli.arguments import parse
from kedge.cli.tools.plan import plan
from kedge.config.ppo import PPOv2Config
from kedge.errors import CheckpointError, ConfigError
from kedge.testing import tiny_policy, tiny_reward_model
from tests.e2e.small import VOCAB, rows, small


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_policy_and_value_train_their_top_layers_and_numbers_stay():
    logs = []
    for cache in (True, False):
        value = tiny_reward_model("llama", vocab_size=VOCAB, layers=1)
        policy = tiny_policy("llama", vocab_size=VOCAB, layers=3)
        trainer = small(model=policy, value_model=value, train_layers=2, cache_trunk=cache)
        trainer.train()
        assert {n.split(".")[2] for n in trained(policy) if "layers" in n} == {"1", "2"}
        assert trained(policy) >= {"lm_head.weight", "model.norm.weight"}
        assert "model.embed_tokens.weight" not in trained(policy) | trained(value)
        assert {n.split(".")[2] for n in trained(value) if "layers" in n} == {"0"}  # has one
        logs.append(rows(trainer))
    names = ("objective/scores", "objective/kl", "loss/policy", "loss/value", "grad_norm")
    for cached, plain in zip(*logs, strict=True):
        shared = [name for name in names if name in plain]
        assert shared
        for name in shared:
            assert cached[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_layers": 9}, "train_layers=9 must be at most 2, the layers of the policy"),
        (
            {"train_layers": 1, "peft_config": LoraConfig(task_type="CAUSAL_LM")},
            "but the policy trains an adapter; .*layers_to_transform",
        ),
        (
            {
                "train_layers": 1,
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            "needs use_reentrant=False",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        small(**changes)


def test_the_plan_counts_what_trains(tmp_path):
    tiny_policy(vocab_size=VOCAB, layers=4).save_pretrained(tmp_path)
    small().processing_class.save_pretrained(tmp_path)
    flags = ["--model_name_or_path", str(tmp_path), "--total_episodes", "8", "--kl_coef", "0.1"]
    flags += ["--reward_funcs", "tests/e2e/small.py:length_reward", "--output_dir", str(tmp_path)]

    def models(*more):
        return plan(parse([*flags, *more], prog="kedge plan", config=PPOv2Config))[2]

    (whole, reference, *_), (top, small_reference, *_) = models(), models("--train_layers", "1")
    total = whole.total
    assert whole.trained == reference.total == top.total == total
    assert top.trained == small_reference.total < total / 2
    assert top.optimizer < whole.optimizer / 2
    kept = top.activations - models("--train_layers", "1", "--cache_trunk", "False")[0].activations
    assert kept > 0


def test_a_resumed_run_must_train_the_same_layers(tmp_path):
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    small(train_layers=1, **options).train()
    with (
        pytest.warns(UserWarning, match="train_layers: 1 in the checkpoint, null now"),
        pytest.raises(CheckpointError, match="the checkpoint's policy has 15 trained weights"),
    ):
        small(**options).train(resume_from_checkpoint=True)
