"""Folders with the names of the models and data sets that the programs load, with small ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

HEAD = "value_head.safetensors"
LLAMAFACTORY = Path(__file__).with_name("llamafactory.yaml.txt").read_text(encoding="utf-8")


def prepare(folder: Path, data: Path) -> None:
    """Fill ``folder``; ``data`` holds stories260k and the like."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [
        json.loads(line)["prompt"]
        for line in (data / "story-prompts" / "train.jsonl").read_text().splitlines()[:160]
    ]
    for name, source in (
        ("gpt2", "stories260k"),
        ("EleutherAI/pythia-1b-deduped", "stories260k"),
        ("reward", "stories260k-sentiment"),
    ):
        shutil.copytree(data / source, folder / name, dirs_exist_ok=True)
    _two_labels(data, folder / "lvwerra" / "distilbert-imdb")
    _datasets(folder, prompts)
    _llamafactory(folder, data, prompts)


def _two_labels(data: Path, folder: Path) -> None:
    """The sentiment model with the labels NEGATIVE and POSITIVE."""
    source = data / "stories260k-sentiment"
    one = AutoModelForSequenceClassification.from_pretrained(source)
    two = AutoModelForSequenceClassification.from_pretrained(
        source,
        num_labels=2,
        ignore_mismatched_sizes=True,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
        problem_type="single_label_classification",
    )
    with torch.no_grad():
        two.score.weight.copy_(torch.cat([torch.zeros_like(one.score.weight), one.score.weight]))
    two.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)))


def _datasets(folder: Path, prompts: list[str]) -> None:
    _rows(
        folder / "imdb" / "train.jsonl", [{"text": f"{p} " * 6, "label": 1} for p in prompts[:32]]
    )
    style = folder / "trl-internal-testing" / "descriptiveness-sentiment-trl-style"
    _rows(style / "rows.jsonl", [{"prompt": p} for p in prompts])
    (style / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: descriptiveness\n    path: rows.jsonl\n---\n"
    )
    chats = [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": "x"}]}
        for p in prompts
    ]
    _rows(folder / "swift.jsonl", [{"messages": chat["messages"][:1]} for chat in chats[:24]])
    for split in ("train", "validation"):
        rows = chats[:120] if split == "train" else chats[120:]
        _rows(
            folder / "trl-internal-testing/tldr-preference-sft-trl-style" / f"{split}.jsonl", rows
        )
        _rows(folder / "trl-lib/tldr" / f"{split}.jsonl", [{"prompt": p} for p in prompts])


def _llamafactory(folder: Path, data: Path, prompts: list[str]) -> None:
    torch.manual_seed(0)
    root = folder / "llamafactory"
    root.mkdir(exist_ok=True)
    rows = [{"instruction": p, "input": "", "output": "x"} for p in prompts[:32]]
    (root / "stories.json").write_text(json.dumps(rows))
    (root / "dataset_info.json").write_text('{"stories": {"file_name": "stories.json"}}')
    head = {
        "v_head.summary.weight": torch.randn(1, 64) * 0.1,
        "v_head.summary.bias": torch.zeros(1),
    }
    base = AutoModelForCausalLM.from_pretrained(data / "stories260k")
    base.save_pretrained(root / "reward")
    AutoTokenizer.from_pretrained(data / "stories260k").save_pretrained(root / "reward")
    save_file(head, root / "reward" / HEAD)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,  # it gives other rewards than its base
    )
    get_peft_model(base, config).save_pretrained(root / "reward_lora")
    save_file(head, root / "reward_lora" / HEAD)
    for name, model, tuning, reward in (
        ("lora", "gpt2", "lora", "full"),
        ("lora_reward", "gpt2", "lora", "lora"),
        ("full", "gpt2", "full", "full"),
    ):
        text = LLAMAFACTORY.format(
            name=f"llamafactory_{name}",
            model=model,
            tuning=tuning,
            reward_type=reward,
            reward="llamafactory/reward" + "_lora" * (reward == "lora"),
        )
        (root / f"{name}.yaml").write_text(text)
