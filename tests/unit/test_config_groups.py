"""RLOOConfig and GRPOConfig: two spellings, sizes, and what reaches the algorithms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kedge import GRPOConfig, RLOOConfig
from kedge.config.algorithms import reward_bounds
from kedge.config.ppo import PPOConfig
from kedge.ext.trl import options as trl
from kedge.ext.trl import v0_17
from kedge.models.compatibility import check_length
from kedge.records.errors import ConfigError
from kedge.testing import tiny_policy
from kedge.trainers import grpo as grpo_trainer
from kedge.trainers import rloo as rloo_trainer

CONFIGS = [trl.RLOOConfig, trl.GRPOConfig]


@pytest.fixture
def out(tmp_path: Path) -> dict[str, Any]:
    return {"output_dir": str(tmp_path), "use_cpu": True}


# -- RLOO -----------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_dialect(out: dict[str, Any]) -> None:
    older = {"num_ppo_epochs": 4, "response_length": 53, "temperature": 0.7, "learning_rate": 5e-5}
    newer = {"num_ppo_epochs": 1, "response_length": 512, "temperature": 1, "learning_rate": 1e-6}
    kinds = ((RLOOConfig, older), (v0_17.RLOOConfig, older), (trl.RLOOConfig, newer))
    for kind, defaults in kinds:
        made = kind(**out)
        assert {name: getattr(made, name) for name in defaults} == defaults
        assert (made.num_generations, made.kl_coef, made.cliprange) == (2, 0.05, 0.2)
    made = v0_17.RLOOConfig(**out, rloo_k=4)
    assert (made.rloo_k, made.num_generations) == (4, 4)


@pytest.mark.parametrize(
    ("given", "bounds"),
    [(None, None), (10.0, (-10.0, 10.0)), ([10], (-10.0, 10.0)), ((-1, 2.5), (-1.0, 2.5))],
)
def test_reward_clip_range(given: Any, bounds: Any, out: dict[str, Any]) -> None:
    made = RLOOConfig(**out, reward_clip_range=given)
    assert reward_bounds(made.reward_clip_range) == bounds


@pytest.mark.parametrize("given", [(2, 1), -1.0, "ten", (1, 2, 3), [True]])
def test_reward_clip_range_that_cannot_be(given: Any, out: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reward_clip_range="):
        RLOOConfig(**out, reward_clip_range=given)


# -- Sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("given", [{"steps_per_generation": 6}, {"generation_batch_size": 48}])
def test_sizes_of_a_generation(config: Any, given: dict[str, Any], out: dict[str, Any]) -> None:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    made = config(**out, **sizes, **given)
    assert made.per_device_train_batch_size == 8
    assert (made.gradient_accumulation_steps, made.num_mini_batches) == (6, 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps_per_generation": 2, "generation_batch_size": 8}, "steps_per_generation=2 and"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "must be a multiple of gradient_accumulation_steps",
        ),
        ({"generation_batch_size": 12}, "generation_batch_size=12 must be a multiple"),
    ],
)
def test_sizes_that_do_not_fit(given: dict[str, Any], words: str, out: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        trl.GRPOConfig(**out, per_device_train_batch_size=8, **given)


# -- GRPO -----------------------------------------------------------------------------------------


def test_grpo_has_the_defaults_of_trl(out: dict[str, Any]) -> None:
    made = GRPOConfig(**out)
    assert (made.learning_rate, made.num_generations, made.response_length) == (1e-6, 8, 512)
    assert (made.num_ppo_epochs, made.temperature, made.beta, made.kl_coef) == (1, 1.0, 0.0, 0.0)
    assert (made.loss_type, made.scale_rewards, made.epsilon) == ("dapo", "group", 0.2)


def test_ratios_of_responses_under_a_loss_of_tokens_are_pointed_out(out, caplog) -> None:
    GRPOConfig(**out, importance_sampling_level="sequence", loss_type="grpo")
    assert not caplog.records
    GRPOConfig(**out, importance_sampling_level="sequence")
    assert "loss_type='dapo' gives long responses" in caplog.text


def test_a_vllm_that_is_too_old_is_refused_at_the_start(out, monkeypatch) -> None:
    monkeypatch.setattr("kedge.config.rollout_engines.installed", lambda package: True)
    monkeypatch.setattr("kedge.config.rollout_engines.installed_vllm", lambda: "0.31.2")
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 or newer, got 0\.31\.2"):
        GRPOConfig(**out, rollout_engine="vllm")
    monkeypatch.setattr("kedge.config.rollout_engines.installed_vllm", lambda: "0.32.0rc1")
    GRPOConfig(**out, rollout_engine="vllm")


def test_options_reach_the_algorithms(out: dict[str, Any]) -> None:
    made: Any = trl.RLOOConfig(**out, epsilon=0.1, epsilon_high=0.3, normalize_advantages=True)
    with patch.object(rloo_trainer, "rloo") as rloo:
        rloo_trainer.build_rloo(made)
    assert rloo.call_args.kwargs["cliprange"] == (0.1, 0.3, None)
    assert rloo.call_args.kwargs["normalize_advantage"] is True
    made = trl.GRPOConfig(**out, scale_rewards=False, max_completion_length=64)
    with patch.object(grpo_trainer, "grpo") as grpo:
        grpo_trainer.build_grpo(made)
    found = grpo.call_args.kwargs
    assert (found["scale_rewards"], found["response_length"]) == ("none", 64)
    assert found["use_bias_correction_kl"] is True


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss_type": "sapo"}, "loss_type='sapo'"),
        ({"scale_rewards": "prompt"}, "scale_rewards='prompt'"),
        ({"kl_estimator": "full"}, "kl_estimator='full'"),
        ({"delta": 1.1}, "delta=1.1"),
        ({"delta": 3.0, "loss_type": "cispo"}, "delta=3.0"),
        ({"overlong_buffer": 600}, "overlong_buffer=600"),
        ({"overlong_buffer": 9, "stop_token": None}, "nothing can end a response"),
        ({"mask_truncated_completions": True, "stop_token": None}, "nothing can end a response"),
        ({"generation_kwargs": {"stop": "a", "top_a": 1}}, "generation_kwargs={'top_a': 1}"),
        ({"response_length": 5, "max_completion_length": 6}, "another name of response_length"),
    ],
)
def test_grpo_options_that_cannot_work(
    given: dict[str, Any], words: str, out: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        trl.GRPOConfig(**out, **given)


@pytest.mark.parametrize("config", CONFIGS)
def test_vllm_in_the_names_of_trl(config, tmp_path, monkeypatch):
    monkeypatch.setattr("kedge.config.rollout_engines.installed", lambda name: True)
    here = config(output_dir=str(tmp_path), use_vllm=True, vllm_max_model_length=99)
    assert here.rollout_engine == "vllm"
    assert here.vllm_engine_args["max_model_len"] == 99
    assert here.vllm_engine_args["gpu_memory_utilization"] == 0.3
    place = {"vllm_server_host": "box", "vllm_server_port": 7, "vllm_server_timeout": 9.0}
    there = config(output_dir=str(tmp_path), use_vllm=True, vllm_mode="server", **place)
    assert (there.rollout_engine, there.worker_start_timeout) == ("http://box:7", 9.0)
    with pytest.raises(ConfigError, match="use_vllm=True and rollout_engine='vllm' are both set"):
        config(output_dir=str(tmp_path), use_vllm=True, rollout_engine="vllm")


def test_messages_call_the_length_what_the_user_does(out: dict[str, Any]) -> None:
    for config in (PPOConfig, GRPOConfig, RLOOConfig, v0_17.RLOOConfig):
        assert config(**out).length_option == "response_length"
    for config in CONFIGS:
        assert config(**out).length_option == "max_completion_length"


@pytest.mark.parametrize(
    ("prompt", "response", "advice"),
    [
        (189, 512, "Set max_completion_length=323 or less"),  # 0 tokens would be left of prompts
        (400, 200, "Set max_completion_length=112 or less, or max_prompt_length=312 or less"),
        (600, 100, "Set max_prompt_length=412 or less"),
        (600, 500, "such as max_prompt_length=256 and max_completion_length=256"),
    ],
)
def test_lengths_that_do_not_fit_get_advice_that_does(
    prompt: int, response: int, advice: str
) -> None:
    model = tiny_policy(max_positions=512)
    with pytest.raises(ConfigError, match=f"{prompt + response} positions; .* has 512") as caught:
        check_length(
            {"the policy": model}, prompt=prompt, response=response, option="max_completion_length"
        )
    assert str(caught.value).endswith(advice)
    assert "max_prompt_length=1," not in str(caught.value)
