"""Every `kedge ...` command of the documentation runs: training for two updates, the rest as it is.

MODEL, REWARD, prompts.jsonl, reward.py, run.yaml and the runs are in the working directory, small.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.cli import main as cli
from kedge.cli.main import main, usage
from kedge.testing import tiny_policy
from tests.unit.text_toys import neox_reward, word_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALL = {
    "--total_episodes": "8",
    "--per_device_train_batch_size": "4",
    "--num_mini_batches": "1",
    "--response_length": "4",
    "--num_ppo_epochs": "1",
    "--save_strategy": "no",
    "--num_sample_generations": "0",
    "--use_cpu": "True",
    "--disable_tqdm": "True",
}
CHAT = {  # of examples/chat_model/chat.yaml
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 2,
    "response_length": 4,
}
WHOLE = {"own-agent.md", "preferences.md"}  # one command needs the other: test_tutorials.py
LONG = {"serve-reward"}  # until it is stopped; it has tests elsewhere
ELIDED = "..."


def commands(text: str) -> Iterator[str]:
    """Lines of code blocks that begin with kedge, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    for line in re.findall(r"^(?:    |\t)?(kedge [a-z].*)$", joined, flags=re.MULTILINE):
        yield re.split(r"\s{2,}#", line)[0]


FOUND = [
    (page.relative_to(ROOT).as_posix(), each)
    for page in PAGES
    if page.name not in WHOLE
    for each in commands(page.read_text())
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizer = word_tokenizer()
    tiny_policy("gpt_neox", vocab_size=32).save_pretrained(tmp_path / "MODEL")
    neox_reward(vocab=32).save_pretrained(tmp_path / "REWARD")
    for folder in ("MODEL", "REWARD"):
        tokenizer.save_pretrained(tmp_path / folder)
    for source, name in (("MODEL", "sft"), ("REWARD", "reward")):  # as make demo leaves them
        shutil.copytree(tmp_path / source, tmp_path / "runs" / "demo" / name)
    rows = "".join(f'{{"prompt": "w{i} w{i + 1}"}}\n' for i in range(3, 15))
    (tmp_path / "runs" / "demo" / "data").mkdir()
    for name in ("prompts.jsonl", "runs/demo/data/prompts.jsonl"):
        (tmp_path / name).write_text(rows)
    answer = '{"prompt": "w3 w4", "completion": "w5", "reference": "w6"}'
    (tmp_path / "ours.jsonl").write_text(answer)
    source = (ROOT / "docs" / "getting-started.md").read_text()
    (function,) = re.findall(r"    # reward\.py\n((?:    .*\n)+)", source)
    (tmp_path / "reward.py").write_text(re.sub(r"^    ", "", function, flags=re.MULTILINE))
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: MODEL\nreward_funcs: reward.py:short\ndataset_name: prompts.jsonl\n"
        "total_episodes: 8\nper_device_train_batch_size: 4\noutput_dir: runs/yaml\n"
    )
    chat_example(tmp_path)
    log = ROOT / "tests" / "data" / "doctor" / "good.jsonl"
    for run in ("one", "ppo-0", "ppo-1", "ppo-2", "rloo-0", "rloo-1"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        shutil.copy(log, tmp_path / "runs" / run / "metrics.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chat_example(place: Path) -> None:
    """The example with a chat model, with a tiny one and small sizes."""
    example, run = place / "examples" / "chat_model", place / "runs" / "chat"
    shutil.copytree(ROOT / "examples" / "chat_model", example)
    for file in (example / "chat.yaml", example / "ppo.yaml"):
        settings = file.read_text()
        for name, value in CHAT.items():
            settings, found = re.subn(
                rf"^{name}: \d+", f"{name}: {value}", settings, flags=re.MULTILINE
            )
            assert found
        file.write_text(re.sub(r"(num_mini_batches|train_layers): \d+", r"\1: 1", settings))
    for name in ("model", "grpo"):
        shutil.copytree(place / "MODEL", run / name)
    columns = '"answer": ["w5"], "instruction_id_list": ["keywords:existence"]'
    row = f'{{"prompt": "w3", {columns}, "kwargs": [{{"keywords": ["w5"]}}]}}\n'
    (run / "data").mkdir()
    for name in ("train", "held_out"):
        (run / "data" / f"{name}.jsonl").write_text(row * 4)


def code_of(words: list[str]) -> int:
    """The exit code; argparse leaves by an exception where it was asked for help."""
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)


def small(words: list[str]) -> list[str]:
    """The command with small sizes: those that it names are changed, the others added."""
    sizes = SMALL | {"--max_steps": "2", "--train_layers": "1"}
    found, tokens = [], iter(words)
    for word in tokens:
        found.append(word)
        if word in sizes:
            next(tokens)
            found.append(sizes[word])
    if "--config" in words:
        return found
    return found + [x for pair in SMALL.items() if pair[0] not in words for x in pair]


def test_there_are_commands_to_run() -> None:
    assert len(FOUND) >= 8
    assert {each.split()[1] for _, each in FOUND} <= set(cli.commands())


@pytest.mark.parametrize(("page", "command"), FOUND, ids=lambda x: x[:48])
def test_the_command_runs(page: str, command: str, place: Path) -> None:
    words = shlex.split(command)[1:]
    trains = words[0] in ("ppo", "rloo", "grpo", "plan", "async-ppo") and "--help" not in words
    if ELIDED in words or words[0] in LONG:
        assert code_of([words[0], "--help"]) == 0
        return
    assert main(small(words) if trains else words) == 0, command
    if trains and words[0] != "plan":
        if "--output_dir" in words:
            output = words[words.index("--output_dir") + 1]
        else:
            settings = Path(words[words.index("--config") + 1]).read_text()
            output = re.findall(r"^output_dir: (\S+)", settings, flags=re.MULTILINE)[0]
        assert (place / output / "metrics.jsonl").exists()


def test_an_option_that_does_not_exist_is_noticed(place: Path) -> None:
    assert main(small(shlex.split("plan ppo --config run.yaml --no_such_option 1"))) == 2


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.commands():
        assert code_of([name, "--help"]) == 0
        assert name in usage()
        assert "usage" in capsys.readouterr().out.lower()
