"""What the examples of the pages find in the working directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where ``make demo`` was run, as it were: a small model and prompts."""
    model, data = (tmp_path / "runs" / "demo" / name for name in ("sft", "data"))
    tiny_policy(vocab_size=32).save_pretrained(model)
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    word_tokenizer(chat_template=template).save_pretrained(model)
    data.mkdir()
    rows = [json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(3, 12)]
    (data / "prompts.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path
