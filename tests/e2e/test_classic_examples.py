"""The scripts of examples/classic, with tiny settings."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.ext.trl.classic import PPOConfig
from tests.classic_models import letters, t5

EXAMPLES = Path(__file__).parents[2] / "examples" / "classic"
pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL to the reference"),
    pytest.mark.filterwarnings("ignore:no dataset was given"),
]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"classic_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_all_are_short() -> None:
    sizes = {p.stem: len(p.read_text().splitlines()) for p in EXAMPLES.glob("*.py")}
    assert set(sizes) == {"sentiment", "multi_adapter", "rule", "seq2seq"}
    assert max(sizes.values()) < 100


def base(folder: Path, seed: int = 0) -> Path:
    from kedge.testing import tiny_policy

    tiny_policy("llama", vocab_size=28, seed=seed).save_pretrained(folder)
    letters(28).save_pretrained(folder)
    return folder


def texts(folder: Path, column: str) -> Path:
    rows = [{column: " ".join(chr(97 + (i * j) % 26) for j in range(1, 9))} for i in range(16)]
    file = folder / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def small(**changes: Any) -> PPOConfig:
    sizes = {"batch_size": 8, "mini_batch_size": 4, "gradient_accumulation_steps": 2}
    return PPOConfig(**sizes | {"learning_rate": 1e-3, "ppo_epochs": 2} | changes)


def test_sentiment(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_config(
        LlamaConfig(
            **{"vocab_size": 28, "hidden_size": 16, "intermediate_size": 32},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 2},
            pad_token_id=1,
        )
    )
    judge.save_pretrained(tmp_path / "judge")
    letters(28).save_pretrained(tmp_path / "judge")
    module = script("sentiment")
    config = small(model_name=str(base(tmp_path / "base")), reward_model=str(tmp_path / "judge"))
    args = module.ScriptArguments(
        dataset=str(texts(tmp_path, "text")),
        max_steps=3,
        max_new_tokens=5,
        output_dir=str(tmp_path / "out"),
    )
    assert len(module.main(args, config)) == 3
    assert (tmp_path / "out" / "value_head.safetensors").exists()


def test_rule(tmp_path: Path) -> None:
    module = script("rule")
    assert module.variety("a b a B") == 0.5
    args = module.ScriptArguments(max_steps=2, max_new_tokens=5, output_dir=str(tmp_path / "out"))
    means = module.main(args, small(model_name=str(base(tmp_path / "base"))))
    assert all(0 < x <= 1 for x in means)


def test_seq2seq(tmp_path: Path) -> None:
    t5().save_pretrained(tmp_path / "base")
    letters(28).save_pretrained(tmp_path / "base")
    module = script("seq2seq")
    assert module.faithful("one two three", "two four") == 0.5
    args = module.ScriptArguments(
        dataset=str(texts(tmp_path, "text")),
        prefix="s ",
        max_steps=3,
        max_new_tokens=5,
        output_dir=str(tmp_path / "out"),
    )
    assert len(module.main(args, small(model_name=str(tmp_path / "base")))) == 3


def test_multi_adapter(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    folder = base(tmp_path / "base")
    judge = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    kind = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], r=2)
    get_peft_model(judge, kind).save_pretrained(tmp_path / "judge")
    module = script("multi_adapter")
    args = module.ScriptArguments(
        reward_adapter=str(tmp_path / "judge"),
        lora_r=2,
        max_steps=2,
        max_new_tokens=5,
        output_dir=str(tmp_path / "out"),
    )
    means = module.main(args, small(model_name=str(folder)))
    assert len(set(means)) == 2
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
