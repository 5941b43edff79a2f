"""Reward training with TRL: padding with the EOS token, dropout, and further columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from kedge.backends.trl.joined_pairs import JoinedPairs
from kedge.backends.trl.reward import train_reward
from kedge.testing import tiny_reward_model

from .text_toys import EOS, word_tokenizer

pytest.importorskip("trl", reason="TRL is not installed (the pipeline extra)")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
START = "w9 w10 w11 w12"
ROWS = [
    {"prompt": START, "chosen": " w5" * (i % 3 + 1), "rejected": " w8" * (i % 4)} for i in range(8)
]
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def train(
    folder: Path, model: Any, rows: Any = ROWS, *, tokenizer: Any = None, peft: Any = None, **o: Any
) -> Any:
    """The trainer after three steps."""
    from trl.trainer.reward_config import RewardConfig

    common = {"use_cpu": True, "report_to": "none", "bf16": False, "disable_tqdm": True}
    steps = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    batch = {"per_device_train_batch_size": 4, "gradient_checkpointing": False}
    every = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    config = RewardConfig(output_dir=str(folder), **(common | steps | batch | every | o))
    data = Dataset.from_list(rows)
    tokens = tokenizer or word_tokenizer()
    return train_reward(model.eval(), tokens, config, data, data.select(range(4)), peft=peft)


def losses(trainer: Any) -> list[float]:
    logs = trainer.state.log_history
    return [row[name] for row in logs for name in ("loss", "eval_loss") if name in row]


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_with_the_end_token_changes_nothing(
    family: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEDGE_CPU_KERNELS", kernels)
    expected = losses(train(tmp_path / "apart", tiny_reward_model(family, vocab_size=32)))
    assert expected[-1] < expected[0]
    for name in ("eos", "none"):
        tokenizer = word_tokenizer(pad=False)
        if name == "eos":
            tokenizer.pad_token = tokenizer.eos_token
        found = tiny_reward_model(family, vocab_size=32)
        trainer = train(tmp_path / name, found, tokenizer=tokenizer)
        assert losses(trainer) == pytest.approx(expected, rel=1e-4)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected[-1], rel=1e-4)
        assert trainer.data_collator.pad_token_id == found.config.pad_token_id == EOS
        for folder in (tmp_path / name, tmp_path / name / "checkpoint-2"):
            assert json.loads((folder / "config.json").read_text())["pad_token_id"] == EOS
            saved = json.loads((folder / "tokenizer_config.json").read_text())
            assert saved["pad_token"] == "<eos>"


@pytest.mark.parametrize("ids", [3, []])
def test_a_column_may_be_named_as_if_it_held_tokens(ids: Any, tmp_path: Path) -> None:
    rows = [row | {"annotator_ids": ids} for row in ROWS]
    expected = train(tmp_path / "without", tiny_reward_model(vocab_size=32))
    found = train(tmp_path / "with", tiny_reward_model(vocab_size=32), rows)
    assert losses(found) == losses(expected)


@pytest.mark.parametrize("kind", ["all", "residual", "adapter"])
def test_each_answer_has_a_dropout_mask(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = dict.fromkeys(NO_DROPOUT, 0.5) if kind == "all" else {"resid_pdrop": 0.5}
    rates = NO_DROPOUT | ({} if kind == "adapter" else rates)
    same = [{"chosen": START, "rejected": START}] * 8
    found = []
    for name in ("0", "1"):
        peft = None
        if kind == "adapter":
            library = pytest.importorskip("peft")
            options = {"lora_dropout": 0.5, "target_modules": ["c_attn"], "fan_in_fan_out": True}
            peft = library.LoraConfig(task_type="SEQ_CLS", r=4, **options)
        monkeypatch.setenv("KEDGE_CPU_KERNELS", name)
        model = tiny_reward_model("gpt2", vocab_size=32, **rates)
        found.append(losses(train(tmp_path / name, model, same, peft=peft, disable_dropout=False)))
    assert len(set(found[0])) > 2  # identical answers differ by dropout alone
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_dropout_that_the_configuration_disables_does_not_keep_rows_apart(tmp_path: Path) -> None:
    trainer = train(tmp_path, tiny_reward_model("gpt2", vocab_size=32))  # its rates are 0.1
    assert JoinedPairs(trainer.model).acts
