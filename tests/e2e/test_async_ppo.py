"""The scripts of asynchronous PPO on tiny models: chats, verifier, evaluation, metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs.generate import OPEN_INSTRUCT_METRICS

from kedge import AsyncPPOConfig, AsyncPPOTrainer, PPOConfig
from kedge.records.errors import ConfigError
from kedge.testing import tiny_policy
from tests.unit.text_toys import neox_reward, word_tokenizer

ROOT = Path(__file__).parents[2]
WORDS = ["<|user|>", "<|assistant|>", *"0123456789", *(f"w{i}" for i in range(15, 32))]
# What the page of metrics says, and what issues asked to be true besides.
PAGE = {
    *("episode", "lr", "lr/value", "epoch", "objective/kl", "objective/kl2", "objective/kl3"),
    *("objective/scores", "objective/rlhf_reward", "objective/non_score_reward"),
    *("objective/entropy", "loss/policy_avg", "loss/value_avg", "policy/approxkl_avg"),
    *("policy/clipfrac_avg", "policy/entropy_avg", "val/ratio", "val/ratio_var"),
    *OPEN_INSTRUCT_METRICS,
}


def texts(folder: Path) -> None:
    folder.mkdir(parents=True)
    rows = [
        {
            "messages": [{"role": "user", "content": f"{i % 7} w{15 + i % 9}"}],
            "ground_truth": str(i % 3),
            "dataset": "GSM8K",
        }
        for i in range(24)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def run_script(name: str, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """Run one of ``scripts/train`` in this process's place; returns its rows of metrics."""
    texts(folder / "data")
    tokenizer = word_tokenizer(WORDS)
    tiny_policy(vocab_size=32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    stub = folder / "bin" / "kedge"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -m kedge.cli.main "$@"\n')
    stub.chmod(0o755)
    data, model = str(folder / "data"), str(folder / "model")
    script = folder / "script.sh"
    text = (ROOT / "scripts" / "train" / name).read_text()
    script.write_text(text.replace("    --ray_address auto \\\n", ""))  # refused without Ray
    done = subprocess.run(
        [
            *("bash", str(script), "--rollout_engine", "embedded"),
            *("--model_name_or_path", model, "--reward_model_path", model, "--use_cpu"),
            "--dummy_reward",
            *("--dataset_mixer_list", data, "1.0", "--dataset_mixer_eval_list", data, "16"),
            *("--response_length", "8", "--output_dir", str(folder / "out"), "--disable_tqdm"),
            *flags,
        ],
        env=os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(x) for x in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_two_node_script_runs_in_one_process(tmp_path: Path) -> None:
    """All its flags; learners, tracking and episodes are those of one process without a hub."""
    small = ["--actor_num_gpus_per_node", "1", "--vllm_tensor_parallel_size", "1"]
    small += ["--with_tracking", "false", "--num_evals", "2"]
    rows = run_script("tulu3/ppo_8b.sh", tmp_path, *small, "--total_episodes", "64")
    updates = [row for row in rows if "objective/scores" in row]
    assert [row["episode"] for row in updates] == [16, 32, 48, 64]
    assert all(0 <= row["objective/verifiable_correct_rate"] <= 1 for row in updates)


@pytest.mark.slow
def test_the_debug_script_runs(tmp_path: Path) -> None:
    more = ["--add_r1_style_format_reward", "--learning_rate", "1e-3"]
    rows = run_script("debug/ppo.sh", tmp_path, *more)
    updates = [row for row in rows if "objective/scores" in row]
    assert [row["episode"] for row in updates] == [4, 8, 12, 16, 20, 24, 28, 32]
    for row in updates:
        assert PAGE - set(row) == set()
        assert row["training_step"] == row["step"] == row["episode"] / 4
        assert row["rollout/lag"] == min(row["step"] - 1, 1)
        assert row["val/num_stop_token_ids"] == row["val/stop_token_rate"] * 4
        assert row["objective/gsm8k_correct_rate"] == row["objective/verifiable_correct_rate"]
        assert row["objective/entropy"] > 0 < row["policy/entropy_avg"]
    spent = [row["time/from_scratch"] for row in updates]
    assert spent == sorted(spent)
    evaluations = [row["step"] for row in rows if "eval_objective/scores" in row]
    assert evaluations == [3, 6, 8]  # num_evals 3 over 8 updates
    assert (tmp_path / "out" / "value_model" / "config.json").is_file()


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def trainer(tmp_path: Path, **options: Any) -> AsyncPPOTrainer:
    reward = options.pop("reward", {"reward_funcs": lengths})
    base: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "rollout_engine": "embedded",
        "use_cpu": True,
        "local_rollout_batch_size": 4,
        "total_episodes": 12,
        "response_length": 5,
        "disable_tqdm": True,
    }
    return AsyncPPOTrainer(
        AsyncPPOConfig(**(base | options)),
        word_tokenizer(WORDS),
        tiny_policy(vocab_size=32),
        **reward,
        train_dataset=[{"prompt": f"w{i} 1 2"} for i in range(15, 25)],
    )


@pytest.mark.smoke
def test_one_apart_by_default_and_in_turn_by_choice(tmp_path: Path) -> None:
    for mode, lags in ((True, [0, 1, 1]), (False, [0, 0, 0])):
        made = trainer(tmp_path / str(mode), async_mode=mode)
        made.train()
        rows = [row for row in made.state.log_history if "objective/scores" in row]
        assert [row["rollout/lag"] for row in rows] == lags
        assert all(row["objective/loss"] != 0 for row in rows)


def test_a_reward_model_with_another_vocabulary_needs_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 48 tokens and the policy 32, but the reward model"):
        trainer(tmp_path, reward={"reward_model": neox_reward(48)})
    same = {"reward_model": neox_reward(48), "reward_processing_class": word_tokenizer(WORDS)}
    trainer(tmp_path / "same", reward=same)
    trainer(tmp_path / "equal", reward={"reward_model": neox_reward(32)})


def test_another_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"args must be a kedge.AsyncPPOConfig"):
        AsyncPPOTrainer(PPOConfig(use_cpu=True))  # type: ignore[arg-type]
