"""Responses token by token and as a table: the texts, the numbers, when they are written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kedge.config.ppo import PPOConfig
from kedge.errors import ConfigError, RewardError
from kedge.reporting.report import gather
from kedge.reporting.responses import IntervalSchedule, completion_rows, token_texts
from kedge.testing import ConstantReward
from tests.e2e.small import PROMPTS, rows, small
from tests.unit.text_toys import blank_swallowing_tokenizer, rollout_of, word_tokenizer

WORD = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one word."""
    pieces = {f"<0x{i:02X}>": i for i in range(256)} | {"word": WORD}
    core = Tokenizer(models.BPE(pieces, [], unk_token="<0x00>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    ("tokenizer", "ids", "texts"),
    [
        (word_tokenizer(), [3, 4, 0], ["w3", " w4", " <eos>"]),
        (blank_swallowing_tokenizer(), [3, 4, 5], ["a", " b", "c"]),
        (byte_tokenizer(), list("aü!".encode()), ["a", "", "ü", "!"]),
        (byte_tokenizer(), list("\N{CHESTNUT}".encode()), ["", "", "", "\N{CHESTNUT}"]),
        (word_tokenizer(), [], []),
        (byte_tokenizer(), [0xF0, WORD, 0xFF], ["", "\ufffdword", "\ufffd"]),  # a broken character
    ],
)
def test_texts(tokenizer: Any, ids: list[int], texts: list[str]) -> None:
    assert token_texts(ids, tokenizer) == texts
    assert "".join(texts) == tokenizer.decode(ids)


def read(folder: Path) -> dict[int, list[dict[str, Any]]]:
    files = sorted(folder.glob("tokens/step-*.jsonl"))
    return {int(f.stem[5:]): [json.loads(x) for x in f.read_text().splitlines()] for f in files}


def test_a_run_writes_rows_that_agree_with_its_metrics(tmp_path: Path) -> None:
    trainer = small(
        output_dir=str(tmp_path), total_episodes=16, logging_steps=2, log_token_rows=4, kl_coef=0.2
    )
    trainer.train()
    found = read(tmp_path)
    assert list(found) == [1, 2, 4]  # the first update, and where metrics are logged
    batch, row = found[4], found[4][0]
    assert len(batch) == 4  # the whole batch
    assert row["prompt"] in {p["prompt"] for p in PROMPTS}
    lists = ("tokens", "logprob", "after", "reference", "advantage", "reward", "value", "return")
    assert {len(row[name]) for name in lists} == {row["length"]}
    assert list(row["rewards"].values()) == [row["score"]]
    # Rewards of a response are its score minus what the KL costs.
    kl = [a - b for a, b in zip(row["logprob"], row["reference"], strict=True)]
    assert sum(row["reward"]) == pytest.approx(row["score"] - 0.2 * sum(kl), rel=5e-3)
    assert all(math.isfinite(x) for x in row["after"])
    assert row["after"] != row["logprob"]  # the update moved it
    assert len(rows(trainer)) == 2


def test_numbers_are_the_same_with_and_without(tmp_path: Path) -> None:
    finals = []
    for count in (0, 3):
        trainer = small(output_dir=str(tmp_path / str(count)), log_token_rows=count)
        trainer.train()
        finals.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*finals)
    assert not (tmp_path / "0" / "tokens").exists()
    assert {len(r) for r in read(tmp_path / "3").values()} == {3}


def test_run_json_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["kedge", "ppo", "--hub_token", "hf_1", "--stop_token", "eos", "--wandb_api_key=k"]
    monkeypatch.setattr("sys.argv", words)
    small(output_dir=str(tmp_path), hub_token="hf_1", kl_coef=0.05).train()
    text = (tmp_path / "run.json").read_text()
    about = json.loads(text)
    assert "hf_1" not in text
    assert about["command"] == "kedge ppo --hub_token ... --stop_token eos --wandb_api_key=..."
    assert about["algorithm"] == "PPO"
    assert "response_length" in about["changed"]
    assert "kl_coef" in about["changed"]  # set, if only to its default
    assert not {"vf_coef", "bf16", "batch_size", "world_size"} & {*about["changed"]}
    assert about["options"]["response_length"] == 6


def test_no_file_and_no_message_holds_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "kedge grpo --hub-token hf_CANARY0 --hub-token=hf_CANARY0 --hub_token --x hf_CANARY0"
        ' --environment_kwargs {"api_key":"CANARY1CANARY1"} --model_init_kwargs={"token":"CANARY2"}'
        " --rollout_engine http://u:CANARY3@h:1 --reward_funcs http://h/score?key=CANARY4"
    )
    monkeypatch.setattr("sys.argv", words.split())
    options = {"hub_token": "hf_CANARY5", "run_name": "http://u:CANARY6@h"}
    trainer = small(output_dir=str(tmp_path), **options)
    trainer.train()
    trainer.create_model_card()
    page = json.dumps(gather(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    held = [path.name for path in files if b"CANARY" in path.read_bytes()]
    assert (held, "README.md" in {path.name for path in files}) == ([], True)
    assert "CANARY" not in f"{page}{trainer.args}"
    for wrong in (
        {"rollout_engine": "http://u:CANARY7@h:1"},
        {"lr_scheduler_kwargs": {"api_key": "CANARY8CANARY8"}},
    ):
        with pytest.raises(ConfigError) as error:
            small(output_dir=str(tmp_path), **options, **wrong).train()
        assert "CANARY" not in str(error.value)
    shown = str(RewardError("\x1b[2J hf_CANARY5 https://u:p@h " + "x" * 100_000))
    assert shown.startswith("\\x1b[2J ... https://...@h")
    assert len(shown) < 5_000


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([("user", "w3")], "w3"),
        ([("system", "w9"), ("user", "w3")], "[system] w9\n[user] w3"),
        ([], "w3 w4"),  # a prompt of tokens
    ],
)
def test_the_table_shows_a_conversation_without_what_its_template_adds(messages, shown) -> None:
    rollout = rollout_of([([3, 4], [5])])
    if messages:
        prompt = [{"role": role, "content": text} for role, text in messages]
        prompts = replace(rollout.prompts, columns={"prompt": [prompt]})
        rollout = replace(rollout, prompts=prompts)
    (row,) = completion_rows([(rollout, ConstantReward().score(rollout))], word_tokenizer())
    assert row["query"] == shown


@pytest.mark.parametrize(
    ("options", "iterations", "samples", "tokens"),
    [
        ({"logging_steps": 6}, 20, [*range(2, 21, 2)], [1, 6, 12, 18, 20]),
        ({"logging_steps": 0.25, "num_sample_generations": 2}, 20, [10, 20], [1, 5, 10, 15, 20]),
        ({"logging_strategy": "epoch"}, 10, [*range(1, 11)], [1, 3, 5, 8, 10]),
        ({"logging_strategy": "no", "num_sample_generations": 0}, 20, [], []),
        ({"logging_steps": 1, "num_sample_generations": 0}, 1000, [], [1, *range(10, 1001, 10)]),
        ({"log_token_rows": 0, "num_sample_generations": 1}, 20, [20], []),
    ],
)
def test_cadence(tmp_path, options, iterations, samples, tokens):
    config = PPOConfig(output_dir=str(tmp_path), **options)
    schedule = IntervalSchedule(config, iterations=iterations, iterations_per_epoch=2.5)
    done = range(1, iterations + 1)
    assert [i for i in done if schedule.samples(i)] == samples
    assert [i for i in done if schedule.writes_tokens(i)] == tokens
