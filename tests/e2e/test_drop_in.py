"""Programs written for TRL's trainers: what they call, read and override."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from kedge import AsyncPPOTrainer, GRPOTrainer, PPOTrainer, RLOOTrainer
from kedge.ext import trl
from kedge.ext.trl import GRPOConfig, RLOOConfig, v0_17
from kedge.ext.trl.compat import trl_trainers
from kedge.records.errors import ConfigError
from kedge.testing import tiny_policy
from tests.classic_models import gpt2, samples
from tests.classic_models import trainer as classic
from tests.e2e.small import PROMPTS, VOCAB, length_reward, rows, small
from tests.unit.text_toys import neox_reward, word_tokenizer

TRAINERS = [PPOTrainer, AsyncPPOTrainer, RLOOTrainer, GRPOTrainer]


class Watched(GRPOTrainer):
    """Overrides the methods that a run calls."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "mine": 7.0}, start_time)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        self.evaluations = getattr(self, "evaluations", 0) + 1
        return super().evaluate(eval_dataset)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().save_model(output_dir, *args, **kwargs)
        (Path(str(output_dir)) / "mine").write_text("")


def grpo(folder: Path, kind: Any = GRPOTrainer, model: Any = None, **options: Any) -> Any:
    options = {"max_steps": 3, "logging_steps": 2, "save_strategy": "no"} | options
    return kind(
        model=model or tiny_policy(vocab_size=32),
        reward_funcs=options.pop("reward_funcs", length_reward),
        args=(RLOOConfig if kind is RLOOTrainer else GRPOConfig)(
            **{"output_dir": str(folder), "per_device_train_batch_size": 4, "num_generations": 2},
            **{"max_completion_length": 4, "use_cpu": True, "disable_tqdm": True},
            **{"num_sample_generations": 0, "gradient_checkpointing": False},
            **options,
        ),
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS[:2],
        processing_class=word_tokenizer(),
    )


@pytest.mark.slow
def test_a_script_ends_as_it_would_with_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = grpo(tmp_path, Watched, save_strategy="steps", save_steps=3, eval_strategy="epoch")
    metrics = trainer.train().metrics
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    assert "***** train metrics *****\n  episode" in capsys.readouterr().out
    assert json.loads((tmp_path / "all_results.json").read_text()) == metrics
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] == 3
    assert state["log_history"] == trainer.state.log_history

    # Iterations since the last row are in the row that ends the run.
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["step"] for row in rows] == [2, 3]
    assert rows[-1]["train_loss"] == metrics["train_loss"]
    # Overridden methods are called: all rows, the evaluation of the epoch, the checkpoint.
    assert [row["mine"] for row in trainer.state.log_history] == [7.0] * 3
    assert trainer.evaluations == 1
    assert (tmp_path / "checkpoint-3" / "mine").is_file()
    trainer.log({"own": 1.0})
    assert trainer.state.log_history[-1]["own"] == 1.0

    assert trainer.is_local_process_zero()
    assert trainer.get_num_trainable_parameters() == trainer.model.num_parameters()
    assert trainer.tokenizer is trainer.processing_class
    assert trainer.model_wrapped is trainer.model
    assert (trainer.num_generations, trainer.beta, trainer.max_completion_length) == (2, 0.0, 4)
    assert (trainer.ref_model, trainer.reward_funcs) == (None, [length_reward])
    assert (trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled) == (False, False)
    assert trainer.callback_handler.callbacks
    assert trainer.control.should_training_stop


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize(
    ("method", "way_out"),
    [
        ("compute_loss", r"loss=my_loss"),
        ("_compute_loss", r"loss=my_loss"),
        ("_calculate_rewards", "reward_funcs"),
        ("_generate_and_score_completions", "rollout_func"),
        ("get_train_dataloader", "train_dataset"),
        ("_get_train_sampler", "shuffle_dataset=False"),
        ("create_optimizer", "optimizers="),
        ("training_step", "algorithm="),
        ("_save_checkpoint", "save_model"),
        ("_prepare_inputs", "TrainerCallback"),
    ],
)
def test_an_override_that_nothing_calls_is_refused(kind: Any, method: str, way_out: str) -> None:
    own = type("Own", (kind,), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(ConfigError, match=f"Own overrides {method}, which .*{way_out}"):
        own()


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_long_prompts_keep_their_last_tokens_in_programs_of_trl(name: str, tmp_path: Path) -> None:
    config = getattr(trl, f"{name}Config")(
        output_dir=str(tmp_path), max_prompt_length=3, per_device_train_batch_size=4,
        num_generations=2, max_completion_length=4, use_cpu=True, max_steps=1,
    )  # fmt: skip
    trainer = getattr(trl_trainers, f"{name}Trainer")(
        model=tiny_policy(vocab_size=VOCAB), reward_funcs=length_reward, args=config,
        train_dataset=[{"input_ids": [5, 6, 7, 8, 9]}] * 4, processing_class=word_tokenizer(),
    )  # fmt: skip
    assert trainer.engine.source.batch(0).ids.tolist() == [[7, 8, 9]] * 4


class Unpaired(RLOOTrainer):
    """A loop of its own, as subclasses of TRL 0.12 to 0.21 have, and a reward of two labels."""

    def train(self) -> Any:  # type: ignore[override]
        scores = []
        for batch in self.dataloader:
            ids = batch["input_ids"]
            logits = self.reward_model(ids, attention_mask=ids != 1).logits
            scores.append((logits[:, 0] - logits[:, 1]).mean().item())
            loss = self.model(ids).logits.logsumexp(-1).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.state.global_step += 1
        self._save_checkpoint(self.model, trial=None)
        return scores


def test_a_subclass_with_its_own_loop_finds_what_trl_had(tmp_path: Path) -> None:
    reward = neox_reward(VOCAB, labels=2)
    parts: dict[str, Any] = {
        "policy": tiny_policy("gpt_neox", vocab_size=VOCAB), "reward_model": reward,
        "ref_policy": tiny_policy("gpt_neox", vocab_size=VOCAB), "tokenizer": word_tokenizer(),
        "train_dataset": Dataset.from_dict({"input_ids": [[5, 6], [7, 8, 9], [5, 9], [6, 7]]}),
        "config": v0_17.RLOOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, rloo_k=2, use_cpu=True,
            response_length=4, kl_coef=0.1, max_steps=2, stop_token="eos", seed=3,
        ),
    }  # fmt: skip
    trainer = Unpaired(**parts)
    scores = trainer.train()
    assert len(scores) == 2  # batches of 2 prompts
    assert all(math.isfinite(x) for x in scores)
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()
    assert trainer.reward_model is reward
    assert trainer.ref_policy is trainer.ref_model
    assert trainer.stop_token_id == trainer.processing_class.eos_token_id
    assert (trainer.train_dataset_len, trainer.local_seed) == (4, 3)
    with pytest.raises(ConfigError, match=r"has 2 labels .*reward_label"):
        RLOOTrainer(**parts)  # which Kedge would have to score with


def load(folder: Path, dtype: Any) -> Any:
    """A policy of bf16 files, as a program loads it."""
    if not folder.exists():
        tiny_policy(vocab_size=VOCAB).bfloat16().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


NUMBERS = ("loss", "objective/kl", "objective/scores", "grad_norm", "val/ratio")


@pytest.mark.slow
def test_bf16_weights_train_as_the_same_weights_in_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    for dtype in ("auto", torch.float32):
        model, reference = (load(tmp_path / "policy", dtype) for _ in range(2))
        value = neox_reward(vocab=VOCAB).bfloat16().to(model.dtype)
        trainer = small(model=model, ref_model=reference, value_model=value, total_episodes=12)
        trainer.train()
        runs.append([{name: row[name] for name in NUMBERS} for row in rows(trainer)])
        assert trainer.model is model
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert trainer.ref_model.dtype == torch.float32
    assert len(runs[0]) == 3
    assert runs[0] == runs[1]
    assert runs[0][0]["objective/kl"] == pytest.approx(0, abs=1e-6)
    for name in ("model", "value_model"):
        assert caplog.text.count(f" {name} has weights in bfloat16; they train in float32") == 1


@pytest.mark.slow
def test_bf16_weights_under_an_adapter_stay(tmp_path: Path) -> None:
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    low = get_peft_model(load(tmp_path / "policy", "auto"), adapter).bfloat16()
    trainer = grpo(tmp_path, model=low)
    trainer.train()
    types = {(p.requires_grad, p.dtype) for p in trainer.model.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}


def test_classic_bf16_weights_train_as_the_same_weights_in_float32() -> None:
    runs = []
    for dtype in (torch.bfloat16, torch.float32):
        base = gpt2().bfloat16().to(dtype)
        ppo = classic(base, sgd=0.1)
        runs.append((ppo.step(*samples()), [p.detach().clone() for p in ppo.model.parameters()]))
        assert ppo.model.pretrained_model.dtype == torch.float32
        # As accelerate leaves them: scripts and tests read ``param.grad`` after a step.
        assert all(not p.grad.any() for p in ppo.model.parameters())
    (low, low_weights), (high, high_weights) = runs
    assert low["ppo/loss/total"] == high["ppo/loss/total"]
    assert low["objective/kl"] == pytest.approx(0, abs=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(low_weights, high_weights, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_sampling_and_other_options_of_trl_need_nothing_more(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = grpo(
        tmp_path,
        kind,
        **{"top_p": 0.8, "top_k": 5, "min_p": 0.01, "vllm_gpu_memory_utilization": 0.5},
        **{"generation_kwargs": {"stop": "w9"}, "eval_accumulation_steps": 1},
        **{"bf16_full_eval": True, "save_on_each_node": True, "logging_steps": 1},
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert len(logged) == 3
    assert all(row["val/ratio"] == pytest.approx(1, abs=1e-5) for row in logged)
    assert trainer.args.stop_strings == ["w9"]
    text = caplog.text
    assert text.count("top_k=5, top_p=0.8, min_p=0.01: training normalizes over the tokens") == 1
    for name in ("vllm_gpu_memory_utilization", "eval_accumulation_steps", "bf16_full_eval"):
        assert text.count(f"{name}=") == 1


def test_classic_tensorboard_needs_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = classic(gpt2(), log_with="tensorboard", project_kwargs={"logging_dir": None})
    trainer.log_stats(
        trainer.step(*samples()), {"query": ["a"], "response": ["b"]}, [torch.ones(1)]
    )
    trainer.accelerator.end_training()
    assert list(tmp_path.glob("runs/*/events*"))


class FunctionAsReward(torch.nn.Module):
    """A function in place of a reward model, as programs write it for TRL: no ``forward``."""

    base_model_prefix = "backbone"

    def backbone(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(hidden_states=[input_ids[..., None]])

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float().cumsum(1) / 10  # at the last token: the sum of the row's ids


class WithForward(torch.nn.Module):
    """The same score from ``forward``."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (input_ids * attention_mask).sum(1).float() / 10


@pytest.mark.slow
def test_a_reward_module_by_trls_contract_scores_in_every_trainer(tmp_path: Path) -> None:
    for kind in (GRPOTrainer, RLOOTrainer):
        runs = []
        for reward in (FunctionAsReward(), WithForward()):
            trainer = grpo(tmp_path, kind, reward_funcs=reward, max_steps=1)
            trainer.train()
            runs.append(trainer.state.log_history[0]["reward"])
        assert runs[0] == pytest.approx(runs[1])
    trainer = small(reward_model=FunctionAsReward(), total_episodes=4)
    trainer.train()
    assert len(rows(trainer)) == 1


def test_whitened_rewards_do_not_see_padding() -> None:
    """TRL 0.11.4 adds the mean to padding: five columns of it move returns by up to 1.24."""
    ppo = classic(gpt2(), whiten_rewards=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    values, rewards = torch.randn(2, 4) * mask, (torch.randn(2, 4) + 3) * mask
    narrow = ppo.compute_advantages(values, rewards, mask)
    padded = (torch.nn.functional.pad(x, (0, 5)) for x in (values, rewards, mask))
    wide = ppo.compute_advantages(*padded)
    for one, other in zip(narrow, wide, strict=True):
        assert torch.allclose(one * mask, other[:, :4] * mask, atol=1e-6)
