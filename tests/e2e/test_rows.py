"""Rows mean the same whichever way they arrive: lists, JSON Lines, and the tables of Arrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset

from kedge.records.errors import DataError
from kedge.records.protocols import EnvironmentInfo
from kedge.testing import tiny_policy
from tests.environments.families import tokenizer
from tests.environments.test_tools import calculator
from tests.environments.toys import played


def tool(name: str, **properties: str) -> dict[str, Any]:
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls}


QUESTION = {"role": "user", "content": "q"}
ADDED = {"role": "tool", "name": "add", "content": "3"}
ROWS: list[dict[str, Any]] = [
    {
        "prompt": [QUESTION, call("add", a=1, b=2), ADDED],
        "tools": [tool("add", a="integer", b="integer")],
        "facts": {"x": 1},
        "chat_template_kwargs": None,
    },
    {
        "prompt": [QUESTION, call("find", query="cats"), {"role": "tool", "content": "two"}],
        "tools": [tool("find", query="string")],
        "facts": {"y": [{"z": "z"}, {"w": 1}]},
        "chat_template_kwargs": {"add_generation_prompt": False},
    },
]


def as_given(way: str, folder: Path, rows: list[dict[str, Any]]) -> Any:
    """Rows that arrive in one of the ways."""
    if way == "list":
        return rows
    if way == "jsonl":
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return load_dataset(
            "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder)
        )
    if way == "JSON text":
        return Dataset.from_list([row | {"tools": json.dumps(row["tools"])} for row in rows])
    table = Dataset.from_list(rows)
    if way == "parquet":
        table.to_parquet(folder / "rows.parquet")
        return Dataset.from_parquet(str(folder / "rows.parquet"), cache_dir=str(folder))
    ways: dict[str, Any] = {
        "from_list": table,
        "map": table.map(lambda row: {"also": row["tools"]}).remove_columns("also"),
        "transform": table.with_transform(lambda batch: batch),
        "columns": {name: table[name] for name in table.column_names},
    }
    return ways[way]


class Recorder:
    """An environment that keeps the options of ``reset``."""

    seen: list[Any] = []  # noqa: RUF012

    def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
        self.seen.append({name: options[name] for name in ("prompt", "facts")})
        return "go", {}

    def step(self, response: Any) -> tuple[None, float, bool, bool, dict[str, Any]]:
        return None, 1.0, True, False, {}


def read_by_trainer(rows: Any, *, plays: Any, **options: Any) -> dict[str, Any]:
    """What policy, reward function and environment read of two rows."""
    rewarded: list[Any] = []

    def reward(prompts: Any, facts: Any, completions: Any, **_: Any) -> list[float]:
        rewarded.extend(zip(prompts, facts, strict=True))
        return [float(len(str(c))) for c in completions]

    Recorder.seen = []
    trainer = played(
        model=tiny_policy("qwen2", vocab_size=448, max_positions=2048),
        processing_class=tokenizer("qwen2.5"),
        train_dataset=rows,
        environment=(Recorder if plays is True else plays) or None,
        reward_funcs=reward,
        per_device_train_batch_size=2,
        max_steps=1,
        shuffle_dataset=False,
        preflight=False,
        log_token_rows=2,
        **({} if plays or "tools" in options else {"max_turn_tokens": None}),
        **options,
    )
    trainer.train()
    log = Path(trainer.args.output_dir, "tokens", "step-000001.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in log]
    resets = sorted(Recorder.seen, key=str)  # two threads: in any order
    return {"prompts": prompts, "rewards": rewarded, "reset": resets}


WAYS = ("jsonl", "JSON text", "from_list", "parquet", "map", "transform", "columns")


@pytest.mark.parametrize("plays", [False, True], ids=["plain", "environment"])
def test_rows_are_equal_whichever_way_they_arrive(plays: bool, tmp_path: Path) -> None:
    expected = read_by_trainer(ROWS, plays=plays)
    first, second = expected["prompts"]
    assert '"arguments": {"a": 1, "b": 2}}' in first
    assert '"properties": {"query": {"type": "string"}}' in second
    assert "null" not in first + second
    assert [text.endswith("assistant\n") for text in (first, second)] == [True, False]
    assert [facts for _, facts in expected["rewards"]] == [row["facts"] for row in ROWS]
    for way in WAYS:
        found = read_by_trainer(as_given(way, tmp_path, ROWS), plays=plays)
        assert found == expected, way
    if not plays:  # processes that tokenize read the same rows
        table = as_given("from_list", tmp_path, ROWS)
        assert read_by_trainer(table, plays=False, dataset_num_proc=2) == expected


@pytest.mark.filterwarnings("ignore")  # TRL's defaults
@pytest.mark.parametrize("labels", ["TRL", "Kedge"])
def test_supervised_training_shows_the_same_tools(labels: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (the extra sft)")
    from trl import SFTConfig

    from kedge.ext.before_rl.trl_trainers import train_supervised

    rows = [
        {
            "messages": [*row["prompt"], {"role": "assistant", "content": "ok"}],
            "tools": row["tools"],
        }
        for row in ROWS
    ]
    texts = {}
    for way in ("jsonl", "JSON text", "from_list", "parquet"):
        words = tokenizer("qwen2.5")
        words.chat_template += "{# no known template #}" if labels == "Kedge" else ""
        config = SFTConfig(
            output_dir=str(tmp_path / "sft"),
            assistant_only_loss=labels == "Kedge",
            **{"max_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no"},
            **{"per_device_train_batch_size": 1, "disable_tqdm": True, "max_length": 2048},
        )
        model = tiny_policy("qwen2", vocab_size=448, max_positions=2048)
        trained = train_supervised(model, words, config, as_given(way, tmp_path, rows))
        texts[way] = [words.decode(ids) for ids in trained.train_dataset["input_ids"]]
    first, second = texts["parquet"]
    assert '"arguments": {"a": 1, "b": 2}}' in first
    assert '"properties": {"query": {"type": "string"}}' in second
    assert "null" not in first + second
    assert all(text == texts["parquet"] for text in texts.values())


def test_nulls_of_the_user_are_kept_where_arrow_adds_none(tmp_path: Path) -> None:
    rows = [ROWS[0] | {"prompt": [QUESTION, call("add", a=1, b=None), ADDED]}, ROWS[1]]
    for way in ("list", "jsonl"):
        first, _ = read_by_trainer(as_given(way, tmp_path, rows), plays=False)["prompts"]
        assert '"arguments": {"a": 1, "b": null}}' in first


def test_tools_of_a_row_are_schemas_and_not_beside_those_that_can_be_called() -> None:
    with pytest.raises(DataError, match="'tools', row 0: the chat template reads"):
        read_by_trainer([{"prompt": [QUESTION], "tools": ["calculator"]}], plays=False)
    with pytest.raises(DataError, match="'tools', row 1: the policy would read these tools"):
        read_by_trainer(
            [{"prompt": [QUESTION], "tools": tools} for tools in (None, ROWS[0]["tools"])],
            plays=False,
            tools=[calculator],
        )


def test_a_wrong_environment_is_found_before_anything_is_sampled() -> None:
    rows = [{"prompt": [QUESTION], "environment": "good", "facts": i} for i in range(60)]
    rows[50]["environment"] = "typo"
    with pytest.raises(DataError, match="row 50: must name one of good, other, got 'typo'"):
        played(train_dataset=rows, environment={"good": Recorder, "other": Recorder})
    trainer = played(train_dataset=rows[:50], environment={"good": Recorder, "other": Recorder})
    with pytest.raises(DataError, match=r"'environment', row 2: .*got 'typo'"):
        trainer.evaluate(rows[48:52])


class WithTools(Recorder):
    info = EnvironmentInfo(tools=[tool("find", query="string")])

    def reset(self, *, seed: int, options: Any) -> Any:
        return None, {}


ADD = {"tools": [calculator], "max_turn_tokens": 5}


@pytest.mark.parametrize("given", [{}, {"plays": WithTools}, ADD], ids=["plain", "played", "tools"])
def test_an_answer_that_has_begun_stays_open(given: dict[str, Any]) -> None:
    history = [QUESTION, call("add", a=1, b=2), ADDED, {"role": "assistant", "content": "So it"}]
    rows = [{"prompt": history, "facts": {}}] * 2
    prompts = read_by_trainer(rows, **{"plays": False} | given)["prompts"]
    assert [text.endswith("<|im_start|>assistant\nSo it") for text in prompts] == [True, True]
    assert [text.count('"arguments": {"a": 1, "b": 2}') for text in prompts] == [1, 1]


def test_cutting_chats_says_that_the_template_is_cut(caplog: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("q", "q" * 300)]
    caplog.set_level("WARNING", "kedge")
    for overlong, count in (("truncate", 1), ("drop", 0)):
        caplog.clear()
        played(
            model=tiny_policy("qwen2", vocab_size=448, max_positions=2048),
            processing_class=tokenizer("qwen2.5"),
            environment=Recorder,
            train_dataset=rows,
            max_prompt_length=250,
            overlong_prompts=overlong,
        )
        assert caplog.text.count("the 1 truncated prompts are chat messages") == count
