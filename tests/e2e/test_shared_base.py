"""PPO whose policy, value, reference and reward are adapters on one base: a whole run."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from kedge import PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer
from kedge.records.errors import ConfigError
from kedge.testing import tiny_policy, tiny_reward_model
from tests.e2e.small import length_reward
from tests.e2e.strict_runs import FLAGS, LORA, PROMPTS, policy
from tests.unit.text_toys import word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
SIZES = {"vocab_size": 32, "hidden_size": 8, "layers": 1, "heads": 2}
OPTIONS = {"total_episodes": 16, "per_device_train_batch_size": 4, "response_length": 4}

PISSA = LoraConfig(**LORA.to_dict() | {"init_lora_weights": "pissa"})


@pytest.fixture
def reward(tmp_path):
    """The folder of a reward adapter on the base of ``policy()``."""
    model = tiny_reward_model("gpt_neox", **SIZES)
    model.gpt_neox.load_state_dict(policy().gpt_neox.state_dict())
    config = LoraConfig(r=2, target_modules=["query_key_value"], task_type="SEQ_CLS")
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator))
    model.save_pretrained(tmp_path / "reward")
    return str(tmp_path / "reward")


def trainer(folder, reward, **flags):
    options = {"value_adapter": True, "reward_adapter": reward, "gradient_checkpointing": True}
    flags = FLAGS | OPTIONS | options | {"use_cpu": True, "output_dir": str(folder)} | flags
    inputs = flags.pop("inputs", {})
    torch.manual_seed(0)
    return PPOTrainer(
        PPOConfig(**flags),
        word_tokenizer(),
        policy(),
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS[:3] if "eval_strategy" in flags else None,
        **{"peft_config": LORA} | inputs,
    )


def trained(run):
    return {n: p.detach() for n, p in run.engine.learner.module.named_parameters()}


def test_trains_evaluates_resumes_exactly_and_exports(tmp_path, reward):
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "constant"}
    whole = trainer(tmp_path / "whole", reward, **evaluated)
    before = {n: p.clone() for n, p in trained(whole).items()}
    whole.train()
    changed = {n for n, p in trained(whole).items() if not torch.equal(p, before[n])}
    assert any(".default." in n for n in changed)
    assert any(".kedge_value." in n for n in changed)
    assert "value.head.summary.weight" in changed
    assert all(".default." in n or "value" in n for n in changed)  # neither base nor reward

    saved = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path / "cut", reward, **saved, **evaluated | {"max_steps": 2}).train()
    resumed = trainer(tmp_path / "cut", reward, **saved, **evaluated)
    resumed.train(resume_from_checkpoint=True)
    for name, p in trained(whole).items():
        assert torch.equal(p, trained(resumed)[name]), name

    whole.save_model(str(tmp_path / "model"))
    loaded = PeftModel.from_pretrained(policy(), tmp_path / "model").eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected = whole.model(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
    config = json.loads((tmp_path / "model" / "value_model" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"


def test_reward_adapter_in_other_trainers_and_next_to_functions(tmp_path, reward):
    sizes = {"max_steps": 2, "per_device_train_batch_size": 4, "response_length": 4}
    sizes |= {"num_ppo_epochs": 1}
    run = RLOOTrainer(
        args=RLOOConfig(
            **FLAGS | sizes | {"num_generations": 2, "reward_adapter": reward},
            output_dir=str(tmp_path / "rloo"),
            use_cpu=True,
        ),
        processing_class=word_tokenizer(),
        model=policy(),
        reward_funcs=length_reward,
        train_dataset=PROMPTS,
        peft_config=LORA,
    )
    run.train()
    assert any("rewards/reward" in key for row in run.state.log_history for key in row)
    assert any("rewards/length_reward" in key for row in run.state.log_history for key in row)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_starts_in_the_base_leaves_the_policy_what_it_was(tmp_path, init):
    plain, ids = policy(), torch.arange(3, 30)[None]
    config = LoraConfig(**LORA.to_dict() | {"init_lora_weights": init})
    with torch.no_grad():
        expected = plain(input_ids=ids).logits.log_softmax(-1)
    changes = {"learning_rate": 0.0, "kl_coef": 0.1, "reward_adapter": None}
    inputs = {"reward_funcs": [length_reward], "peft_config": config}
    run = trainer(tmp_path / "run", None, **changes, inputs=inputs)
    run.train()  # the preflight compares the policy with its reference
    with torch.no_grad():
        logprobs = run.model(input_ids=ids).logits.log_softmax(-1)
    assert float((logprobs - expected).abs().mean()) < 1e-6  # 1.7e-2 if the base changed twice
    kl = [row["objective/kl"] for row in run.state.log_history if "objective/kl" in row]
    assert max(map(abs, kl)) < 1e-6


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"max_lag": 1}, "set max_lag=0"),
        ({"inputs": {"peft_config": None}}, "pass peft_config"),
        ({"reward_adapter": None, "value_source": "reward"}, "set reward_adapter"),
        (
            {"inputs": {"value_model": tiny_reward_model("gpt_neox", **SIZES)}},
            "leave one of them out",
        ),
        ({"value_adapter": False, "value_source": "reward"}, "needs a reward model"),
        ({"inputs": {"peft_config": PISSA}}, "changed the base that the adapter"),
    ],
)
def test_what_cannot_share_a_base_is_refused(tmp_path, reward, flags, match):
    inputs = {"reward_funcs": [length_reward]} | flags.pop("inputs", {})
    with pytest.raises(ConfigError, match=match):
        trainer(tmp_path / "run", reward, **flags, inputs={"peft_config": LORA} | inputs)


def test_bf16_run_has_a_bf16_base(tmp_path, reward):
    folder = tmp_path / "base"
    tiny_policy("gpt_neox", **SIZES).save_pretrained(folder)
    torch.manual_seed(0)
    run = PPOTrainer(
        PPOConfig(
            **FLAGS | OPTIONS | {"bf16": True, "use_cpu": True},
            value_adapter=True,
            reward_adapter=reward,
            output_dir=str(tmp_path / "run"),
        ),
        word_tokenizer(),
        str(folder),
        train_dataset=PROMPTS,
        peft_config=LORA,
    )
    for name, p in run.model.named_parameters():
        assert p.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
    run.train()
    assert all(
        row["loss/value_avg"] > 0 for row in run.state.log_history if "loss/value_avg" in row
    )
