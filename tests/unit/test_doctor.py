"""``kedge doctor`` on recorded runs: it names the planted cause, and says nothing of good ones;
``kedge compare``: means and ranges by hand, and the picture of recorded runs.

The runs were made by tests/data/doctor/record.py; good_demo_N are those of the demo, seeds 0 to 2.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.errors import DataError
from kedge.loop.metrics import NAMES
from kedge.reporting.doctor import RULES, examine
from kedge.reporting.log import RunLog, band, end_stats, read_log

RUNS = Path(__file__).parents[1] / "data" / "doctor"
GOOD = sorted(RUNS.glob("good*.jsonl"))
BAD = sorted(file for file in RUNS.glob("*.jsonl") if file not in GOOD)
assert (len(BAD), len(GOOD)) == (10, 4)


def rules(log: RunLog) -> list[str]:
    return [found.rule for found in examine(log)]


def scored(start: float, end: float, **series: list[float]) -> RunLog:
    """Ten rows of 64 responses whose score goes straight from start to end, deviation 0.5."""
    return log(
        objective__scores=[start + (end - start) * i / 9 for i in range(10)],
        objective__scores_std=[0.5] * 10,
        episode=[64.0 * (i + 1) for i in range(10)],
        **series,
    )


def log(**series: list[float]) -> RunLog:
    names = {name.replace("__", "/"): values for name, values in series.items()}
    count = len(next(iter(names.values())))
    return RunLog("made", [{name: v[i] for name, v in names.items()} for i in range(count)])


def steady(**values: float) -> RunLog:
    """Eight rows of the same numbers."""
    return log(**{name: [value] * 8 for name, value in values.items()})


CUT = {"completions__truncated_ratio": 1.0}


def test_length_and_precision_of_agents() -> None:
    """Success in fewer turns is no hack of the length, longer turns are; bf16 rounds log-probs."""
    shorter = [69.0 - 3 * i for i in range(10)]
    fewer = {"completions__mean_length": shorter, "environment__turns": [x / 7 for x in shorter]}
    assert rules(scored(0.5, 1.0, completions__mean_length=shorter)) == [
        "the score follows the length"
    ]
    assert rules(scored(0.5, 1.0, **fewer)) == []
    longer = {"completions__mean_length": [30.0 + 6 * i for i in range(10)]}
    (finding,) = examine(scored(0.5, 1.0, **longer, environment__turns=[5.0] * 10))
    assert "mean length 7 to 16 tokens a turn" in finding.seen
    gap = scored(0.5, 1.0, rollout__logprob_gap=[0.028] * 10)
    assert rules(gap) == ["rollout engine and learner disagree"]
    assert rules(replace(gap, bf16=True)) == []


@pytest.mark.parametrize("file", BAD, ids=lambda f: f.stem)
def test_the_planted_cause_is_found(file: Path) -> None:
    assert file.stem.replace("_", " ") in rules(read_log(file))


@pytest.mark.parametrize("file", GOOD, ids=lambda f: f.stem)
def test_nothing_is_said_of_a_good_run(file: Path) -> None:
    assert rules(read_log(file)) == []


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (steady(objective__kl=-1.0, completions__mean_length=10.0), "the KL is negative"),
        (steady(rollout__too_old_tokens=0.1), "tokens too old to train on"),
        (log(grad_norm=[1.0, 1.1, 0.9, 1.0, 80.0, 1.0]), "gradients spike"),
        (log(grad_norm=[1.0, 1.0], skipped_steps=[0.0, 1.0]), "gradients spike"),
        (steady(**CUT, val__num_eos_tokens=1.0), "responses do not end"),
        (steady(**CUT, val__num_eos_tokens=0.0), "nothing ends"),
        (scored(1.0, 0.1), "the score falls"),
        (
            scored(1.0, 2.0, completions__truncated_ratio=[0.02 * i for i in range(10)]),
            "fewer responses end",
        ),
        (
            steady(environment__tool_calls=0.0, environment__invalid_calls=0.0),
            "tools are never called",
        ),
        (
            steady(environment__tool_calls=2.0, environment__invalid_calls=1.9),
            "tool calls are never valid",
        ),
        (
            steady(environment__seconds=3.0, environment__model_seconds=1.0, time__step=6.0),
            "environments are slower than the model",
        ),
        # chance: 0.5 / sqrt(64 * 2) = 0.044; the first and last fifth are 0.06 apart
        (scored(1.0, 1.0675), "the score did not rise"),
    ],
)
def test_rules_without_a_recorded_run_by_hand(made: RunLog, rule: str) -> None:
    assert rules(made) == [rule]


def test_a_reward_of_one_turn_is_blamed_where_the_score_stays() -> None:
    one_turn = {"environment__last_reward_share": [1.0] * 10, "environment__turns": [5.0] * 10}
    rule = "the reward comes from one turn alone"
    assert rules(scored(1.0, 1.05, **one_turn)) == [rule, "the score did not rise"]
    assert rules(scored(1.0, 2.0, **one_turn)) == []
    assert rule not in rules(scored(1.0, 1.05, **one_turn | {"environment__turns": [1.0] * 10}))


def test_a_fall_after_noise_was_scaled_up_is_named() -> None:
    scores = [0.5, 0.7, 0.9, 1.0, 1.0, 0.3, 0.0, 0.0, 0.0, 0.0]
    raw = [0.3, 0.3, 0.2, 0.05, 0.02, 0.3, 0.1, 0.1, 0.1, 0.1]
    made = {"objective__scores": scores, "val__raw_advantage_std": raw}
    found = examine(log(**made, val__advantage_std=[1.0] * 10))
    assert [finding.rule for finding in found] == ["fell after it was solved"]
    assert "from a deviation of 0.02, 15 times as much" in found[0].seen
    assert rules(log(**made, val__advantage_std=[x / 0.3 for x in raw])) == []


def test_runs_that_rise_or_have_one_length_on_purpose() -> None:
    assert rules(RunLog("bare", [{"objective/scores": 1.0}])) == []
    assert rules(scored(1.0, 1.2)) == []
    slow = {"environment__seconds": 3.0, "environment__model_seconds": 4.0, "time__step": 9.0}
    calls = {"environment__tool_calls": 2.0, "environment__invalid_calls": 0.5}
    assert rules(steady(**slow, **calls)) == []
    some_cut = [0.01 * i for i in range(10)]
    assert rules(scored(1.0, 2.0, completions__truncated_ratio=some_cut)) == []
    cut = {"completions/truncated_ratio": 1.0, "val/num_eos_tokens": 0.0}
    assert rules(RunLog("made", [cut] * 4, fixed_length=True)) == []
    assert rules(RunLog("made", [*[cut] * 3, cut | {"val/num_eos_tokens": 1.0}])) == [
        "responses do not end"
    ]


def test_a_mask_that_leaves_out_more_and_more_is_named() -> None:
    row = {"objective/scores": 1.0, "val/ratio": 1.0, "policy/clipfrac_avg": 0.02}
    rows = [row] * 9 + [row | {"policy/clipfrac_avg": 0.07}]
    assert rules(RunLog("made", rows, masked=True)) == ["updates are too large"]
    assert rules(RunLog("made", rows)) == rules(RunLog("made", [row] * 9, masked=True)) == []


def test_a_value_with_little_left_to_explain_is_not_blamed() -> None:
    for spread, found in (
        ([0.4, 0.4, 0.4, 0.3, 0.3, 0.3], ["the value explains nothing"]),
        ([0.4, 0.4, 0.2, 0.1, 0.1, 0.1], []),
    ):
        made = log(val__explained_variance=[-1.0] * 6, objective__scores_std=spread)
        assert rules(made) == found


def test_what_the_run_asked_for_is_read_beside_its_log(tmp_path: Path) -> None:
    row = {"objective/scores": 1.0, "completions/truncated_ratio": 1.0, "val/num_eos_tokens": 0.0}
    (tmp_path / "metrics.jsonl").write_text((json.dumps(row) + "\n") * 4)
    assert rules(read_log(tmp_path)) == ["nothing ends"]
    stops = {"stop_token": None, "stop_token_id": None, "stop_token_ids": None}
    for strings, found in (([], []), (["."], ["nothing ends"])):
        (tmp_path / "run.json").write_text(
            json.dumps({"options": {**stops, "stop_strings": strings}})
        )
        assert rules(read_log(tmp_path)) == found


def test_rules_read_metrics_that_exist() -> None:
    text = "".join(inspect.getsource(rule) for rule in RULES)
    asked = set(re.findall(r'(?:series|first|last)\("([^"]+)"', text))
    assert asked
    assert asked <= set(NAMES) | {"grad_norm", "lr"}


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sound = (RUNS / "dead_reward.jsonl").read_bytes()  # cut off in mid-line
    (tmp_path / "metrics.jsonl").write_bytes(sound + sound.splitlines()[-1][:40])
    assert main(["compare", str(tmp_path), "--output", str(tmp_path / "x.png")]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path), str(GOOD[0])]) == 1
    out = capsys.readouterr().out
    assert "dead reward: all scores of a batch are equal" in out
    assert "good.jsonl: 24 rows of metrics up to iteration 24, nothing found" in out
    assert "only whether the reward says so" in out
    assert main(["doctor", str(GOOD[0])]) == 0
    assert main(["doctor"]) == 2
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2


ROW = b'{"objective/scores": 1.0, "step": 1, "episode": 8}'


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"objective/scores": 1.0, "st', b"\xff\xfe", b"[1]", b"3", b"null", b"\0" * 9),
        *(b"[" * 100_000, ROW[:-1] + b', "x": "\xed\xa0\x80"}', b'{"x": ' + b"1" * 5000 + b"}"),
    ],
)
def test_a_damaged_line_costs_no_other(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(ROW + b"\n" + line + b"\n" + ROW + b"\n" + line)
    assert len(read_log(tmp_path).rows) == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"skipped 2 damaged lines of {tmp_path.name}/metrics.jsonl"
    ]


@pytest.mark.parametrize("line", [b"{", b'{"eval_x": 1}', b""])
def test_a_log_without_training_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n")
    with pytest.raises(DataError, match="no training rows"):
        read_log(tmp_path)


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    row = {"objective/scores": 1.0, "val/ratio": float("nan"), "note": "text", "x": 10**400}
    text = json.dumps(row)[:-1] + ', "lr": 1e999}'
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    assert read_log(tmp_path).rows == [{"objective/scores": 1.0}]


def test_endings_of_episodes_and_a_critic_that_starts_as_noise() -> None:
    cut = {"environment__ended_turn_limit": [0.5] * 10, "environment__ended_done": [0.5] * 10}
    (finding,) = examine(scored(0.5, 1.0, **cut))
    assert (finding.rule, finding.seen) == (
        "episodes end before they are done",
        "50% by turn limit",
    )
    assert rules(scored(0.5, 1.0, environment__ended_grader_error=[0.1] * 10)) != []
    noise = {"val__explained_variance": [-0.4] * 4 + [0.5] * 6, "lr": [1e-5] * 10}
    falling = scored(0.5, 0.4, **noise)
    assert "the first iterations were noise" in rules(falling)
    warm = {**noise, "lr": [0.0] * 4 + [1e-5] * 6}  # the value trained alone
    assert "the first iterations were noise" not in rules(scored(0.5, 0.4, **warm))
    assert rules(scored(0.5, 1.0, **noise)) == []  # it rose all the same


# -- kedge compare --------------------------------------------------------------------------------


def run_of(*scores: float) -> RunLog:
    rows = [{"episode": 64.0 * (i + 1), "objective/scores": s} for i, s in enumerate(scores)]
    return RunLog("made", rows)


def test_bands_by_hand() -> None:
    found = band([run_of(1.0, 2.0, 3.0), run_of(3.0, 6.0)], "objective/scores")
    assert found is not None
    assert (found.x, found.mean) == ([64.0, 128.0], [2.0, 4.0])
    assert (found.low, found.high) == ([1.0, 2.0], [3.0, 6.0])
    assert band([run_of(1.0), run_of(2.0)], "objective/kl") is None
    assert end_stats([run_of(0.0, 0.0, 0.0, 0.0, 1.0), run_of(0.0, 3.0)], "objective/scores") == (
        2.0,
        1.0,
        3.0,
    )
    assert end_stats([run_of(1.0)], "val/ratio") is None
    assert end_stats([run_of(0.5, 9.0), run_of(1.5, 9.0)], "objective/scores", at="start") == (
        1.0,
        0.5,
        1.5,
    )


def test_runs_are_drawn_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demos = ",".join(str(RUNS / f"good_demo_{i}.jsonl") for i in range(3))
    picture = tmp_path / "new" / "both.png"
    words = ["compare", f"demo={demos}", str(RUNS / "good.jsonl"), "--output", str(picture)]
    assert main(words) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "demo" in out
    assert "good.jsonl" in out
    assert re.search(r"\d -> -?\d\.\d+ \(-?\d\.\d+ \.\. \d\.\d+\)", out), out
    for metric in ("objective/scores", "policy/entropy_avg", "completions/mean_length"):
        assert metric in out  # whole, in 80 columns


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(RUNS / "good.jsonl")
    picture = ["--output", str(tmp_path / "x.png")]
    assert main(["compare", "=", *picture]) == 2
    assert main(["compare", good, "--metrics", "no/such", *picture]) == 2
    assert "no run has any of no/such" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), *picture]) == 2
