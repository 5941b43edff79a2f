"""From a trainer's arguments to a run: what is refused first, loaded, and handed to each part."""

from __future__ import annotations

import inspect
import math
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kedge import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from kedge.algorithms import ppo
from kedge.config.rollout_engines import RAY_ENGINES, ROLLOUT_ENGINES, RolloutArguments
from kedge.errors import ConfigError, KedgeError
from kedge.models import load
from kedge.testing import ScriptedRollouts, tiny_policy
from kedge.trainers import load_trainer
from kedge.trainers.assembly import setup
from kedge.trainers.assembly.models import check_reference_workers
from kedge.trainers.spec import TrainerInputs, shared_kwargs
from tests.e2e.small import VOCAB, length_reward, rows, small
from tests.e2e.test_groups import grpo, rloo
from tests.unit.text_toys import word_tokenizer

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
    (
        small,
        {**AS_COMPLETED, "num_partial_batches": 3},
        "must divide the 4 prompts of a rank; valid values: 1, 2, 4",
    ),
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


@pytest.mark.parametrize("spec", [*ROLLOUT_ENGINES.values(), *RAY_ENGINES.values()])
def test_an_engine_reads_the_options_that_its_builder_takes(spec: Any) -> None:
    own = {*RolloutArguments.__annotations__} - {"rollout_engine"}
    own -= {name for name in own if name.startswith(("ray_reward", "ray_ref"))}
    if spec is ROLLOUT_ENGINES["http://"]:  # decided where the server was started
        own -= {"vllm_engine_args", "vllm_tensor_parallel_size", "vllm_sleep"}
    elsewhere = {"ray_engine"} & {*spec.reads}
    assert options_read(resolve_name(spec.build)) & own | elsewhere == {*spec.reads}


def options_read(function: Any) -> set[str]:
    """The options that a function reads, or one that it passes the config to."""
    source, module = inspect.getsource(function), sys.modules[function.__module__]
    called = re.findall(r"(\w+)(?:\.of)?\((?:[^()]*, )?args[,)]", " ".join(source.split()))
    inner = [getattr(module, name) for name in called if hasattr(module, name)]
    read = {*re.findall(r"\bargs\.(\w+)", source)}
    return read.union(*(options_read(each) for each in inner if each is not function))


def test_the_config_has_the_names_of_the_table() -> None:
    with pytest.raises(ConfigError, match="'embedded', 'vllm', 'vllm_server', 'ray'"):
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


BOTH = pytest.mark.parametrize("make", [rloo, grpo])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny_policy("llama", vocab_size=VOCAB).save_pretrained(tmp_path / "policy")
    word_tokenizer().save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])


@BOTH
@pytest.mark.parametrize(
    "given", ['{"attn_implementation": "eager"}', {"attn_implementation": "eager"}]
)
def test_model_init_kwargs_reach_the_model(make: Any, folder: str, given: Any) -> None:
    assert make(model=folder).model.config._attn_implementation == "sdpa"
    made = make(model=folder, ref_model=folder, beta=0.1, model_init_kwargs=given)
    assert made.model.config._attn_implementation == "eager"
    assert made.engine.learner.reference.model.config._attn_implementation == "eager"
    made.train()
    assert len(rows(made)) == 2


@BOTH
def test_everything_of_from_pretrained_is_handed_on(
    make: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    real, tokenizer = load.load_whole, setup.load_tokenizer

    def spy(kind: Any, what: str, source: str, **options: Any) -> Any:
        seen.update(options)
        return real(kind, what, source, dtype="float32")

    def tokens(name: str, *, trust_remote_code: bool, revision: str | None) -> Any:
        seen["tokenizer"] = revision
        return tokenizer(name, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(load, "load_whole", spy)
    monkeypatch.setattr(setup, "load_tokenizer", tokens)
    wanted = {"revision": "v2", "torch_dtype": "float32", "low_cpu_mem_usage": True}
    make(model=folder, processing_class=None, model_init_kwargs=wanted)
    assert seen == {
        **{"revision": "v2", "dtype": "float32", "low_cpu_mem_usage": True, "tokenizer": "v2"},
        **{"use_safetensors": True, "trust_remote_code": False},
    }


@BOTH
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"model_init_kwargs": {"revision": "v2"}, "model": None},
            "revision cannot be set .*the model is already loaded",
        ),
        ({"model_init_kwargs": {"device_map": "auto"}}, "device_map='auto': accelerate places"),
        (
            {"model_init_kwargs": {"use_safetensors": False}},
            "pickled weights can run arbitrary code",
        ),
        ({"model_init_kwargs": "[1]"}, "must be a dictionary"),
        ({"model_init_kwargs": "{"}, "must be a dictionary"),
        ({"quantization_config": object()}, "freezes the weights; pass a peft_config"),
        ({"quantization_config": object(), "model": None}, "the model is already loaded"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_nothing_would_read_is_refused(
    make: Any, folder: str, options: dict[str, Any], said: str
) -> None:
    given = {"model": folder} | options
    if given["model"] is None:
        given["model"] = tiny_policy("llama", vocab_size=VOCAB)
    with pytest.raises(ConfigError, match=said):
        make(**given)


@BOTH
def test_a_quantized_base_is_loaded_for_an_adapter(make: Any, folder: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float32")
    made = make(model=folder, quantization_config=how, peft_config=lora())
    assert made.model.is_loaded_in_4bit
    before = {n: p.clone() for n, p in made.model.named_parameters() if p.requires_grad}
    made.train()
    after = dict(made.model.named_parameters())
    assert any(not torch.equal(x, after[n]) for n, x in before.items())


def test_workers_on_ray_take_a_reference_by_name_without_options_for_loading() -> None:
    algorithm: Any = SimpleNamespace(needs_reference=True, needs_full_kl=False)

    def check(**options: Any) -> None:
        args = GRPOConfig(output_dir="unused", beta=0.1, use_cpu=True, **options)
        inputs = TrainerInputs(spec=GRPOTrainer.SPEC, args=args, model="policy", ref_model="base")
        check_reference_workers(
            SimpleNamespace(
                inputs=inputs, args=args, algorithm=algorithm, loading=setup.loading_options(inputs)
            )
        )

    check()
    with pytest.raises(ConfigError, match="without model_init_kwargs"):
        check(model_init_kwargs={"dtype": "float32"})
