"""A policy given by name is loaded as the options say, or they say why not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kedge import GRPOConfig, GRPOTrainer
from kedge.errors import ConfigError
from kedge.models import load
from kedge.testing import tiny_policy
from kedge.trainers.assembly import setup
from kedge.trainers.assembly.models import check_reference_workers
from kedge.trainers.spec import TrainerInputs
from tests.e2e.small import VOCAB, rows
from tests.e2e.test_groups import grpo, rloo
from tests.unit.text_toys import word_tokenizer

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
