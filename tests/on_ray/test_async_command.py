"""``kedge async-ppo`` on Ray: learners, sharded ones too, and engines by one plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.testing import tiny_policy
from tests.on_ray.clusters import local, needs_ray
from tests.unit.text_toys import neox_reward, word_tokenizer

pytestmark = needs_ray

KEYS = ("objective/scores", "objective/kl", "loss/policy_avg", "loss/value_avg", "rollout/lag")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and prompts."""
    root = tmp_path_factory.mktemp("async")
    for name, model in (
        ("policy", tiny_policy("gpt_neox", vocab_size=32)),
        ("reward", neox_reward(vocab=32)),
    ):
        model.save_pretrained(root / name)
        word_tokenizer().save_pretrained(root / name)
    rows = [json.dumps({"prompt": f"w{i} w{i + 1}"}) for i in range(3, 19)]
    (root / "train.jsonl").write_text("\n".join(rows))
    return root


def run(folder: Path, name: str, per_learner: int, *flags: str) -> list[dict[str, Any]]:
    """The logged updates of a run of 8 responses an update."""
    out = folder / name
    code = main(
        [
            *("async-ppo", "--model_name_or_path", str(folder / "policy"), "--use_cpu"),
            *("--reward_model_path", str(folder / "reward"), "--output_dir", str(out)),
            *("--dataset_mixer_list", str(folder / "train.jsonl"), "1.0", "--stop_token", "eos"),
            *("--local_rollout_batch_size", str(per_learner), "--total_episodes", "32"),
            *("--per_device_train_batch_size", "2", "--response_length", "5", "--num_epochs", "2"),
            *("--learning_rate", "1e-3", "--eps", "1e-3", "--save_freq", "-1", "--disable_tqdm"),
            *flags,
        ]
    )
    assert code == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: row[k] for k in KEYS} for row in lines if "loss/policy_avg" in row]


def test_learners_and_engines_by_one_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local()
    alone = run(folder, "alone", 8, "--rollout_engine", "embedded")
    capsys.readouterr()
    ray = ("--ray_engine", "embedded", "--vllm_num_engines", "2", "--actor_num_gpus_per_node", "2")
    two = run(folder, "two", 4, *ray)
    said = capsys.readouterr().out
    assert "learner 0, 1" in said
    assert "engine 1" in said
    assert "step 4/4" in said
    cut = run(folder, "cut", 4, *ray, "--vllm_num_engines", "1", "--deepspeed_stage", "3")
    assert [row["rollout/lag"] for row in alone] == [0, 1, 1, 1]
    assert abs(alone[-1]["objective/kl"]) > 1e-3
    for a, b, c in zip(alone, two, cut, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
        assert c == pytest.approx(a, rel=1e-3, abs=1e-5)
    assert (folder / "cut" / "model.safetensors").is_file()


KILLS_ONCE = """
import os
from pathlib import Path

def words(completions, **_):
    done = Path(__file__).with_name("killed")
    calls = Path(__file__).with_suffix(".calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    if len(calls.read_text()) == 4 and not done.exists():
        done.touch()
        os.kill(os.getpid(), 9)
    return [float(len(text.split())) for text in completions]
"""


def test_a_lost_learner_is_restarted_from_the_newest_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local()
    ray = ("--ray_engine", "embedded", "--save_freq", "1", "--total_episodes", "48")
    rows = {}
    for name, failures in (("calm", 0), ("killed", 1)):
        reward = folder / f"{name}.py"
        reward.write_text(KILLS_ONCE if failures else KILLS_ONCE.replace("== 4", "== 0"))
        flags = ("--reward_funcs", f"{reward}:words", "--max_failures", str(failures))
        rows[name] = run(folder, f"restart-{name}", 8, *ray, *flags)
    assert len(rows["calm"]) == 6
    assert rows["killed"][-3:] == rows["calm"][-3:]
    said = capsys.readouterr().err
    assert "restart 1 of 1 from checkpoint-" in said
