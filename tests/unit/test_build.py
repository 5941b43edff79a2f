"""From a trainer's arguments to a run: what is refused first, and what reaches each part."""

from __future__ import annotations

import inspect
import math
from pkgutil import resolve_name
from typing import Any

import pytest

from kedge import PPOConfig, PPOTrainer
from kedge.algorithms import ppo
from kedge.config.rollout_engines import (
    ENGINE_NAMES,
    ROLLOUT_ENGINES,
    RolloutArguments,
)
from kedge.errors import ConfigError, KedgeError
from kedge.testing import ScriptedRollouts, tiny_policy
from kedge.trainers import load_trainer
from kedge.trainers.spec import shared_kwargs
from tests.e2e.small import VOCAB, length_reward, small
from tests.e2e.test_groups import grpo, rloo

POLICY = tiny_policy("gpt_neox", vocab_size=VOCAB)
AS_COMPLETED = {"max_lag": 1, "rollout_schedule": "as_completed"}
URL = {"rollout_engine": "http://127.0.0.1:1"}


def needs_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def with_engine(engine: Any, **options: Any) -> Any:
    made = ScriptedRollouts([[[3, 1]] * 4]) if engine is None else engine
    return small(**options, rollout_engine=made)


# A way to build the trainer, its arguments, and words of the refusal; each breaks one stage.
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    # data
    (small, {"train_dataset": None}, "train_dataset=None"),
    (small, {"num_mini_batches": 3}, "num_mini_batches=3 does not divide"),
    (small, {"batch_size": 5}, "batch_size=5 must be 4"),
    (small, {"eval_strategy": "steps"}, "eval_strategy='steps' needs an eval_dataset"),
    (small, {"eval_against_start": True}, "eval_against_start=True needs an eval_dataset"),
    (small, {"algorithm": ppo}, "must be a kedge.Algorithm; call the function"),
    (
        small,
        {"per_device_train_batch_size": 1, "response_length": 1},
        "whiten_advantages=True needs a batch of at least 2 tokens",
    ),
    (small, {"credit": "turn", "score_position": "after_last"}, "credit='turn' needs every rew"),
    (small, {"credit": "turn", "lam_alpha": 0.05}, "would be 0 up to 20 turns"),
    (rloo, {"credit": "turn", "ratio_level": "sequence"}, "use ratio_level='token'"),
    # models
    (small, {"model": POLICY, "ref_model": POLICY}, "must not be the same object"),
    (small, {"ref_adapter_name": "first"}, "ref_adapter_name='first' must be an adapter"),
    (
        small,
        {"value_source": "reward", "reward_model": None, "reward_funcs": length_reward},
        'value_source="reward" needs a reward model',
    ),
    (grpo, {"model_init_kwargs": {"dtype": "float32"}}, "the model is already loaded"),
    # reward
    (small, {"reward_model": None}, "pass reward_model or reward_funcs"),
    (small, {"reward_weights": [1.0, 2.0]}, "got 2 for 1 sources"),
    (small, {"reward_funcs": needs_answer}, "answer"),
    (small, {"reward_funcs": 3}, "a reward must be a model"),
    # rollout engine
    (with_engine, {"engine": None, "sampler_correction": "mask"}, "records none"),
    (small, {**URL, "min_new_tokens": 2}, "min_new_tokens=2 is not supported with the server"),
    (small, {**AS_COMPLETED, "num_partial_batches": 3}, "must divide the 4 prompts"),
    (
        small,
        {"sampler_correction": "off", "sampler_correction_high": 3.0},
        "sampler_correction_high=3.0 has no effect with sampler_correction='off'",
    ),
    (small, {"replay_rollouts": "."}, "has no recorded samples"),
    (small, {"max_turns": 3}, "max_turns=3 has no effect without an environment"),
    (small, {"on_env_error": "drop"}, "on_env_error='drop' has no effect"),
    # engine
    (small, {"report_to": "wandbb"}, "report_to='wandbb'"),
    (small, {"callbacks": [3]}, "must be a transformers.TrainerCallback"),
]


@pytest.mark.parametrize(("build", "arguments", "words"), REFUSED, ids=[r[2] for r in REFUSED])
def test_what_is_refused_is_refused_before_any_weights_are_loaded(
    build: Any, arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights are loaded")

    for name in ("load_policy", "load_value", "build_value_head", "frozen_copy"):
        monkeypatch.setattr(f"kedge.trainers.assembly.models.{name}", load)
    monkeypatch.setattr("kedge.rewards.build.load_model", load)
    with pytest.raises(KedgeError) as refused:
        build(**arguments)
    assert words in str(refused.value)


def test_two_engines_are_refused() -> None:
    args = PPOConfig(output_dir="unused", use_cpu=True, total_episodes=8, **URL)
    given = small(args=PPOConfig(output_dir="unused", use_cpu=True, total_episodes=64))
    with pytest.raises(ConfigError, match="remove one of them"):
        PPOTrainer(
            args,
            processing_class=given.processing_class,
            model=given.model,
            reward_funcs=length_reward,
            train_dataset=given.train_dataset,
            rollout_engine=ScriptedRollouts([[[3, 1]] * 4]),
        )


def test_the_trainer_leaves_the_config_as_it_is(tmp_path: Any) -> None:
    args = PPOConfig(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4, total_episodes=8
    )
    before = dict(args.__dict__)
    made = small(args=args)
    assert {n: x for n, x in args.__dict__.items() if x is not before.get(n)} == {}
    assert (args.num_total_batches, args.batch_size) == (None, None)
    assert (made.args.num_total_batches, made.args.batch_size, made.args.world_size) == (2, 4, 1)


@pytest.mark.parametrize("kind", ["ppo", "rloo", "grpo"])
def test_every_parameter_of_an_algorithm_is_an_option(kind: str) -> None:
    spec = load_trainer(kind).SPEC
    args = spec.command_config(output_dir="unused", use_cpu=True)
    factory = spec.algorithm
    missing = set(inspect.signature(factory).parameters) - set(shared_kwargs(args, factory))
    assert missing == {"reference"}


def test_unset_options_follow_others() -> None:
    made = small(learning_rate=1e-3, max_grad_norm=0.0, seed=3)
    settings = made.engine.learner.settings
    assert (settings.value_learning_rate, settings.max_grad_norm) == (1e-3, math.inf)
    assert made.engine.source._seed == 3
    made = small(learning_rate=1e-3, value_learning_rate=0.0, seed=3, data_seed=0)
    assert made.engine.learner.settings.value_learning_rate == 0.0
    assert made.engine.source._seed == 0


@pytest.mark.parametrize("name", ROLLOUT_ENGINES)
def test_an_engine_reads_the_options_that_its_builder_takes(name: str) -> None:
    spec = ROLLOUT_ENGINES[name]
    taken = set(inspect.signature(resolve_name(spec.build)).parameters)
    if spec.actors:
        from kedge.ray.placement import RayCluster

        assert "cluster" in taken
        taken |= set(inspect.signature(RayCluster).parameters)
    own = set(RolloutArguments.__annotations__) - {"rollout_engine"}
    # A shared engine of several ranks waits for rollout_timeout, whatever its kind.
    elsewhere = {"rollout_timeout", "ray_engine"} & {*spec.reads}
    assert taken & own | elsewhere == {*spec.reads}


def test_the_config_has_the_names_of_the_table() -> None:
    assert ENGINE_NAMES == ("embedded", "vllm", "vllm_server", "ray")
    with pytest.raises(ConfigError, match="must be one of 'embedded', 'vllm', 'vllm_server'"):
        PPOConfig(output_dir="unused", rollout_engine="vlm")
    with pytest.raises(ConfigError, match="must be one of 'embedded'"):
        PPOConfig(output_dir="unused", rollout_engine="ray vllm")
    with pytest.raises(ConfigError, match="ray_engine='vlm' must be"):
        PPOConfig(output_dir="unused", rollout_engine="ray", ray_engine="vlm")


def test_penalties_reach_the_reward_source() -> None:
    subtracted = small(missing_eos_penalty=0.0).engine.reward
    assert (subtracted._subtract, subtracted._replace) == (0.0, None)
    replaced = small(non_eos_penalty=True, penalty_reward_value=-3.0).engine.reward
    assert (replaced._subtract, replaced._replace) == (0.0, -3.0)
