"""Reward functions: what they are given, what they may return, and what failing does."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import threading
import time
import traceback

import numpy as np
import pytest
import torch

from kedge.background import on_event_loop
from kedge.records.errors import ConfigError, RewardError
from kedge.records.types import Metrics
from kedge.reporting.responses import completion_rows
from kedge.rewards import RewardFunction, TextCache
from kedge.rewards.build import check_sources, load_function
from kedge.trainers.base import short_errors

from .text_toys import EOS, blank_swallowing_tokenizer, rollout_of, word_tokenizer

PAIRS = [([5, 6], [8, 9, EOS]), ([7], [10])]


def make(function, **options):
    return RewardFunction(function, TextCache(word_tokenizer()), **options)


def test_a_function_gets_the_arguments_it_names():
    seen = {}

    def reward(completions, completion_ids, answer, log_metric, trainer_state, other=3):
        seen.update(locals())
        return [1, 2.5]

    source = make(reward, trainer_state=lambda: "state")
    judged = source.score(rollout_of(PAIRS, answer=["x", "y"], prompt=["w5 w6", "w7"]))
    assert judged.scores.tolist() == [1.0, 2.5]
    assert judged.components["reward"].tolist() == [1.0, 2.5]
    assert judged.valid.all()
    assert seen["completions"] == [" w8 w9", " w10"]
    assert seen["completion_ids"] == [[8, 9, EOS], [10]]
    assert seen["answer"] == ["x", "y"]
    assert seen["trainer_state"] == "state"
    assert seen["other"] == 3


def test_kwargs_take_everything():
    def reward(**kwargs):
        names = "completion_ids completions level log_extra log_metric prompt_ids prompts"
        assert sorted(kwargs) == [*names.split(), "trainer_state"]
        assert kwargs["prompts"] == ["w5 w6", "w7"]
        assert kwargs["prompt_ids"] == [[5, 6], [7]]
        return kwargs["level"]

    rollout = rollout_of(PAIRS, level=[1, 2], prompt=["w5 w6", "w7"])
    assert make(reward).score(rollout).scores.tolist() == [1.0, 2.0]


def test_chat_prompts_get_completions_as_messages():
    chats = [[{"role": "user", "content": "w5 w6"}], [{"role": "user", "content": "w7"}]]

    def reward(prompts, completions):
        assert prompts == chats
        assert completions == [
            [{"role": "assistant", "content": "w8 w9"}],
            [{"role": "assistant", "content": "w10"}],
        ]
        return [0, 1]

    assert make(reward).score(rollout_of(PAIRS, prompt=chats)).scores.tolist() == [0.0, 1.0]


def test_prompt_and_completion_join_to_the_rows_text():
    tokenizer = blank_swallowing_tokenizer()

    def reward(prompts, completions):
        assert [p + c for p, c in zip(prompts, completions, strict=True)] == ["a b", "ac b"]
        return [0, 0]

    rollout = rollout_of([([3], [4, EOS]), ([3], [5, 4])])  # token ids only
    RewardFunction(reward, TextCache(tokenizer)).score(rollout)
    assert tokenizer.decode([4]) == "b"  # alone, the blank is lost


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2],
        (1.0, 2.0),
        np.array([1, 2]),
        np.array([1.0, 2.0], dtype=np.float32),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        [torch.tensor(1.0), np.float64(2.0)],
    ],
)
def test_what_a_function_may_return(returned):
    assert make(lambda prompts: returned).score(rollout_of(PAIRS)).scores.tolist() == [1.0, 2.0]


def test_none_means_not_applicable():
    rollout = rollout_of(PAIRS)
    judged = make(lambda prompts: [None, True]).score(rollout)
    assert judged.valid.tolist() == [False, True]
    rows = completion_rows([(rollout, judged)], word_tokenizer())
    assert [row["score"] for row in rows] == [None, 1.0]
    assert judged.scores[1] == 1.0
    assert judged.components["lambda"][0].isnan()


def test_one_number_per_token_is_a_dense_reward():
    judged = make(lambda prompts: [[0.5, 0.0, 2.0], torch.tensor([-1.0])]).score(rollout_of(PAIRS))
    assert judged.token_rewards.tolist() == [[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]]
    assert judged.scores.tolist() == [2.5, -1.0]
    assert judged.components["lambda"].tolist() == [2.5, -1.0]
    assert judged.valid.all()


def test_a_padded_matrix_of_token_rewards_is_cut_to_each_response():
    rewards = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]])
    judged = make(lambda prompts: rewards).score(rollout_of(PAIRS))
    assert judged.token_rewards.tolist() == [[1.0, 2.0, -3.0], [0.0, 0.0, 0.0]]
    assert judged.scores.tolist() == [6.0, 4.0]


def raises_on_w7(prompts):
    if "w7" in prompts:
        raise KeyError("w7")
    return [1.0] * len(prompts)


def raises_in_batches(prompts):
    if len(prompts) > 1:
        raise ConnectionError("busy")
    return [2.0]


def nan_second(completion_ids):
    return [float("nan") if ids == [10] else 1.0 for ids in completion_ids]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises_on_w7, r"raises_on_w7 raised KeyError: 'w7', on row 1 \(prompt 'w7'\); .*'drop'"),
        (raises_in_batches, r"ConnectionError: busy when called with all 2 rows, but not on an"),
        (nan_second, r"nan_second returned float nan, .*; return None .*on row 1 \(prompt 'w7'\)"),
        (
            lambda prompts: [1, 1e39],
            r"returned float 1e\+39, which is not a finite float32; .*on row 1",
        ),
        (lambda prompts: [10**400, 1], r"returned int 1000+, which is not a finite .*on row 0"),
        (
            lambda prompts: [[1, 2, 1e39], 1],
            r"per-token reward float 1e\+39, which is not a finite",
        ),
        (lambda prompts: [1.0], r"lambda must return a list .* for each of 2 completions, got 1"),
        (lambda prompts: None, r"must return a list .*, got NoneType"),
        (lambda prompts: 1.0, r"must return a list .*, got float"),
        (lambda prompts: [1, "2"], r"returned str 2, which is not .*, on row 1"),
        (lambda prompts: [[1, 2], 1], r"2 per-token rewards for 3 response tokens, on row 0"),
        (lambda prompts: [[1, 2, float("nan")], 1], r"per-token reward float nan, which is not"),
        (lambda prompts, gold: [1, 2], r"requires gold, .*available: completion_ids, "),
    ],
)
def test_errors_name_function_row_and_prompt(function, message):
    with pytest.raises(RewardError, match=message):
        make(function).score(rollout_of(PAIRS))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons show no notes")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_trainer_shows_the_users_frames_alone_and_last(tmp_path, monkeypatch, asynchronous):
    monkeypatch.delenv("KEDGE_TRACEBACK", raising=False)
    script = tmp_path / "mine.py"
    kind = "async " if asynchronous else ""
    script.write_text(
        f"{kind}def mine(completions):\n    return [deep(c, 9) for c in completions]\n\n\n"
        "def deep(text, n):\n    return deep(text, n - 1) if n else {}[text]\n"
    )
    score = make(load_function(f"{script}:mine")).score
    with pytest.raises(RewardError) as caught:
        short_errors(score)(rollout_of(PAIRS))
    shown = "".join(traceback.format_exception(caught.value))
    last = [line for line in shown.splitlines() if set(line.strip()) - set("^~")]
    assert len(last) <= 18  # the test, the wrapper, the message, four frames, the exception
    assert last[-1] == "KeyError: ' w8 w9'"
    assert "in mine" in last[-9]
    assert "kedge.records.errors.RewardError: reward function mine raised KeyError" in shown
    assert "_row_by_row" not in shown
    monkeypatch.setenv("KEDGE_TRACEBACK", "1")
    with pytest.raises(RewardError) as caught:
        short_errors(score)(rollout_of(PAIRS))
    assert isinstance(caught.value.__cause__, KeyError)
    assert "_row_by_row" in "".join(traceback.format_exception(caught.value))


def test_columns_that_the_dataset_lacks_are_named_before_anything_is_sampled():
    def graded(completions, solution, level=1):
        return [0.0] * len(completions)

    def single(completion, prompt):
        return 0.0

    check_sources(None, graded, dataset_columns=["prompt", "solution"])
    with pytest.raises(ConfigError) as caught:
        check_sources(None, graded, dataset_columns=["prompt", "answer"])
    assert str(caught.value) == (
        "reward function graded needs solution, and the dataset has no such column (its columns:"
        " answer, prompt). In addition to columns, a function can take prompts, completions,"
        " prompt_ids, completion_ids, trainer_state, log_metric, log_extra; add a"
        " dataset column 'solution', or give the argument a default"
    )
    with pytest.raises(ConfigError, match=r"needs completion, prompt, .*use completions, a list"):
        check_sources(None, single, dataset_columns=["prompt"])


@pytest.mark.parametrize("function", [raises_on_w7, nan_second])
def test_a_failing_row_can_be_scored_or_dropped(function, caplog):
    with caplog.at_level(logging.WARNING):
        source = make(function, on_error="score", error_score=-3.0)
        scored = source.score(rollout_of(PAIRS))
    assert scored.scores.tolist() == [1.0, -3.0]
    assert scored.valid.all()
    name = function.__name__
    assert scored.metrics == {f"reward_errors/{name}": (1.0, 1.0)}
    assert f"1 rows scored -3.0: reward function {name}" in caplog.text
    dropped = make(function, on_error="drop").score(rollout_of(PAIRS))
    assert dropped.valid.tolist() == [True, False]
    assert dropped.scores[0] == 1.0


def test_a_call_that_fails_as_a_batch_only_is_reported_and_logs_once(caplog):
    def reward(prompts, log_metric):
        log_metric("calls", 1.0)
        return raises_in_batches(prompts)

    judged = make(reward, on_error="drop").score(rollout_of(PAIRS))
    assert judged.scores.tolist() == [2.0, 2.0]
    assert judged.metrics == {"calls": (1.0, 1.0)}
    assert "busy when called with all 2 rows, but not on any single row" in caplog.text


def test_dense_rewards_survive_a_failing_neighbor():
    def reward(prompts, completion_ids):
        if "w7" in prompts:
            raise ValueError
        return [[1.0] * len(ids) for ids in completion_ids]

    judged = make(reward, on_error="drop").score(rollout_of(PAIRS))
    assert judged.valid.tolist() == [True, False]
    assert judged.token_rewards.tolist() == [[1.0, 1.0, -2.0], [0.0, 0.0, 0.0]]
    assert judged.scores.tolist() == [3.0, 0.0]


async def slow(completions, answer):
    await asyncio.sleep(0.001)
    return [float(a) for a in answer]


class Judge:
    async def __call__(self, answer):
        return [float(a) for a in answer]


@pytest.mark.parametrize(
    "function",
    [
        slow,
        Judge(),
        functools.partial(slow),
        lambda completions, answer: slow(completions, list(answer)),  # no coroutine function
    ],
)
def test_asynchronous_functions(function):
    assert make(function).score(rollout_of(PAIRS, answer=["1", "2"])).scores.tolist() == [1.0, 2.0]


def test_asynchronous_functions_work_inside_the_loop_of_environments():
    async def main():
        return make(slow).score(rollout_of(PAIRS, answer=[1, 2]))

    assert on_event_loop(main(), "environments").result(timeout=60).scores.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("on_error", ["typo", "score"])
def test_what_an_error_does_is_checked(on_error):
    with pytest.raises(ConfigError, match=f"on_error='{on_error}' with error_score=None must be"):
        make(len, on_error=on_error)


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_an_asynchronous_exception_names_its_row(on_error):
    source = make(slow, on_error=on_error)
    rollout = rollout_of(PAIRS, answer=["1", "x"])
    if on_error == "drop":
        assert source.score(rollout).valid.tolist() == [True, False]
    else:
        with pytest.raises(RewardError, match=r"slow raised ValueError: .*'x', on row 1"):
            source.score(rollout)


RELEASE = threading.Event()


def hangs(prompts):
    if any("w7" in prompt for prompt in prompts):
        RELEASE.wait(30)
    return [1.0] * len(prompts)


async def hangs_elsewhere(prompts):
    await asyncio.sleep(30 * any("w7" in prompt for prompt in prompts))
    return [1.0] * len(prompts)


@pytest.mark.parametrize("function", [hangs, hangs_elsewhere])
def test_a_row_whose_reward_hangs_is_dropped(function, caplog):
    RELEASE.clear()
    begin = time.monotonic()
    output = make(function, timeout=0.3).score(rollout_of(PAIRS))
    assert time.monotonic() - begin < 10
    RELEASE.set()
    assert output.valid.tolist() == [True, False]
    assert output.metrics == {f"reward_errors/{function.__name__}": (1.0, 1.0)}
    assert "did not return within 0.3 s (reward_timeout), on row 1" in caplog.text


def test_a_batch_that_takes_long_is_scored_row_by_row(caplog):
    def slow(prompts):
        time.sleep(0.3 * len(prompts))
        return [1.0] * len(prompts)

    output = make(slow, timeout=0.5).score(rollout_of(PAIRS))
    assert output.scores.tolist() == [1.0, 1.0]
    assert "(reward_timeout) when called with all 2 rows, but not on any single" in caplog.text


def test_functions_log_metrics_and_columns():
    def reward(completions, log_metric, log_extra):
        log_metric("length", 2.0)
        log_metric("length", 4.0)
        log_metric("rate", 1.0, 3)
        log_metric("rate", 0.0, 1)
        log_extra("seen", [c.strip() for c in completions])
        return [0, 0]

    output = make(reward).score(rollout_of(PAIRS))
    assert Metrics(output.metrics).means() == {"length": 3.0, "rate": 0.75}
    assert output.columns == {"seen": ["w8 w9", "w10"]}


def test_an_asynchronous_client_lives_from_step_to_step():
    loops = set()

    async def reward(prompts):
        loops.add(asyncio.get_running_loop())
        return [0.0] * len(prompts)

    source = make(reward)
    source.score(rollout_of(PAIRS))
    source.score(rollout_of(PAIRS))
    assert len(loops) == 1
    assert not next(iter(loops)).is_closed()


def test_text_is_decoded_once_and_only_when_asked_for(monkeypatch):
    texts = TextCache(word_tokenizer())
    calls = []
    decode = type(texts.tokenizer).batch_decode

    def counted(self, *args, **kwargs):
        calls.append(args)
        return decode(self, *args, **kwargs)

    monkeypatch.setattr(type(texts.tokenizer), "batch_decode", counted)
    rollout = rollout_of(PAIRS)
    RewardFunction(lambda completion_ids: [0, 0], texts).score(rollout)
    assert not calls
    for _ in range(3):
        RewardFunction(lambda completions: [0, 0], texts).score(rollout)
    assert len(calls) == 2  # the ends of the prompts, and these with the responses
