"""The demo of an agent, with little training: it runs to the end and leaves what it promises."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from tests import processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the demo extra")
def test_quick_agent(tmp_path: Path) -> None:
    run = ["-W", "ignore", str(EXAMPLE / "run.py"), "--quick"]
    done = processes.run(*run, "--output_dir", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    for stage in ("supervised", "ppo"):
        assert 0 <= summary[stage]["low"] <= summary[stage]["success"] <= summary[stage]["high"]
    assert (tmp_path / "ppo" / "model.safetensors").is_file()
    log = (tmp_path / "ppo" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in log.splitlines()]
    assert all("environment/turns" in row for row in rows if "objective/scores" in row)
    assert "success on 16 new worlds" in done.stdout
    assert "kedge report" in done.stdout
    episode = json.loads((tmp_path / "episodes.jsonl").read_text().splitlines()[0])
    assert [m["role"] for m in episode["messages"][:3]] == ["user", "assistant", "user"]


def test_what_the_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are single tokens, episodes decode to themselves, and only actions are trained."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    agent, model = (importlib.import_module(name) for name in ("agent", "model"))
    make = agent.TASKS["text world"].make
    rows = list(agent.expert_episodes(make, range(50), noise=0.3))
    texts = [message["content"] for row in rows for message in row["messages"]]
    tokenizer = model.make_tokenizer(texts)
    assert tokenizer.tokenize(" Exits: north, east.") == ["ĠExits:", "Ġnorth,", "Ġeast."]
    assert tokenizer.decode(tokenizer("Go 42 + 7 é")["input_ids"]) == "Go 42 + 7 é"
    encoded = tokenizer.apply_chat_template(
        rows[0]["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    actions = [
        token
        for token, trained in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        if trained
    ]
    said = [m["content"] for m in rows[0]["messages"] if m["role"] == "assistant"]
    assert tokenizer.decode(actions) == "".join(f"{action}<end>" for action in said)


def test_sao_with_its_mask_and_with_a_clip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the comparison runs as SAO: single episodes, at most two steps ahead of training."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    agent = importlib.import_module("agent")
    made = {}
    for name, (_, config, options) in agent.METHODS.items():
        made[name] = config(output_dir=str(tmp_path), use_cpu=True, **options)
    masked, clipped = made["SAO"], made["SAO, clipped"]
    for config in (masked, clipped):
        assert (config.num_generations, config.max_lag) == (1, 1)
        assert (config.per_device_train_batch_size, config.num_mini_batches) == (16, 1)
        assert (config.value_source, config.sampler_correction) == ("copy", "ratio")
        assert (config.lam, config.lam_alpha, config.lam_value) == (0.95, None, 0.95)
    assert (masked.policy_loss, masked.cliprange, masked.cliprange_high) == ("mask", 0.8, 3.0)
    assert (clipped.policy_loss, clipped.cliprange, clipped.cliprange_high) == ("clip", 0.2, 0.2)
    assert masked.num_ppo_epochs == 1
