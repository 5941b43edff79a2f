"""Verifiers of texts, formats, lengths, expressions; what all share; workers, columns, mixtures."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from kedge import plugins, verifiers
from kedge.cli.arguments import parse
from kedge.cli.data import load_prompts
from kedge.data.mixer import choose_rows, mix, parse_mixer
from kedge.records.errors import ConfigError, DataError, RewardError
from kedge.verifiers import ByColumn, by_column, gsm8k, known_verifiers, r1_style_format
from kedge.verifiers.base import Unanswered, Verifier, map_parallel
from kedge.verifiers.texts import f1, has_think_answer, normalize
from kedge.verifiers.worker import WorkerPool
from tests.unit.test_verifiers_constraints import CASES

GOOD = "<think>1 + 1</think> <answer>2</answer>"


def test_import_is_light() -> None:
    code = (
        "import sys, kedge.verifiers;"
        "print([m for m in ('torch', 'numpy', 'sympy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_public_exists() -> None:
    assert all(hasattr(verifiers, name) for name in verifiers.__all__)


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        (GOOD, True, True),
        (f"  {GOOD}\n", True, True),
        ("<think>a\nb</think>\n\n<answer>c\nd</answer>", True, True),
        ("<think>a</think><answer>b</answer>", True, True),
        (f"{GOOD} and more", False, True),
        (f"Well. {GOOD}", False, True),
        (f"{GOOD}{GOOD}", False, True),
        ("a</think> <answer>b</answer>", False, True),
        ("<think>a</think> so <answer>b</answer>", False, False),
        ("<think>a <answer>b</answer></think>", False, False),
        ("<answer>b</answer><think>a</think>", False, False),
        ("<think></think><answer>b</answer>", False, True),
        ("<think>a</think><answer> </answer>", False, True),
        ("<think>a</think><answer>b", False, False),
        ("<THINK>a</THINK><ANSWER>b</ANSWER>", False, False),
        ("<think>a</answer></think><answer>", False, False),
        ("", False, False),
    ],
)
def test_think_answer(text: str, strict: bool, loose: bool) -> None:
    assert has_think_answer(text) is strict
    assert has_think_answer(text, strict=False) is loose
    assert verifiers.think_answer([text]) == [float(strict)]
    assert verifiers.r1_style_format([text], prompts=["x"]) == [float(loose)]


def test_think_opened_by_the_prompt() -> None:
    assert has_think_answer("a</think><answer>b</answer>", opened=True)
    assert not has_think_answer(GOOD, opened=True)


ENORMOUS: dict[str, tuple[list[Any], list[str]]] = {
    "formats": (
        [verifiers.r1_style_format, verifiers.think_answer],
        ["<think>", "</think>", "</think><answer>", "<answer>", " "],
    ),
    "numbers": (
        [verifiers.gsm8k],
        ["1,", "1,234,", "\\boxed{", "####", "#### 1", "-", "1/", "$", "answer is ", "<answer>",
         "1 ", " ", "{", "}", "\\frac{1}", "\n", "\x00", "é1.", "= 1", "1e5", "\\boxed 1"],
    ),
    "mathematics": (
        [verifiers.math_verifier(symbolic=False)],
        ["$", "$x", "\\(", "\\boxed{", "answer is ", "{,", " and "],
    ),
    "instructions": (
        [verifiers.ifeval],
        ["*", "* a\n", "[", "<<", ".", "A. ", "\n\n", "***", "p. ", "**a", " "],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENORMOUS)
def test_time_is_linear_in_enormous_responses(kind: str) -> None:
    """Quadratic would be hours."""
    functions, pieces = ENORMOUS[kind]
    truth: Any = "18"
    if kind == "instructions":
        pytest.importorskip("py3langid")
        truth = {"instruction_id_list": [c[0] for c in CASES[:30]]}
        truth["kwargs"] = [given for _, given, *_ in CASES[:30]]
    for piece in pieces:
        text = piece * (100_000 // len(piece))
        began = time.process_time()
        for verify in functions:
            (score,) = verify([text], ground_truth=[truth])
            assert score == 0.0 or kind == "instructions"
        assert time.process_time() - began < 10, piece


def test_tag_count() -> None:
    scores = verifiers.tag_count_reward()([GOOD, "<think><think></think>", "", GOOD + "<think>"])
    assert scores == [1.0, 0.25, 0.0, 0.75]
    with pytest.raises(ConfigError, match="tags"):
        verifiers.tag_count_reward([])


def test_f1_by_hand() -> None:
    # common: cat, sat (2); response has 3 words, truth 4: 2 * 2 / 7
    assert f1("The cat sat, cat!", "a cat sat on mats") == pytest.approx(4 / 7)
    assert f1("", "") == f1("the", "a") == 1.0
    assert f1("", "cat") == f1("dog", "cat") == 0.0


def test_normalize() -> None:
    assert normalize("  The \uff23\uff21\uff34's\tStraße, an A ") == "cats strasse"


@pytest.mark.parametrize(
    ("text", "truth", "match", "exact", "contains"),
    [
        ("Paris", "Paris", 1, 1, 1),
        (" Paris\n", "Paris", 1, 1, 1),
        ("the paris.", "Paris", 1, 0, 1),
        ("It is Paris", "Paris", 0, 0, 1),
        (r"It is \boxed{Paris}", "Paris", 1, 0, 0),
        ("<answer>Paris</answer>", ["Lyon", "Paris"], 1, 0, 0),
        ("comparison", "Paris", 0, 0, 0),
        ("<think>Paris</think> Lyon", "Paris", 0, 0, 0),
        ("Lyon", "Paris", 0, 0, 0),
        ("", "Paris", 0, 0, 0),
        ("42", 42, 1, 1, 1),
    ],
)
def test_string_verifiers(text: str, truth: object, match: int, exact: int, contains: int) -> None:
    assert verifiers.string_match([text], ground_truth=[truth]) == [match]
    assert verifiers.exact_match([text], ground_truth=[truth]) == [exact]
    assert verifiers.string_contains([text], ground_truth=[truth]) == [contains]


def test_string_f1_takes_the_best() -> None:
    assert verifiers.string_f1(["cat"], ground_truth=[["cat sat", "dog"]]) == [pytest.approx(2 / 3)]


@pytest.mark.parametrize("truth", [[], [None], {"a": 1}])
def test_string_truths_must_be_texts(truth: object) -> None:
    with pytest.raises(RewardError, match="string_match"):
        verifiers.string_match(["x"], ground_truth=[truth])


def test_soft_overlong_by_hand() -> None:
    reward = verifiers.soft_overlong_punishment(max_length=10, cache=4)
    lengths = (0, 6, 7, 10, 11, 99)
    assert reward(completion_ids=[[0] * n for n in lengths]) == [0, 0, -0.25, -1, -1, -1]
    with pytest.raises(ConfigError, match="cache=11"):
        verifiers.soft_overlong_punishment(max_length=10, cache=11)


def test_lengths_by_hand() -> None:
    ids = [[0] * 5, [0] * 10, [0] * 40]
    wanted = [10, 10, None]
    assert verifiers.length_close_to()(completion_ids=ids, ground_truth=wanted) == [0.5, 1.0, None]
    at_most = verifiers.length_at_most(column="limit", slope=0.05, offset=0.5)
    assert at_most(completion_ids=ids, limit=[10, 8, 10]) == pytest.approx([0.75, 0.4, 0.0])
    with pytest.raises(RewardError, match="'limit'"):
        at_most(completion_ids=ids, limit=[10, -8, 10])


def test_unanswered_scores_zero_and_is_counted() -> None:
    def check(text: str, _: object) -> float:
        if text == "slow":
            raise Unanswered("timeouts")
        return 1.0

    seen: list[tuple[str, float]] = []
    verify = Verifier(check, name="toy", column=None)
    texts = ["slow", "x", "slow"]
    scores = verify(texts, log_metric=lambda name, value: seen.append((name, value)))
    assert scores == [0.0, 1.0, 0.0]
    assert seen == [("timeouts/toy", 2.0)]
    assert verify(["slow"]) == [0.0]


def test_parallel_keeps_order_and_raises() -> None:
    gate = threading.Barrier(3, timeout=10)

    def wait(n: int) -> int:
        gate.wait()
        return n

    assert map_parallel(wait, [3, 1, 2], threads=3) == [3, 1, 2]
    with pytest.raises(ZeroDivisionError):
        map_parallel(lambda n: 1 / n, [1, 0], threads=2)


def test_what_is_no_completion_is_an_error() -> None:
    with pytest.raises(RewardError, match="got int"):
        verifiers.gsm8k([3], ground_truth=["3"])
    with pytest.raises(RewardError, match="1 values for 2"):
        verifiers.gsm8k(["3", "3"], ground_truth=["3"])


@pytest.mark.parametrize(
    ("options", "text", "score"),
    [
        ({"pattern": r"\d+"}, "a 12 b", 1.0),
        ({"pattern": r"\d+", "mode": "match"}, "a 12 b", 0.0),
        ({"pattern": r"\d+", "mode": "fullmatch"}, "12", 1.0),
        ({"pattern": r"\d+", "mode": "fullmatch"}, "12 ", 0.0),
        ({"pattern": r"a.b"}, "a\nb", 1.0),
        ({"pattern": "ABC"}, "abc", 0.0),
        ({"pattern": "ABC", "ignore_case": True}, "abc", 1.0),
        ({"pattern": ""}, "", 1.0),
    ],
)
def test_regex(options: dict[str, object], text: str, score: float) -> None:
    assert verifiers.regex_reward(**options)([text]) == [score]  # type: ignore[arg-type]


def test_regex_from_a_column() -> None:
    scores = verifiers.regex_match(["ab", "ab", "x"], ground_truth=["b$", "^b", None])
    assert scores == [1.0, 0.0, None]


def test_catastrophic_backtracking_scores_zero_in_time() -> None:
    seen: list[str] = []
    verify = verifiers.regex_reward(r"(x+x+)+y", timeout=2.0)
    began = time.perf_counter()
    scores = verify(["x" * 5000, "xxy"], log_metric=lambda name, value: seen.append(name))
    assert scores == [0.0, 1.0]
    assert seen == ["timeouts/regex"]
    assert time.perf_counter() - began < 60


def test_bad_patterns_are_errors() -> None:
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        verifiers.regex_reward("(")
    with pytest.raises(ConfigError, match="mode"):
        verifiers.regex_reward("a", mode="find")
    with pytest.raises(RewardError, match="not a valid regular expression"):
        verifiers.regex_match(["x"], ground_truth=["("])
    with pytest.raises(RewardError, match="must be a regular expression"):
        verifiers.regex_match(["x"], ground_truth=[3])


def test_results_and_errors_in_threads_and_after_a_pickle() -> None:
    pool = pickle.loads(pickle.dumps(WorkerPool("math:isqrt", timeout=30, size=2)))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(pool.call, range(8))) == [0, 1, 1, 1, 2, 2, 2, 2]
    with pytest.raises(Unanswered, match="ValueError"):
        pool.call(-1)
    assert pool.call(16) == 4
    workers = list(pool._alive)
    assert 1 <= len(workers) <= 2
    del pool
    assert all(worker.returncode is not None for worker in workers)


def test_a_task_that_hangs_is_killed_and_the_next_one_answered() -> None:
    pool = WorkerPool("time:sleep", timeout=2.0)
    assert pool.call(0) is None
    began = time.perf_counter()
    with pytest.raises(Unanswered) as caught:
        pool.call(100)
    assert caught.value.kind == "timeouts"
    assert time.perf_counter() - began < 30
    assert pool.call(0) is None


def test_a_worker_that_dies_is_replaced() -> None:
    pool = WorkerPool("os:kill", timeout=30)
    parent = os.getpid()
    pool.call(parent, 0)
    (worker,) = pool._alive
    with pytest.raises(Unanswered) as caught:
        pool.call(worker.pid, int(signal.SIGKILL))
    assert caught.value.kind == "crashes"
    pool.call(parent, 0)
    (worker,) = pool._alive
    worker.kill()  # while idle
    worker.wait()
    assert pool.call(parent, 0) is None


def test_memory_is_limited_and_what_a_task_prints_is_no_answer() -> None:
    with pytest.raises(Unanswered, match="MemoryError"):
        WorkerPool("builtins:bytearray", timeout=30, memory_mb=512).call(1 << 31)
    assert WorkerPool("builtins:print", timeout=30).call('{"result": 1}') is None


@pytest.mark.parametrize("task", ["no_such_module:f", "math:no_such_function"])
def test_a_worker_that_cannot_start_is_an_error(task: str) -> None:
    with pytest.raises(ConfigError, match=task):
        WorkerPool(task, timeout=1).call()
    with pytest.raises(ConfigError, match="timeout=0"):
        WorkerPool("math:isqrt", timeout=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_starts_its_own_workers() -> None:
    pool = WorkerPool("os:getppid", timeout=30)
    assert pool.call() == os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if pool.call() == os.getpid() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.call() == os.getpid()


def constant(completions: list[str]) -> list[float]:
    return [0.25] * len(completions)


def by_length(completions: list[str], prompts: list[str], limit: list[int]) -> list[float | None]:
    return [
        None if not p else float(len(c) < n)
        for c, p, n in zip(completions, prompts, limit, strict=True)
    ]


def test_each_row_goes_to_its_verifier() -> None:
    verify = by_column()
    scores = verify(
        ["The answer is 4", "4", "no commas", r"\boxed{1/2}", "Paris", "x", "4"],
        dataset=["gsm8k", "gsm8k", "ifeval", "math", "string_match", None, "gsm8k"],
        ground_truth=[
            "4", "5", {"instruction_id_list": ["punctuation:no_comma"]}, r"\frac12", "paris", None,
            "#### 4",
        ],
    )  # fmt: skip
    assert scores == [1.0, 0.0, 1.0, 1.0, 1.0, None, 1.0]


def test_several_verifiers_per_row_add_up() -> None:
    verify = by_column({"constant": constant}, weights={"constant": 4.0})
    scores = verify(
        ["4", "4"],
        dataset=[["gsm8k", "constant"], ["constant"]],
        ground_truth=[["4", None], [None]],
    )
    assert scores == [2.0, 1.0]


def test_a_verifier_sees_its_own_rows_of_every_column() -> None:
    verify = ByColumn({"short": by_length, "gsm8k": gsm8k.on("elsewhere")}, truth="limit")
    scores = verify(
        ["abc", "7", "abc", "abc"],
        prompts=["p", "q", "r", ""],
        dataset=["short", "gsm8k", "short", "short"],
        limit=[4, "7", 3, 9],
        log_extra=print,
    )
    assert scores == [1.0, 1.0, 0.0, None]


@pytest.mark.parametrize("name", ["gsm", "GSM9K", "", 3, ["gsm8k", ["gsm8k"]]])
def test_an_unknown_name_is_an_error(name: Any) -> None:
    verify = by_column()
    truth = ["4", "4"] if isinstance(name, list) else "4"
    with pytest.raises(RewardError, match="unknown verifier"):
        verify(["4"], dataset=[name], ground_truth=[truth])
    with pytest.raises(RewardError, match="row 1"):
        verify.check(["gsm8k", name])


def test_names_are_suggested_and_renamed() -> None:
    with pytest.raises(RewardError, match="the nearest is gsm8k"):
        by_column()(["4"], dataset=["gsm8"], ground_truth=["4"])
    verify = by_column(rename={"openai/gsm8k": "gsm8k"})
    assert verify(["4"], dataset=["openai/gsm8k"], ground_truth=["4"]) == [1.0]
    verify.check(["openai/gsm8k", None, ["math", "gsm8k"]])


def test_ground_truths_must_match_the_names() -> None:
    with pytest.raises(RewardError, match="must be a list of 2 ground truths"):
        by_column()(["4"], dataset=[["gsm8k", "math"]], ground_truth=["4"])
    with pytest.raises(RewardError, match="column 'dataset'"):
        by_column()(["4"], ground_truth=["4"])


def test_bad_verifiers_are_errors() -> None:
    with pytest.raises(ConfigError, match="verifiers must not be empty"):
        ByColumn({})
    with pytest.raises(ConfigError, match="'x' must be"):
        ByColumn({"x": 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="unknown verifier 'maths'"):
        by_column(weights={"maths": 2.0})
    short = ByColumn({"x": lambda completions: [1.0]})
    with pytest.raises(RewardError, match="1 rewards for 2"):
        short(["a", "b"], dataset=["x", "x"], ground_truth=[0, 0])
    odd = ByColumn({"x": lambda completions: [float("nan")]})
    with pytest.raises(RewardError, match="returned nan"):
        odd(["a"], dataset=["x"], ground_truth=[0])


def test_it_reports_rates() -> None:
    seen: dict[str, float] = {}
    counted: set[float] = set()
    verify = by_column({"constant": constant})
    verify(
        ["4", "5", "6"],
        dataset=["gsm8k", "gsm8k", "constant"],
        ground_truth=["4", "4", None],
        log_metric=lambda name, value, weight: seen.update({name: value}) or counted.add(weight),
    )
    assert seen == {
        "gsm8k_reward": 0.5,
        "gsm8k_correct_rate": 0.5,
        "constant_reward": 0.25,
        "constant_correct_rate": 1.0,
        "verifiable_reward": pytest.approx(1.25 / 3),
        "verifiable_correct_rate": pytest.approx(2 / 3),
    }
    assert counted == {1, 2, 3}  # rows behind each


def test_parse_mixer() -> None:
    parts = [("name", 0.5), ("other", 400)]
    assert (
        parse_mixer("name 0.5 other 400") == parse_mixer(["name", "0.5", "other", "400"]) == parts
    )
    assert parse_mixer("a 1.0 b 1") == [("a", 1.0), ("b", 1)]


@pytest.mark.parametrize(
    "mixer", ["", "name", "name 0.5 other", "name 0", "name -1", "name 0.0", "name x", "name 1e3",
              "name nan", "name inf", "0.5 name"],
)  # fmt: skip
def test_bad_mixers_are_errors(mixer: str) -> None:
    with pytest.raises(DataError, match=r"name 0\.5 other 400"):
        parse_mixer(mixer)


def test_rows_chosen() -> None:
    half = choose_rows("a", 0.5, 10, seed=0, position=0)
    assert len(set(half)) == len(half) == 5
    assert half == choose_rows("a", 0.5, 10, seed=0, position=0)
    assert half != choose_rows("a", 0.5, 10, seed=1, position=0)
    assert half != choose_rows("a", 0.5, 10, seed=0, position=1)
    assert choose_rows("a", 1.0, 3, seed=0, position=0) == [0, 1, 2]
    many = Counter(choose_rows("a", 7, 3, seed=0, position=0))
    assert sorted(many.values()) == [2, 2, 3]
    with pytest.raises(DataError, match="takes no row of 'a', which has 3"):
        choose_rows("a", 0.1, 3, seed=0, position=0)
    with pytest.raises(DataError, match="which has 0"):
        choose_rows("a", 3, 0, seed=0, position=0)


def test_mix() -> None:
    sources = {
        "a": Dataset.from_dict({"prompt": ["a0", "a1", "a2", "a3"]}),
        "b": Dataset.from_dict({"prompt": ["b0", "b1"], "answer": [1, 2]}),
    }
    mixed = mix("a 0.5 b 3", sources.__getitem__, seed=3, name_column="dataset")
    assert mixed["dataset"][:] == ["a"] * 2 + ["b"] * 3
    assert mixed["answer"][:2] == [None, None]
    assert set(mixed["prompt"][2:]) == {"b0", "b1"}
    again = mix("a 0.5 b 3", sources.__getitem__, seed=3, name_column="dataset")
    assert mixed[:] == again[:]


def test_mix_errors() -> None:
    one = Dataset.from_dict({"prompt": ["a"], "x": [1]})
    other = Dataset.from_dict({"prompt": ["a"], "x": [["list"]]})
    with pytest.raises(DataError, match="cannot be concatenated"):
        mix("a 1 b 1", {"a": one, "b": other}.__getitem__)
    with pytest.raises(DataError, match="already has a column 'x'"):
        mix("a 1", {"a": one}.__getitem__, name_column="x")


def test_the_command_line_mixes(tmp_path: Path) -> None:
    for name, rows in (("a", 40), ("b", 2)):
        lines = (json.dumps({"prompt": f"{name}{row}"}) for row in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    given = [str(tmp_path / "a.jsonl"), "0.5", str(tmp_path / "b.jsonl"), "6"]
    flags = ["--model_name_or_path", "m", "--reward_funcs", "r.py:f"]
    flags += ["--dataset_mixer_list", *given]
    train, test = load_prompts(parse(flags, prog="kedge ppo"))
    assert Counter(prompt[0] for prompt in train["prompt"]) == {"a": 20, "b": 6}
    assert test is None
    train, test = load_prompts(parse([*flags, "--do_eval", "--eval_steps", "1"], prog="kedge ppo"))
    assert (len(train), len(test)) == (24, 2)
    with pytest.raises(DataError, match="set only one"):
        load_prompts(parse([*flags, "--dataset_name", given[0]], prog="kedge ppo"))


@pytest.mark.parametrize(
    "name", ["gsm8k", "math", "ifeval", "code", "regex", "string_match", "exact_match",
             "string_contains", "string_f1"],
)  # fmt: skip
def test_verifiers_can_be_named_and_pickled(name: str) -> None:
    copy = pickle.loads(pickle.dumps(known_verifiers()[name]))
    assert copy.__name__ == known_verifiers()[name].__name__  # type: ignore[attr-defined]
    assert copy.on("answer").column == "answer"
    assert pickle.loads(pickle.dumps(r1_style_format))(["</think><answer>a</answer>"]) == [1.0]


def test_a_broken_plug_in_costs_no_other_verifier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = EntryPoint("broken", "no_such_module:score", "kedge.rewards")
    monkeypatch.setattr(plugins, "find", lambda group: {"broken": broken})
    assert by_column()(["18"], dataset=["gsm8k"], ground_truth=["18"]) == [1.0]
    assert caplog.text.count("'broken' of a package is no_such_module:score") == 1
