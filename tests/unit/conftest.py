"""A file of prompts and a model without weights."""

import json

import pytest

from kedge.testing import tiny_policy, tiny_reward_model

from .text_toys import weightless_model, word_tokenizer


@pytest.fixture
def rows(tmp_path):
    """A file of 30 prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Day {i}"}) + "\n" for i in range(30)))
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny model's configuration and tokenizer, and no weights at all."""
    return weightless_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, a reward model and prompts on disk."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = word_tokenizer()
    for name, model in [
        ("policy", tiny_policy(vocab_size=32)),
        ("reward", tiny_reward_model(vocab_size=32)),
    ]:
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "data").mkdir()
    lines = [json.dumps({"prompt": f"w{3 + i % 20} w{4 + i % 20}", "n": i}) for i in range(40)]
    (root / "data" / "train.jsonl").write_text("\n".join(lines))
    (root / "rewards.py").write_text(
        "def long(completions, n, **others):\n"
        "    assert all(isinstance(i, int) for i in n)\n"
        "    return [len(c.split()) / 5 for c in completions]\n\n\n"
        "def broken(completions, **others):\n"
        "    raise KeyError('answer')\n"
    )
    return root
