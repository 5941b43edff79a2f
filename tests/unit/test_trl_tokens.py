"""Texts tokenized in batches are what TRL makes of them row by row."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from kedge.backends.trl import tokenize
from kedge.testing import tiny_policy, tiny_reward_model

from .text_toys import word_tokenizer

pytest.importorskip("trl", reason="TRL is not installed (the pipeline extra)")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TEXTS = [{"prompt": f"w{i} w4", "completion": " w5" * (i % 3 + 1)} for i in range(7, 19)]
PAIRS = [{"prompt": f"w{i}", "chosen": " w5 w6", "rejected": " w8<eos>"} for i in range(9, 20)]


def trainer_rows(rows: Any, test: Any, config: Any) -> list[dict[str, list[int]]]:
    """The tokens and labels that TRL's trainer reads."""
    from trl.trainer.reward_trainer import RewardTrainer
    from trl.trainer.sft_trainer import SFTTrainer

    supervised = "completion" in rows.column_names
    kind, model = (SFTTrainer, tiny_policy) if supervised else (RewardTrainer, tiny_reward_model)
    trainer = kind(
        model=model(vocab_size=32),
        args=config,
        train_dataset=rows,
        eval_dataset=test,
        processing_class=word_tokenizer(),
    )
    names = ("input_ids", "labels") if supervised else ("chosen_ids", "rejected_ids")
    return [
        {n: row[n] for n in names}
        for x in ("train", "eval")
        for row in getattr(trainer, f"{x}_dataset")
    ]


def config_of(kind: str, folder: Any, **options: Any) -> Any:
    from kedge.backends.trl.supervised import config_class

    more = {"use_cpu": True, "report_to": "none", "bf16": False}
    return config_class(kind)(output_dir=str(folder), **more, **options)


@pytest.mark.parametrize(("kind", "rows"), [("sft", TEXTS), ("reward", PAIRS)])
def test_the_rows_are_those_of_trl(kind, rows, tmp_path) -> None:
    config, dataset = config_of(kind, tmp_path), Dataset.from_list(rows)
    test = Dataset.from_list(rows[:3])
    train, short, changed = tokenize.tokenize_rows(dataset, test, word_tokenizer(), config)
    assert train is not dataset
    assert changed.max_length is None
    assert config.max_length is not None
    assert trainer_rows(train, short, changed) == trainer_rows(dataset, test, config)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (TEXTS, {"max_length": 4}),
        (TEXTS, {"packing": True}),
        (TEXTS, {"completion_only_loss": False}),
        (TEXTS, {"eos_token": "w3"}),
        ([{"text": "w5 w6"}], {}),
        ([{**row, "tools": "[]"} for row in TEXTS], {}),
        ([{"prompt": [{"role": "user", "content": "w4"}], "completion": []}], {}),
    ],
)
def test_the_rest_is_left_to_trl(rows, options, tmp_path) -> None:
    config, dataset = config_of("sft", tmp_path, **options), Dataset.from_list(rows)
    left = tokenize.tokenize_rows(dataset, None, word_tokenizer(), config)
    assert left[0] is dataset
    assert left[2] is config
