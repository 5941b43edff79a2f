"""Assembly of a trainer: invalid inputs, loading, wiring, plug-ins, warnings about settings."""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kedge import (
    AsyncPPOConfig,
    GRPOConfig,
    PPOConfig,
    PPOTrainer,
    RLOOConfig,
    algorithms,
)
from kedge.algorithms import Algorithm, ppo, reinforce_pp
from kedge.config.algorithms import RECIPES
from kedge.config.rollout_engines import EMBEDDED, RolloutArguments
from kedge.ext.ray.specs import ENGINES
from kedge.ext.vllm.specs import IN_PROCESS, REMOTE, SERVERS
from kedge.learner.models import ModelOptions, check_models
from kedge.models import load
from kedge.records.errors import ConfigError, KedgeError, PreflightError, RewardError, RolloutError
from kedge.records.types import Loss, MicroBatch, PolicyOutput, RewardOutput
from kedge.testing import ScriptedRollouts, tiny_policy
from kedge.trainers import load_trainer
from kedge.trainers.advice import LARGE, SETTINGS, Settings, apply
from tests.e2e.small import VOCAB, length_reward, rows, small
from tests.e2e.test_groups import grpo, rloo
from tests.unit.text_toys import word_tokenizer

POLICY = tiny_policy("gpt_neox", vocab_size=VOCAB)
ENDLESS = {
    "model": tiny_policy("gpt_neox", vocab_size=VOCAB, eos_token_id=None),
    "processing_class": word_tokenizer(eos=False),
}
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
    (
        small,
        {"batch_size": 5},
        "5 must be 4, as the other sizes imply (per_device_train_batch_size=",
    ),
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
    (small, {**ENDLESS, "missing_eos_penalty": 1.0}, "neither the tokenizer nor the model's gener"),
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
        monkeypatch.setattr(f"kedge.learner.models.{name}", load)
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
def test_every_parameter_of_an_algorithm_is_set_by_its_trainer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_trainer(kind).SPEC
    module, real = sys.modules[spec.algorithm.__module__], getattr(algorithms, kind)
    seen: set[str] = set()
    monkeypatch.setattr(module, kind, lambda **options: seen.update(options) or real(**options))
    spec.algorithm(spec.config(output_dir="unused", use_cpu=True), None)
    assert seen == {*inspect.signature(real).parameters}


def test_unset_options_follow_others() -> None:
    made = small(learning_rate=1e-3, max_grad_norm=0.0, seed=3)
    settings = made.engine.learner.settings
    assert (settings.value_learning_rate, settings.max_grad_norm) == (1e-3, math.inf)
    assert made.engine.source._seed == 3
    made = small(learning_rate=1e-3, value_learning_rate=0.0, seed=3, data_seed=0)
    assert made.engine.learner.settings.value_learning_rate == 0.0
    assert made.engine.source._seed == 0


@pytest.mark.parametrize("spec", [EMBEDDED, IN_PROCESS, SERVERS, REMOTE, *ENGINES.values()])
def test_an_engine_reads_the_options_that_its_builder_takes(spec: Any) -> None:
    own = {*RolloutArguments.__annotations__} - {"rollout_engine"}
    own -= {name for name in own if name.startswith(("ray_reward", "ray_ref"))}
    if spec is REMOTE:  # decided where the server was started
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
    with pytest.raises(ConfigError, match="'embedded', 'ray', 'vllm', 'vllm_server'"):
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
    assert make(model=folder).model.config._attn_implementation == "kedge"
    kl = {"kl_coef" if make is rloo else "beta": 0.1}
    made = make(model=folder, ref_model=folder, **kl, model_init_kwargs=given)
    assert made.model.config._attn_implementation == "eager"
    assert made.engine.learner.reference.model.config._attn_implementation == "eager"
    made.train()
    assert len(rows(made)) == 2


@BOTH
def test_everything_of_from_pretrained_is_handed_on(
    make: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    real, tokenizer = load.load_whole, load.load_tokenizer

    def spy(kind: Any, what: str, source: str, **options: Any) -> Any:
        seen.update(options)
        return real(kind, what, source, dtype="float32")

    def tokens(name: str, *, trust_remote_code: bool, revision: str | None) -> Any:
        seen["tokenizer"] = revision
        return tokenizer(name, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(load, "load_whole", spy)
    monkeypatch.setattr(load, "load_tokenizer", tokens)
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
    def check(**kwargs: Any) -> None:
        loading = load.policy_loading("policy", kwargs, quantization=None, adapts=False, bf16=False)
        given = {"loading": loading, "bf16": False, "tokenizer": None, "needs_reference": True}
        check_models(ModelOptions(policy="policy", ref_model="base", ref_workers=1, **given))

    check()
    with pytest.raises(ConfigError, match="without model_init_kwargs"):
        check(dtype="float32")


@dataclass
class Sized:
    """A module's parameters, without their memory."""

    trained: int
    frozen: int = 0

    def parameters(self):
        sizes = ((self.trained, True), (self.frozen, False))
        return [
            nn.Parameter(torch.empty(n, device="meta"), requires_grad=grad) for n, grad in sizes
        ]


def given(config, *, trained=LARGE, frozen=0, batch_size=512, iterations=9, plays=False, **options):
    args = config(output_dir=None, use_cpu=True, **options)
    sizes = SimpleNamespace(batch_size=batch_size, iterations=iterations)
    return " | ".join(apply(SETTINGS, Settings(args, Sized(trained, frozen), sizes, plays=plays)))


@pytest.mark.parametrize("native", [True, False])
def test_a_run_in_slow_bf16_says_so(monkeypatch, native):
    monkeypatch.setattr("kedge.ext.cpu.matmul.multiplies_bf16", lambda: native)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert ("bf16 on this processor" in given(PPOConfig, bf16=True)) == (not native)
    assert "bf16" not in given(PPOConfig)


def test_the_default_learning_rate_of_ppo_is_high_for_a_large_model():
    text = given(PPOConfig)
    assert "learning_rate=5e-05 with num_ppo_epochs=4 is high for 300 million" in text
    assert "learning_rate=3e-6 (Huang et al. 2024, arXiv:2403.17031); `kedge init`" in text
    assert "3e-6" in given(RLOOConfig)
    assert given(PPOConfig, learning_rate=3e-6) == ""
    assert given(PPOConfig, num_ppo_epochs=1) == ""
    text = given(PPOConfig, trained=135_000_000)
    assert "is high for 135 million trained weights; recommended: learning_rate=1e-5;" in text
    assert given(PPOConfig, trained=135_000_000, learning_rate=2e-5) == ""
    assert given(PPOConfig, trained=10**8 - 1) == ""
    assert given(PPOConfig, trained=10**6, frozen=LARGE) == ""  # an adapter


def test_large_models_in_environments_are_told_of_the_recipe():
    text = given(PPOConfig, plays=True)
    assert text.startswith("defaults suit single responses rather than episodes; recommended: ")
    found = re.findall(r"(\w+)=([\w.-]+), ", text)
    other = RECIPES["agent"].keys() - {"value_source", "cliprange", "gamma"}
    assert dict(found) == {n: str(RECIPES["agent"][n]) for n in other}
    assert "kl_coef=0.0, temperature=1.0, which PPOConfig.recipe('agent')" in text
    text = given(AsyncPPOConfig, plays=True, rollout_engine="embedded")
    assert " lam=1.0" in text
    assert " learning_rate" not in text  # 1e-6 is its default
    most = {"learning_rate": 3e-5, "kl_coef": 0.01, "temperature": 0.9, "num_ppo_epochs": 2}
    assert "num_mini_batches=4, value_learning_rate=1e-05" in given(PPOConfig, plays=True, **most)
    assert "is high for 300 million" in given(PPOConfig, plays=True, lam=0.9, **most)
    assert given(PPOConfig, plays=True, **RECIPES["agent"]) == ""
    assert given(PPOConfig, plays=True, trained=LARGE - 1, num_ppo_epochs=1) == ""
    assert given(GRPOConfig, plays=True) == ""


def test_a_batch_of_eight_is_small_for_a_large_model():
    text = given(PPOConfig, learning_rate=3e-6, batch_size=8)
    assert text.startswith("an iteration has 8 responses")
    assert "512" in text
    assert given(PPOConfig, trained=10**6, batch_size=8) == ""
    assert given(PPOConfig, learning_rate=3e-6, batch_size=17) == ""


def test_a_learning_rate_of_one_is_too_high_for_any_model():
    assert "learning_rate=1 is far too high" in given(PPOConfig, learning_rate=1.0, trained=10)
    assert given(PPOConfig, learning_rate=1e-2, trained=10) == ""


def test_episodes_that_do_not_fill_the_last_batch_are_named():
    text = given(PPOConfig, total_episodes=4, batch_size=8, trained=10)
    assert (
        text == "total_episodes=4 is not a multiple of the 8 responses of an iteration: the"
        " run has 8"
    )
    assert given(PPOConfig, total_episodes=16, batch_size=8, trained=10) == ""


@pytest.mark.filterwarnings("ignore")
def test_the_clip_of_gspo():
    assert given(GRPOConfig) == ""
    sequence = {"importance_sampling_level": "sequence", "loss_type": "grpo", "trained": 10}
    text = given(GRPOConfig, **sequence)
    assert "epsilon=0.2 with importance_sampling_level='sequence' hardly ever clips" in text
    assert "epsilon=3e-4, epsilon_high=4e-4" in text
    assert given(GRPOConfig, **sequence, epsilon=3e-4, epsilon_high=4e-4) == ""


def test_a_warmup_of_the_value_that_never_ends():
    text = given(PPOConfig, value_warmup_steps=9, trained=10)
    assert text.startswith("value_warmup_steps=9 covers all 9 iterations")
    assert given(PPOConfig, value_warmup_steps=8, trained=10) == ""


def test_a_trainer_says_it_once(caplog, monkeypatch):
    monkeypatch.setattr("kedge.trainers.advice.LARGE", 1)
    with caplog.at_level(logging.WARNING):
        trainer = small(max_steps=2)
        trainer.train()
    texts = [r.getMessage() for r in caplog.records if "recommended:" in r.getMessage()]
    assert [text.split()[0] for text in texts] == ["learning_rate=0.003", "an"]
    caplog.clear()
    monkeypatch.undo()
    small()
    assert not [r for r in caplog.records if "recommended:" in r.getMessage()]


def test_the_first_iteration_is_reported_whatever_is_logged(tmp_path, capsys, caplog):
    rate = {"learning_rate": 0.3, "num_ppo_epochs": 4, "save_strategy": "steps", "save_steps": 4}
    options = {"output_dir": str(tmp_path), "total_episodes": 12, "logging_steps": 10} | rate
    small(**options).train()
    lines = capsys.readouterr().out.splitlines()
    sizes = "kedge: preflight passed; 3 iterations of 4 responses, 4 optimizer steps each"
    assert f"{sizes}; no checkpoint before the end (save_steps=4)" in lines
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/3", "3/3"]
    (warning,) = [r.getMessage() for r in caplog.records if "first iteration" in r.getMessage()]
    assert int(warning.split("clipped ")[1].split("%")[0]) >= 25
    assert "lower learning_rate=0.3, or num_ppo_epochs=4" in warning
    small(total_episodes=4, logging_steps=10).train()
    assert capsys.readouterr().out.count("step 1/1 ") == 1
    unscored = {"total_episodes": 4, "num_ppo_epochs": 1, "reward_model": None}
    small(**unscored, reward_funcs=lambda completions, **_: [None] * len(completions)).train()
    assert "kedge: 1 iteration of 4 responses, 1 optimizer step each\n" in capsys.readouterr().out
    small(**options).train(resume_from_checkpoint=True)
    out = capsys.readouterr().out
    assert "(iteration 3 of 3); nothing is left to train\n" in out


def rule(**changes: Any) -> Algorithm:
    return replace(reinforce_pp(), name="mine", **changes)


def credited(change: Callable[[Any], Any]) -> Algorithm:
    return rule(
        compute_advantages=lambda e, kl_coef: change(reinforce_pp().compute_advantages(e, kl_coef))
    )


def averaged(new: PolicyOutput, mb: MicroBatch) -> Loss:
    """The usual slip: a mean, where a weighted sum is asked for."""
    ratio = ((new.logprobs - mb.rows.old_logprobs) * mb.rows.loss_mask).exp()
    return Loss(parts={"policy": -(ratio * mb.rows.advantages).mean()})


def rounded(new: PolicyOutput, mb: MicroBatch) -> Loss:
    """A sound loss, and rounding errors that depend on the rows of a pass."""
    parts = reinforce_pp().loss(new, mb).parts
    return Loss(parts=parts | {"rounding": torch.tensor(1e-5 * (len(mb.rows) < 4))})


def equal_scores(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


class Says:
    def __init__(self, found: Any) -> None:
        self.found = found

    def score(self, rollout: Any) -> Any:
        return self.found(len(rollout))


def judged(scores: int, valid: int) -> Says:
    return Says(
        lambda rows: RewardOutput(
            scores=torch.zeros(rows + scores), valid=torch.ones(rows + valid, dtype=torch.bool)
        )
    )


calls: list[int] = []


def late_nan(rows: int) -> RewardOutput:
    calls.append(rows)
    scores = torch.arange(rows).float()
    scores[1] = torch.nan if len(calls) > 1 else 1.0
    return RewardOutput(scores=scores, valid=torch.ones(rows, dtype=torch.bool))


CASES: dict[str, tuple[dict[str, Any], type[KedgeError], str]] = {
    "a number per response as advantages": (
        {"algorithm": credited(lambda c: replace(c, advantages=c.advantages[:, 0]))},
        ConfigError,
        r"advantages from compute_advantages of mine must .* shape \(4, \d\), got \(4,\);",
    ),
    "returns of one column": (
        {"algorithm": credited(lambda c: replace(c, returns=c.advantages[:, :1]))},
        ConfigError,
        r"returns from compute_advantages of mine must .*, got \(4, 1\)",
    ),
    "advantages that are NaN": (
        {"algorithm": credited(lambda c: replace(c, advantages=c.advantages * torch.nan))},
        ConfigError,
        "compute_advantages of mine returned advantages that are not finite",
    ),
    "a loss that is a mean": (
        {"algorithm": rule(loss=averaged)},
        PreflightError,
        "loss of mine is .* for 4 rows and .* in two micro-batches.*without a mean",
    ),
    "a mean, where all scores are equal": (
        {"algorithm": rule(loss=averaged), "reward_model": None, "reward_funcs": equal_scores},
        PreflightError,
        "loss of mine is .* for 4 rows and .* in two micro-batches.*without a mean",
    ),
    "a loss that overflows": (
        {"algorithm": rule(loss=lambda new, mb: Loss(parts={"policy": new.logprobs.sum() / 0}))},
        PreflightError,
        "the loss of mine is -inf for 4 rows .* or divides by zero",
    ),
    "scores whose squares overflow": (
        {"reward_model": None, "reward_funcs": lambda completions: [1e38] * len(completions)},
        PreflightError,
        r"got 1e\+38 for row 0. Scale the rewards down",
    ),
    "a source that gives a list": (
        {"reward_model": None, "reward_funcs": Says(lambda rows: [1.0] * rows)},
        RewardError,
        "Says.score must return a kedge.records.types.RewardOutput, got list",
    ),
    "scores for other rows": (
        {"reward_model": None, "reward_funcs": judged(-2, 0)},
        RewardError,
        r"scores of shape \(2,\) and valid of shape \(4,\) for 4 responses",
    ),
    "a score that is NaN, after the first batch": (
        {"reward_model": None, "reward_funcs": Says(late_nan)},
        RewardError,
        "rewards must be finite, got nan for row 1",
    ),
    "responses without a token": (
        {"rollout_engine": ScriptedRollouts([[[], [], [], []]])},
        RolloutError,
        "ScriptedRollouts.generate returned responses without tokens",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_slip_is_named(name: str) -> None:
    parts, kind, words = CASES[name]
    calls.clear()
    with pytest.raises(kind, match=words):
        small(**parts).train()


def test_rounding_does_not_stop_a_run_whose_first_scores_are_equal() -> None:
    """In bf16 a group of equal scores leaves the loss of GRPO nothing but rounding errors."""
    parts = {"reward_model": None, "reward_funcs": equal_scores, "kl_coef": 0.0}
    small(algorithm=rule(loss=rounded), **parts).train()


def test_numbers_at_the_edge_of_their_ranges_train() -> None:
    trainer = small(
        **{"cliprange": 2**64, "cliprange_value": math.inf, "vf_coef": 0, "lam_alpha": 2**64},
        **{"gamma": 0, "lam_value": 0, "kl_coef": 0, "adam_beta1": 0, "adam_beta2": 0},
        **{"max_grad_norm": math.inf, "num_train_epochs": 0.5, "eval_delay": 2**53},
        **{"warmup_steps": 2**53, "stop_strings": ["\N{CHESTNUT}"]},
    )
    trainer.train()
    assert trainer.state.global_step == 2
