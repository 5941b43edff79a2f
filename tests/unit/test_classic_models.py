"""Value-head models: making, saving, loading, sharing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kedge.ext.trl.classic import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ValueHead,
    create_reference_model,
)
from tests.classic_models import bart, gpt2, letters, lora, samples, t5

CAUSAL, SEQ2SEQ = AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 2]])


def said(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    model.eval()
    with torch.no_grad():
        extra = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
        logits, _, values = model(input_ids=IDS, **extra)
    return logits, values


@pytest.mark.parametrize(("make", "kind"), [(gpt2, CAUSAL), (t5, SEQ2SEQ), (bart, SEQ2SEQ)])
def test_save_and_load(make: Any, kind: Any, tmp_path: Path) -> None:
    model = kind.from_pretrained(make())
    want = said(model)
    assert want[0].shape == (2, 4, 28)
    assert want[1].shape == (2, 4)
    model.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"model.safetensors", "value_head.safetensors"}
    again = kind.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(said(again), want, strict=True))
    assert not torch.equal(said(kind.from_pretrained(make(1)))[1], want[1])


def test_keys_and_values_on_request() -> None:
    model = CAUSAL.from_pretrained(gpt2()).eval()
    *_, cache = model(input_ids=IDS[:, :3], return_past_key_values=True)
    logits, _, values = model(input_ids=IDS[:, 3:], past_key_values=cache)
    torch.testing.assert_close(logits[:, 0], said(model)[0][:, 3])
    torch.testing.assert_close(values[:, 0], said(model)[1][:, 3])


def test_initialization() -> None:
    class Config:
        hidden_size = 4096

    def head(**options: Any) -> Any:
        return ValueHead(Config(), **options).requires_grad_(False).summary

    torch.manual_seed(0)
    assert float(head().weight.abs().max()) <= 4096**-0.5
    assert float(head().weight.std()) == pytest.approx(4096**-0.5 / 3**0.5, rel=0.05)
    normal = head(v_head_init_strategy="normal", v_head_initializer_range=0.5)
    assert float(normal.weight.std()) == pytest.approx(0.5, rel=0.05)
    assert float(normal.bias) == 0.0
    default = head(v_head_init_strategy="normal")
    assert float(default.weight.std()) == pytest.approx(0.2, rel=0.05)
    with pytest.raises(
        ValueError, match="v_head_init_strategy must be \"normal\" or None, got 'zero'"
    ):
        ValueHead(Config(), v_head_init_strategy="zero")


def test_dropout_acts_in_training_alone() -> None:
    model = CAUSAL.from_pretrained(gpt2(), summary_dropout_prob=0.9)
    hidden = torch.ones(1, 32)
    model.eval()
    assert torch.equal(model.v_head(hidden), model.v_head(hidden))
    model.train()
    assert len({float(model.v_head(hidden).detach()) for _ in range(8)}) > 1
    own = gpt2()
    own.config.summary_dropout_prob = 0.3
    assert CAUSAL.from_pretrained(own, summary_dropout_prob=0.9).v_head.dropout.p == 0.3


def written_by_trl(model: Any, folder: Path, how: str) -> None:
    """The layouts in which TRL has saved models: one file with the head's entries among all."""
    model.pretrained_model.save_pretrained(folder)
    tensors = {k: v.contiguous().clone() for k, v in model.state_dict().items()}
    tensors.pop("lm_head.weight", None)
    if how == "safetensors":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif how == "head alone":  # of a PEFT model
        torch.save(
            {k: v for k, v in tensors.items() if "v_head" in k}, folder / "pytorch_model.bin"
        )
    elif how == "shards":
        held = {"a.safetensors": {}, "b.safetensors": {}}
        where = {}
        for k, v in tensors.items():
            name = "b.safetensors" if k.startswith("v_head") else "a.safetensors"
            held[name][k], where[k] = v, name
        (folder / "model.safetensors").unlink()
        for name, x in held.items():
            save_file(x, folder / name, metadata={"format": "pt"})
        import json

        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("how", ["safetensors", "head alone", "shards", "LLaMA-Factory"])
def test_reads_what_others_wrote(how: str, tmp_path: Path) -> None:
    model = CAUSAL.from_pretrained(gpt2())
    written_by_trl(model, tmp_path, how)
    if how == "LLaMA-Factory":  # the head alone in a file of Kedge's name, under TRL's names
        head = {f"v_head.{k}": v for k, v in model.v_head.state_dict().items()}
        save_file(head, tmp_path / "value_head.safetensors")
    again = CAUSAL.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(said(again), said(model), strict=True))


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


def test_a_pickle_of_objects_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gpt2().save_pretrained("model")
    with Path("model/pytorch_model.bin").open("wb") as file:
        pickle.dump({"v_head.summary.weight": Bomb()}, file)
    with pytest.raises(ValueError, match=r"other than tensors|cannot be read"):
        CAUSAL.from_pretrained("model")
    torch.save({"v_head.summary.weight": Bomb()}, "model/pytorch_model.bin")
    with pytest.raises(ValueError, match="contains objects other than tensors"):
        CAUSAL.from_pretrained("model")
    assert not Path("exploded").exists()


def test_weights_load_in_float32_unless_told(tmp_path: Path) -> None:
    gpt2().to(torch.bfloat16).save_pretrained(tmp_path)
    assert CAUSAL.from_pretrained(tmp_path).pretrained_model.dtype == torch.float32
    half = CAUSAL.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.pretrained_model.dtype == torch.bfloat16
    logits, values = said(half)
    assert logits.dtype == values.dtype == torch.float32


def test_state_dict_round_trip(tmp_path: Path) -> None:
    model, other = CAUSAL.from_pretrained(gpt2(0)), CAUSAL.from_pretrained(gpt2(1))
    state = model.state_dict()
    assert "transformer.wte.weight" in state
    assert "v_head.summary.weight" in state
    assert "lm_head.weight" not in state  # tied to transformer.wte
    save_file(state, tmp_path / "model.safetensors")  # no tensor shares memory with another
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(said(other), said(model), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_adapter": "x"}, "reward_adapter shares the policy's frozen base"),
        ({"peft_config": {"r": 4}}, "peft_config must be a peft.PeftConfig"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "choose one of load_in_8bit"),
    ],
    ids=str,
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CAUSAL.from_pretrained(gpt2(), **options)


def test_a_model_without_language_head() -> None:
    from transformers import GPT2Model

    with pytest.raises(ValueError, match="GPT2Model has no language-model head; load it with"):
        CAUSAL(GPT2Model(gpt2().config))


def test_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    gpt2().save_pretrained(tmp_path / "base")
    model = CAUSAL.from_pretrained(tmp_path / "base", peft_config=lora())
    assert model.is_peft_model
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad} == {
        "pretrained_model",
        "v_head",
    }
    assert set(model.state_dict()) == {"v_head.summary.weight", "v_head.summary.bias"}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    want = said(model)
    model.save_pretrained(tmp_path / "made")
    assert not (tmp_path / "made" / "model.safetensors").exists()
    again = CAUSAL.from_pretrained(tmp_path / "made")
    assert all(torch.equal(a, b) for a, b in zip(said(again), want, strict=True))
    assert not any(p.requires_grad for p in again.pretrained_model.parameters())
    trains = CAUSAL.from_pretrained(tmp_path / "made", is_trainable=True)
    assert any(p.requires_grad for p in trains.pretrained_model.parameters())
    with pytest.raises(ValueError, match="is already an adapter"):
        CAUSAL.from_pretrained(tmp_path / "made", peft_config=lora())
    with pytest.raises(ValueError, match="a PEFT model needs no reference model"):
        create_reference_model(again)


def reward_adapter(folder: Path) -> Any:
    """An adapter with a score head on the model of ``gpt2()``; the whole model, to compare with."""
    from peft import get_peft_model
    from transformers import GPT2ForSequenceClassification

    base = GPT2ForSequenceClassification(gpt2().config)
    base.transformer.load_state_dict(gpt2().transformer.state_dict())
    made = get_peft_model(base, lora(task_type="SEQ_CLS"))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.5)
    made.save_pretrained(folder)
    return made.eval()


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_reward_adapter(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    judge = reward_adapter(tmp_path / "reward")
    model = CAUSAL.from_pretrained(
        gpt2(), peft_config=lora(), reward_adapter=str(tmp_path / "reward")
    )
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert not [n for n in trained if "reward_adapter" in n]
    before = said(model)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    scores = model.compute_reward_score(IDS, mask)
    with torch.no_grad():
        backbone = judge.get_base_model().transformer(IDS, attention_mask=mask).last_hidden_state
        want = judge.get_base_model().score(backbone)
    assert scores.shape == (2, 4, want.shape[-1])
    torch.testing.assert_close(scores, want)
    assert all(torch.equal(a, b) for a, b in zip(said(model), before, strict=True))
    assert [n for n, p in model.named_parameters() if p.requires_grad] == trained
    with pytest.raises(ValueError, match="has no reward adapter"):
        CAUSAL.from_pretrained(gpt2()).compute_reward_score(IDS)


@pytest.mark.parametrize(("make", "kind"), [(gpt2, CAUSAL), (bart, SEQ2SEQ)])
def test_shared_layers_are_the_same_tensors(make: Any, kind: Any) -> None:
    model = kind.from_pretrained(make())
    ref = create_reference_model(model, num_shared_layers=1)
    own = dict(model.named_parameters(remove_duplicate=False))
    theirs = dict(ref.named_parameters(remove_duplicate=False))
    shared = {n for n, p in theirs.items() if p is own[n]}
    decoder, second = "h.0.", "h.1."
    if make is bart:
        decoder, second = "decoder.layers.0.", "decoder.layers.1."
    assert any(decoder in n for n in shared)
    assert not any(n.startswith("v_head") or second in n for n in shared)
    for name, p in own.items():
        assert p.requires_grad == (name not in shared)
        assert not theirs[name].requires_grad
    copied = [p for n, p in theirs.items() if n not in shared]
    assert all(p.data_ptr() not in {q.data_ptr() for q in own.values()} for p in copied)


def test_shared_layers_that_are_not_there() -> None:
    model = CAUSAL.from_pretrained(gpt2())
    with pytest.raises(ValueError, match="num_shared_layers must be 0 to 1 for the 2 layers"):
        create_reference_model(model, num_shared_layers=2)
    with pytest.raises(ValueError, match="matches none of"):
        create_reference_model(SEQ2SEQ.from_pretrained(strange()), num_shared_layers=1)


def strange() -> Any:
    model = t5()
    model.decoder.blocks = model.decoder.block
    del model.decoder.block
    return model


@pytest.mark.filterwarnings("ignore::UserWarning:bitsandbytes")
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_bases_train_their_adapters(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="8- and 4-bit bases need bitsandbytes")
    from peft import LoraConfig

    from kedge.ext.trl.classic import PPOConfig, PPOTrainer
    from kedge.testing import tiny_policy

    tiny_policy("llama", vocab_size=28, hidden_size=64, heads=2).save_pretrained(tmp_path)
    lora_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = CAUSAL.from_pretrained(
        tmp_path, peft_config=lora_config, **{f"load_in_{bits}bit": True}
    )
    assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (bits == 8, bits == 4)
    config = PPOConfig(batch_size=8, mini_batch_size=4, learning_rate=1e-2, ppo_epochs=2)
    trainer = PPOTrainer(config, model, tokenizer=letters(28))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_B" in n}
    trainer.generate(samples()[0], max_new_tokens=2)
    trainer.step(*samples())
    for name, p in model.named_parameters():
        assert name not in before or not torch.equal(p, before[name]), name
