"""Runs whose prompts are a stream: order, resume with and without a state, early refusals."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset, IterableDatasetDict
from torch.utils.data import IterableDataset as TorchStream

from kedge import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from kedge.data.stream import StreamPrompts
from kedge.records.errors import ConfigError, DataError
from tests.e2e.small import PROMPTS, small
from tests.e2e.test_groups import make
from tests.unit.text_toys import word_tokenizer

ROWS = [{**row, "number": i} for i, row in enumerate(PROMPTS)]  # 13


class Counted(TorchStream[Any]):
    """A stream without a state that counts the rows it gave."""

    given = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in ROWS:
            self.given += 1
            yield row


def stream() -> IterableDataset:
    return Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3)


STREAMS = {
    "plain": stream,
    "mapped": lambda: stream().map(lambda row: {"twice": row["number"] * 2}),
    "batched": lambda: stream().map(lambda rows: rows, batched=True, batch_size=5),
    "filtered": lambda: stream().filter(lambda row: row["number"] % 5),
    "part": lambda: stream().skip(2).take(9),
    "shuffled": lambda: stream().shuffle(seed=3, buffer_size=4),
    "no state": Counted,
}


def numbers(source: Any, steps: range) -> list[int]:
    return [n for step in steps for n in source.batch(step).columns["number"]]


def prompts(dataset: Any, **options: Any) -> StreamPrompts:
    return StreamPrompts(dataset, word_tokenizer(), prompts_per_step=4, seed=0, **options)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_goes_on_where_it_was(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """After six batches of four, in the second pass; streams with a state do not begin again."""
    logging.getLogger("kedge").addHandler(caplog.handler)
    whole = prompts(STREAMS[kind]())
    wanted = numbers(whole, range(12))
    if kind == "plain":
        assert wanted[:13] == [row["number"] for row in ROWS]
        assert wanted[13:26] == wanted[:13]
        halves = [prompts(stream(), rank=rank, world_size=2) for rank in (0, 1)]
        assert [numbers(half, range(1, 2)) for half in halves] == [[4, 5], [6, 7]]
    if kind == "shuffled":
        assert sorted(wanted[:13]) == sorted(wanted[13:26]) == [row["number"] for row in ROWS]
        assert wanted[:13] != wanted[13:26]
    saved = whole.state_dict(6)  # others were sampled ahead
    again = prompts(STREAMS[kind]())
    again.load_state_dict(saved)
    assert numbers(again, range(6, 12)) == wanted[24:]
    assert ("read again" in caplog.text) is (kind == "no state")
    assert numbers(again, range(3)) == wanted[:12]  # a function of the step: from the beginning
    assert numbers(again.whole(), range(5, 7)) == wanted[20:28]
    logging.getLogger("kedge").removeHandler(caplog.handler)


def test_a_shuffled_stream_of_equal_prompts_goes_on_at_every_step() -> None:
    # datasets saves no shuffle buffer: its state leads elsewhere, where all prompts look the same.
    rows = [{**PROMPTS[0], "number": i} for i in range(40)]

    def source() -> StreamPrompts:
        stream = Dataset.from_list(rows).to_iterable_dataset().shuffle(seed=3, buffer_size=10)
        return prompts(stream)

    whole, once = source(), numbers(source(), range(20))
    for step in range(1, 16):
        numbers(whole, range(step))
        resumed = source()
        resumed.load_state_dict(whole.state_dict(step))
        assert numbers(resumed, range(step, step + 3)) == once[4 * step : 4 * step + 12], step


def test_a_state_that_json_changes_is_none() -> None:
    class Tuples(Counted):
        def state_dict(self) -> dict[str, Any]:
            return {"place": (self.given, {1: 2})}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            assert saved["place"][1][1] == 2

    assert numbers(prompts(Tuples()), range(2)) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_prompts_that_are_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.data.stream.MOST_DROPPED", 100)
    limited = prompts(stream(), max_prompt_length=3)
    short = [row["number"] for row in ROWS if len(row["prompt"].split()) <= 3]
    assert numbers(limited, range(4)) == (short * 2)[:16]
    with pytest.raises(DataError, match="in a row are longer than max_prompt_length=1 tokens"):
        prompts(IterableDataset.from_generator(lambda: iter(ROWS)), max_prompt_length=1)


OPTIONS = {"max_steps": 6, "total_episodes": None, "save_steps": 3, "adam_epsilon": 1e-3}


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_resumed_run_is_the_run(tmp_path: Path, max_lag: int) -> None:
    """Weights and every logged score are those of a run that was not interrupted."""
    options: dict[str, Any] = {**OPTIONS, "save_strategy": "steps", "max_lag": max_lag}
    whole = small(train_dataset=stream(), output_dir=str(tmp_path / "whole"), **options)
    whole.train()
    again = small(train_dataset=stream(), output_dir=str(tmp_path / "whole"), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    a, b = ([x["objective/scores"] for x in t.state.log_history[:6]] for t in (whole, again))
    assert a == b
    assert len(set(a)) == 6
    for x, y in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert x.equal(y)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_trainers_of_groups_take_streams(kind: Any) -> None:
    """As in TRL, also for evaluation, alone or in a dict; the first eight prompts are trained."""
    config = GRPOConfig if kind is GRPOTrainer else RLOOConfig
    seen: list[int] = []

    def score(completions: list[str], number: list[int], **_: Any) -> list[float]:
        seen.extend(number)
        return [float(len(text.split())) for text in completions]

    sets = IterableDatasetDict({"a": stream().take(3), "b": stream().take(2)})
    made = make(
        *(kind, config),
        **{"train_dataset": stream(), "eval_dataset": sets, "reward_funcs": score},
        **{"max_steps": 4, "total_episodes": None},
    )
    before = [p.clone() for p in made.model.parameters()]
    made.train()
    assert sorted(seen) == sorted(4 * [*range(8)])
    assert not all(p.equal(q) for p, q in zip(before, made.model.parameters(), strict=True))
    found = made.evaluate()
    assert {"eval_a_objective/scores", "eval_b_objective/scores"} <= found.keys()
    assert made.evaluate(stream().take(5))["eval_objective/scores"] > 0


def test_what_cannot_work_is_refused_before_rows_are_read() -> None:
    source = Counted()
    with pytest.raises(ConfigError, match=r"num_train_epochs cannot end the run; set total_epi"):
        small(train_dataset=source, total_episodes=None, num_train_epochs=1)
    with pytest.raises(ConfigError, match="dynamic_sampling=2 takes other rows of the dataset by"):
        make(GRPOTrainer, GRPOConfig, train_dataset=source, dynamic_sampling=2)
    assert source.given == 0
    with pytest.raises(DataError, match="gave 3 batches of 4 prompts and then no more"):
        small(train_dataset=iter(ROWS), total_episodes=16).train()
