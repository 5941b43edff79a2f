"""Plug-ins of about 30 lines each, installed as a package of their own and used by name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from kedge import plugins
from kedge.records.errors import ConfigError

ROOT = Path(__file__).parents[2]
TRAIN = """
import json, sys
from pathlib import Path
from kedge import PPOConfig, PPOTrainer
from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer
from kedge_example.engine import Counted

folder, tokenizer = sys.argv[1], word_tokenizer()

def run(name, **options):
    inputs = {x: options.pop(x) for x in ("reward_funcs", "train_dataset") if x in options}
    args = PPOConfig(output_dir=f"{folder}/{name}", max_steps=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=1, **{"response_length": 6, **options})
    model = tiny_policy("llama", vocab_size=len(tokenizer))
    trainer = PPOTrainer(model=model, args=args, processing_class=tokenizer, **inputs)
    trainer.train()
    return [json.loads(x) for x in Path(args.output_dir, "metrics.jsonl").read_text().splitlines()]

rows = run("one", reward_funcs="brevity", rollout_engine="script", report_to="listing",
    logging_steps=1, train_dataset=[{"prompt": f"w{i}"} for i in range(3, 11)])
listed = Path(folder, "one", "listing.txt").read_text().splitlines()
scores = [row["objective/scores"] for row in rows if "objective/scores" in row]
assert [float(line.split()[1]) for line in listed] == scores
assert all(0.4 <= score <= 1 for score in scores)
rows += run("two", train_dataset=[{"prompt": "w3"}] * 4, environment="doubling",
    logging_steps=1, max_turn_tokens=2, response_length=24, report_to="none")
turns = [row["environment/turns_seen"] for row in rows if "environment/turns_seen" in row]
print(Counted.batches, len(listed), turns[-1])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of a process that has the package."""
    target = tmp_path_factory.mktemp("site")
    package = shutil.copytree(Path(__file__).with_name("package"), target.parent / "package")
    done = subprocess.run(
        [*(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"),
         str(target), str(package)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"pip cannot build the package here: {done.stderr.strip()[-300:]}")
    path = os.pathsep.join(map(str, (target, ROOT / "src", ROOT)))
    return {**os.environ, "PYTHONPATH": path}


def run(installed: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=ROOT, env=installed, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_engine_environment_reward_and_tracker_train(
    installed: dict[str, str], tmp_path: Path
) -> None:
    assert run(installed, "-c", TRAIN, str(tmp_path)).split("\n")[-2] == "2 2 3.0"


def test_a_command_runs_and_is_listed(installed: dict[str, str]) -> None:
    assert run(installed, "-m", "kedge", "greet", "--name", "you") == "hello you\n"
    assert re.search(r"^  greet +say hello$", run(installed, "-m", "kedge", "--help"), re.M)


def test_sources_on_python_3_10_must_be_installed(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(plugins, "distribution", absent)
    monkeypatch.setattr(plugins, "sys", SimpleNamespace(version_info=(3, 10)))
    with pytest.raises(ConfigError, match=r"is not installed, .*install it \(pip install -e \.\)"):
        plugins._of_sources.__wrapped__()
