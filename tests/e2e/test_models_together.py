"""Models of one run: what fits together, what shares weights, what their files hold."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig

from kedge import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from kedge.ext.trl import classic
from kedge.ext.trl.classic import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
)
from kedge.models.value_head import ScalarHead
from kedge.records.errors import ConfigError, DataError, KedgeError
from kedge.testing import tiny_policy, tiny_reward_model
from tests.classic_models import gpt2, letters, samples, t5
from tests.e2e.small import PROMPTS, VOCAB, length_reward, rows, small
from tests.e2e.test_groups import make
from tests.unit.text_toys import EOS, bert_reward, neox_reward, word_tokenizer

LORA = {"r": 2, "target_modules": "all-linear"}


def policy(**config: Any) -> Any:
    return tiny_policy("gpt_neox", vocab_size=VOCAB, **{"eos_token_id": EOS} | config)


# -- weights that must stand still ----------------------------------------------------------------


def test_a_value_model_that_is_the_reward_model_is_refused() -> None:
    judge = neox_reward(vocab=VOCAB)
    with pytest.raises(ConfigError, match="reward_model and value_model share weights"):
        small(reward_model=judge, value_model=judge)
    trainer = small(reward_model=judge, value_model=copy.deepcopy(judge))
    before = copy.deepcopy(judge.state_dict())
    trainer.train()
    assert all(torch.equal(before[name], x) for name, x in judge.state_dict().items())


@pytest.mark.parametrize("role", ["ref_model", "reward_model"])
def test_a_backbone_that_trains_is_in_no_model_that_must_not(role: str) -> None:
    model = policy()
    other = policy() if role == "ref_model" else neox_reward(vocab=VOCAB)
    other.gpt_neox = model.gpt_neox
    if role == "reward_model":
        other.score = nn.Linear(32, 1, bias=False)
    with pytest.raises(ConfigError, match=f"{role} and model share weights"):
        small(model=model, **{role: other})


def test_layers_that_do_not_train_may_be_shared() -> None:
    model, reference = policy(), policy()
    reference.gpt_neox.embed_in = model.gpt_neox.embed_in.requires_grad_(False)
    trainer = small(model=model, ref_model=reference)
    trainer.train()
    assert rows(trainer)[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)


def frozen_adapter(base: Any, folder: Path, *, load: bool = False) -> Any:
    """A classic model with an adapter as PEFT loads it, frozen; or as its folder is loaded."""
    encodes = base.config.is_encoder_decoder
    kind = AutoModelForSeq2SeqLMWithValueHead if encodes else AutoModelForCausalLMWithValueHead
    base.save_pretrained(folder / "base")
    base.name_or_path = str(folder / "base")
    config = LoraConfig(r=2, target_modules=["q", "v"] if encodes else ["c_attn"])
    get_peft_model(copy.deepcopy(base), config).save_pretrained(folder / "adapter")
    loaded = str(folder / "adapter")
    return kind.from_pretrained(loaded if load else PeftModel.from_pretrained(base, loaded))


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*", "ignore:no dataset was given")
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("trainer", ["value model", "head", "grpo", "causal", "folder", "seq2seq"])
def test_a_policy_that_would_not_train_is_refused(
    trainer: str, unused: bool, tmp_path: Path
) -> None:
    """Also where a value model or head would, or a weight that the policy does not compute with."""
    calls = 0

    def reward(completions: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        return length_reward(completions)

    def run() -> None:
        model: Any = policy().requires_grad_(False)
        if trainer in ("causal", "folder", "seq2seq"):
            base = t5() if trainer == "seq2seq" else gpt2()
            wrapped = frozen_adapter(base, tmp_path, load=trainer == "folder")
            model = wrapped.pretrained_model
        model.unused = nn.Linear(4, 4).requires_grad_(unused)
        if trainer in ("causal", "folder", "seq2seq"):
            step = classic.PPOTrainer(
                classic.PPOConfig(batch_size=8, mini_batch_size=4), wrapped, None, letters(28)
            )
            step.step(*samples())
        elif trainer == "grpo":
            make(GRPOTrainer, GRPOConfig, model=model, reward_funcs=reward).train()
        else:
            value = neox_reward(vocab=VOCAB) if trainer == "value model" else None
            given = {"value_model": value, "reward_model": None, "reward_funcs": reward}
            small(model=model, **given).train()

    with pytest.raises(ConfigError, match=r"the policy \(\w+\) would not train"):
        run()
    assert calls == 0


# -- what checkpoints hold ------------------------------------------------------------------------


def unsaved(kind: str) -> dict[str, Any]:
    """Arguments of a trainer with one object that transformers will not save."""
    model, value, tokenizer = policy(), neox_reward(vocab=VOCAB), word_tokenizer()
    if kind == "generation":  # as the first Llama 2 had it
        model.generation_config = GenerationConfig(do_sample=False, temperature=0.6, eos_token_id=0)
    elif kind == "shared":
        first, second = model.gpt_neox.layers
        second.mlp.dense_h_to_4h.weight = first.mlp.dense_h_to_4h.weight
    elif kind == "value":
        value.config.note = object()
    else:
        tokenizer.init_kwargs["note"] = object()
    return {"model": model, "value_model": value, "processing_class": tokenizer}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("generation", "the GenerationConfig of model cannot be saved.* `temperature`"),
        ("shared", "model cannot be saved.* shared tensors .*dense_h_to_4h"),
        ("value", "the GPTNeoXConfig of value_model cannot be saved.* not JSON serializable"),
        ("tokenizer", "processing_class cannot be saved.* not JSON serializable"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_sampled(kind: str, words: str) -> None:
    calls = 0

    def reward(completions: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        return length_reward(completions)

    def run() -> None:
        made = small(**unsaved(kind), reward_model=None, reward_funcs=reward)
        made.train()
        made.save_model()

    with pytest.raises(ConfigError, match=words):
        run()
    assert calls == 0


# -- tokens and lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        (
            {"ref_model": tiny_policy("gpt_neox", vocab_size=24)},
            ConfigError,
            "the reference .* a vocabulary of 24 tokens, the policy of 32",
        ),
        (
            {"value_model": tiny_reward_model("llama", vocab_size=22)},
            ConfigError,
            "the value model .* a vocabulary of 22 tokens",
        ),
        (
            {"value_model": tiny_reward_model("gpt2", vocab_size=VOCAB, max_positions=8)},
            ConfigError,
            "response_length=6 need 10 positions; the value model .* has 8",
        ),
        (
            {"train_dataset": [*PROMPTS, {"prompt": "w3 " * 125}]},
            ConfigError,
            "the policy .* has 128. Set response_length=3 or less, or max_prompt_length=122",
        ),
        (
            {"eval_dataset": [{"prompt": "w3 " * 125}]},
            ConfigError,
            "need 131 positions; the policy",
        ),
        (
            {"train_dataset": [{"input_ids": [3, 4]}, {"input_ids": [3, 99, 5]}]},
            DataError,
            "row 1 of the dataset holds token 99, but the model's vocabulary has 32",
        ),
    ],
    ids=["reference", "value", "value positions", "prompts", "evaluation", "token"],
)
def test_what_does_not_fit_is_refused_before_anything_is_sampled(
    parts: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        small(**parts)


def test_a_token_that_only_a_wider_policy_writes_is_named() -> None:
    trainer = small(
        model=policy().requires_grad_(True),
        value_model=tiny_reward_model("llama", vocab_size=VOCAB),
        reward_model=None,
        reward_funcs=length_reward,
    )
    narrow = tiny_policy("gpt_neox", vocab_size=12)
    trainer.engine.learner.reference.model.set_input_embeddings(narrow.get_input_embeddings())
    with pytest.raises(KedgeError, match=r"row 0 holds token \d+, but .* vocabulary of 12"):
        trainer.train()


def test_a_pad_token_that_the_models_have_never_seen_is_no_obstacle() -> None:
    tokenizer = word_tokenizer(pad=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == VOCAB
    trainer, plain = small(processing_class=tokenizer), small()
    trainer.train()
    plain.train()
    assert rows(trainer)[-1]["loss/policy_avg"] == rows(plain)[-1]["loss/policy_avg"]


def test_a_float64_policy_trains_to_the_same_numbers() -> None:
    double, single = small(model=policy().double()), small()
    double.train()
    single.train()
    for name in ("objective/kl", "loss/policy_avg", "loss/value_avg", "grad_norm"):
        assert rows(double)[-1][name] == pytest.approx(rows(single)[-1][name], abs=1e-4)


# -- where the value starts -----------------------------------------------------------------------


def test_a_reward_model_with_other_tokens_is_no_start_for_the_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = word_tokenizer([f"w{i}" for i in range(31, 2, -1)])
    judge = neox_reward(vocab=VOCAB)
    trainer = small(reward_model=judge, reward_processing_class=theirs)
    assert isinstance(trainer.value_model, ScalarHead)
    assert "must use the policy's tokenizer" in caplog.text
    with pytest.raises(ConfigError, match='value_source="policy", or pass value_model'):
        small(reward_model=judge, reward_processing_class=theirs, value_source="reward")
    same = small(reward_model=judge, reward_processing_class=word_tokenizer())
    assert not isinstance(same.value_model, ScalarHead)


def test_an_encoder_judges_without_being_the_value() -> None:
    trainer = small(reward_model=bert_reward())
    assert isinstance(trainer.value_model, ScalarHead)
    assert trainer.train().global_step == 2
    with pytest.raises(ConfigError, match="must be causal, but sees later tokens; set"):
        small(reward_model=bert_reward(), value_source="reward")


# -- files ----------------------------------------------------------------------------------------


def without(folder: Path, name: str) -> str:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def test_a_model_whose_files_lack_weights_is_refused(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path / "policy")
    lame = without(tmp_path / "policy", "gpt_neox.layers.0.mlp.dense_h_to_4h.weight")
    with pytest.raises(ConfigError, match=r"lacks 1 of its weights .*dense_h_to_4h.* at random"):
        small(model=lame)
    neox_reward(vocab=VOCAB).save_pretrained(tmp_path / "judge")
    with pytest.raises(ConfigError, match=r"lacks 1 of its weights .(lm_head|embed_out)\.weight"):
        small(model=str(tmp_path / "judge"))
    headless = without(tmp_path / "judge", "score.weight")
    for role in ("reward_model", "value_model"):
        with pytest.raises(ConfigError, match=r"has no score head .*without score\.weight"):
            small(**{role: headless})


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    tiny_policy("llama", vocab_size=VOCAB, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert small(model=str(tmp_path)).train().global_step == 2


def test_a_run_goes_on_from_the_adapter_that_another_left(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path / "base")
    first = small(
        model=str(tmp_path / "base"),
        peft_config=LoraConfig(**LORA),
        output_dir=str(tmp_path / "first"),
        learning_rate=0.05,
    )
    first.train()
    first.save_model()
    second = small(model=str(tmp_path / "first"))
    assert isinstance(second.model, PeftModel)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(first.model(ids).logits, second.model(ids).logits)
    trained = [name for name, p in second.model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    second.train()
    assert rows(second)[0]["objective/kl2"] < 1e-10  # from where it starts
    assert rows(second)[0]["val/ratio"] == pytest.approx(1.0, abs=0.2)


VALUE_ADAPTER = {"value_adapter": True, "reward_model": None, "reward_funcs": length_reward}
GRPO, RLOO = (
    partial(make, GRPOTrainer, GRPOConfig, beta=0.1),
    partial(make, RLOOTrainer, RLOOConfig),
)


def trained_adapter(**options: Any) -> Any:
    """A policy that is far from its base, as after SFT with LoRA."""
    model: Any = get_peft_model(policy(), LoraConfig(**LORA | options))
    for name, p in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (small, {}),
        (partial(small, **VALUE_ADAPTER), {}),
        (GRPO, {}),
        (RLOO, {}),
        (RLOO, {"modules_to_save": ["embed_out"], "target_modules": ["query_key_value"]}),
        (RLOO, {"bias": "all"}),  # the reference is a copy of its own
    ],
    ids=["ppo", "value adapter", "grpo", "rloo", "saved modules", "biases"],
)
def test_the_reference_of_a_trained_adapter_is_that_adapter(
    build: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    adapted = trained_adapter(**options)
    before = adapted.state_dict()
    trainer = build(model=copy.deepcopy(adapted), **sizes)
    trainer.train()
    kl = [row["objective/kl2"] for row in rows(trainer)]
    assert kl[0] < 1e-10  # rounding of float32
    assert kl[1] > 1e-6
    saved = [file.name for file in tmp_path.rglob("kedge_reference*")]
    assert saved == []
    copies = {n: p for n, p in trainer.model.named_parameters() if "kedge_reference" in n}
    assert bool(copies) == ("bias" not in options)
    for name, p in copies.items():
        assert torch.equal(p, before[name.replace("kedge_reference", "default")])
    resumed = build(model=adapted, **sizes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert rows(resumed)[1]["objective/kl2"] == kl[1]


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # peft 0.18
def test_an_adapter_of_a_base_without_a_name_says_what_to_do(tmp_path: Path) -> None:
    get_peft_model(policy(), LoraConfig(**LORA)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="without base_model_name_or_path"):
        small(model=str(tmp_path))
