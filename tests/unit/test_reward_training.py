"""Reward training with TRL: padding with the EOS token, dropout, and further columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from kedge.pretrain.reward import train_reward
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


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_with_the_end_token_changes_nothing(family: str, tmp_path: Path) -> None:
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
