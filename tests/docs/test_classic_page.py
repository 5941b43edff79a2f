"""Every example of the page on the classic API runs, in order, as it stands.

The names of models and data sets are folders of the working directory, with tiny ones in them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.classic.stats_recorder import KEYS
from tests.classic_models import gpt2, letters

PAGE = (Path(__file__).parents[2] / "docs" / "classic.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def prepare(folder: Path) -> None:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    tokenizer = letters(28)
    gpt2().save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    torch.manual_seed(0)
    judge = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=28,
            dim=16,
            n_layers=1,
            n_heads=2,
            hidden_dim=32,
            id2label={0: "NEGATIVE", 1: "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1},
            pad_token_id=1,
        )
    )
    judge.save_pretrained(folder / "lvwerra" / "distilbert-imdb")
    tokenizer.save_pretrained(folder / "lvwerra" / "distilbert-imdb")
    data = folder / "HuggingFaceH4" / "cherry_picked_prompts"
    data.mkdir(parents=True)
    rows = [{"prompt": f"{a} b c", "meta": 1, "completion": "x"} for a in "abcdefghijklmnop"]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.filterwarnings("ignore:the KL to the reference")
@pytest.mark.filterwarnings("ignore:no dataset was given")
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(EXAMPLES) == 6
    for example in EXAMPLES:
        exec(example, names)
    assert Path("my_ppo_model/value_head.safetensors").exists()
    assert names["ppo_trainer"].current_step == 3


def test_every_statistic_is_explained() -> None:
    table = PAGE[PAGE.index("## Statistics") :]
    for key in KEYS:
        prefix, name = key.rsplit("/", 1)
        named = key in table or (prefix.startswith(("time", "tokens")) and _part(name) in table)
        assert named, key


def _part(name: str) -> str:
    return "tokens/{queries,responses}" if name.startswith(("queries", "responses")) else name
