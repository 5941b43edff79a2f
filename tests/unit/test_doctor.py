"""``kedge doctor`` on recorded runs: it names the planted cause, and says nothing of good ones;
``kedge compare``: means and ranges by hand, and the picture of recorded runs; ``kedge report``:
what the page holds, from files written by hand and from a run.

The runs were made by tests/data/doctor/record.py; good_demo_N are those of the demo, seeds 0 to 2.
"""

from __future__ import annotations

import base64
import gzip
import inspect
import json
import math
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge import GRPOConfig, PPOConfig
from kedge.cli.main import main
from kedge.ext.report.command import difference
from kedge.ext.report.doctor import RULES, examine, live_findings
from kedge.ext.report.report import episodes, gather, meaning, page, story, vocabulary
from kedge.loop.metrics import NAMES, PREFIXES
from kedge.records.errors import DataError
from kedge.reporting.log import RunLog, band, end_stats, read_log
from tests.e2e.small import PROMPTS, small

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


def count_w5(completions: list[str], **_: Any) -> list[float]:
    return [float(text.split().count("w5")) for text in completions]


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
    assert rules(replace(gap, options={"bf16": True})) == []


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
        (steady(environment__tool_calls=0.0), "tools are never called"),
        (steady(environment__tool_calls=2.0, environment__invalid_calls=1.9), "tool calls fail"),
        (steady(environment__tool_calls=2.0, environment__tool_errors=1.9), "tool calls fail"),
        (
            log(
                environment__seconds=[0.3] * 8,
                environment__model_seconds=[0.1] * 8,
                time__step=[6.0] * 8,
                episode=[10.0 * i for i in range(8)],
            ),
            "environments are slower than the model",
        ),
        # chance: 0.5 / sqrt(64 * 2) = 0.044; the first and last fifth are 0.06 apart
        (scored(1.0, 1.0675), "the score did not rise"),
    ],
)
def test_rules_without_a_recorded_run_by_hand(made: RunLog, rule: str) -> None:
    assert rules(made) == [rule]


def test_every_rule_is_on_the_page() -> None:
    text = (RUNS.parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [r for r in RULES if f"| {r.__name__.replace('_', ' ')} |" not in text] == []


def test_a_limit_of_the_environment_is_not_a_missing_stop_token() -> None:
    assert rules(steady(**CUT, val__num_eos_tokens=0.0, environment__turns=8.0)) == []


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
    assert [finding.rule for finding in found] == ["the score fell after a large step"]
    assert "from a deviation of 0.02, 15 times as much" in found[0].seen
    unscaled = made | {"val__advantage_std": [x / 0.3 for x in raw]}
    assert rules(log(**unscaled)) == []
    moved = {"policy__approxkl_avg": [0.02] * 4 + [0.6] + [0.02] * 5}
    (finding,) = examine(log(**unscaled, **moved))
    assert finding.seen == "score 1 to 0; an iteration moved the policy by 0.6 nats per token"
    noisy = [0.5, 0.7, 0.9, 1.0, 1.0, 0.1, 1.0, 1.0, 1.0, 1.0]  # one batch is no fall
    assert rules(log(**unscaled | {"objective__scores": noisy}, **moved)) == []


def test_runs_that_rise_or_have_one_length_on_purpose() -> None:
    assert rules(RunLog("bare", [{"objective/scores": 1.0}])) == []
    assert rules(scored(1.0, 1.2)) == []
    slow = {"environment__seconds": 0.3, "environment__model_seconds": 0.4, "time__step": 9.0}
    calls = {"environment__tool_calls": 2.0, "environment__invalid_calls": 0.5}
    steps = {name: [value] * 8 for name, value in (slow | calls).items()}
    assert rules(log(**steps, episode=[10.0 * i for i in range(8)])) == []
    some_cut = [0.01 * i for i in range(10)]
    assert rules(scored(1.0, 2.0, completions__truncated_ratio=some_cut)) == []
    cut = {"completions/truncated_ratio": 1.0, "val/num_eos_tokens": 0.0}
    no_stop = dict.fromkeys(("stop_token", "stop_token_ids", "stop_strings"))
    assert rules(RunLog("made", [cut] * 4, no_stop)) == []
    assert rules(RunLog("made", [*[cut] * 3, cut | {"val/num_eos_tokens": 1.0}])) == [
        "responses do not end"
    ]


def test_a_mask_that_leaves_out_more_and_more_is_named() -> None:
    row = {"objective/scores": 1.0, "val/ratio": 1.0, "policy/clipfrac_avg": 0.02}
    rows = [row] * 9 + [row | {"policy/clipfrac_avg": 0.07}]
    mask = {"policy_loss": "mask"}
    assert rules(RunLog("made", rows, mask)) == ["updates are too large"]
    assert rules(RunLog("made", rows)) == rules(RunLog("made", [row] * 9, mask)) == []


def test_a_value_with_little_left_to_explain_is_not_blamed() -> None:
    for spread, found in (
        ([0.4, 0.4, 0.4, 0.3, 0.3, 0.3], ["the value explains nothing"]),
        ([0.4, 0.4, 0.2, 0.1, 0.1, 0.1], []),
    ):
        made = log(val__explained_variance=[-1.0] * 6, objective__scores_std=spread)
        assert rules(made) == found


def test_advice_has_the_option_names_of_the_trainer() -> None:
    falling = [2.0, 1.9, 0.1, 0.03, 0.02, 0.02]
    made = log(policy__entropy_avg=falling, objective__uniform_groups=[0.9] * 6)
    for config, bound, penalty in (
        (PPOConfig, "cliprange_high", "kl_coef"),
        (GRPOConfig, "epsilon_high", "beta"),
    ):
        options = {f.name: None for f in fields(config)}
        collapse, groups = examine(replace(made, options=options))
        assert f"raise {penalty}, or clip higher above 1 ({bound})" in collapse.advice
        assert "num_generations" not in groups.advice  # it gives every prompt one answer
        assert "(dynamic_sampling)" in groups.advice
        named = {
            word
            for rule in examine(replace(made, options=options))
            for word in re.findall(r"\w+_\w+", rule.advice)
        }
        assert named <= set(options)
    (groups,) = examine(log(policy__entropy_avg=[2.0] * 5, objective__uniform_groups=[0.9] * 5))
    assert groups.advice.endswith("but not always, or raise num_generations.")


def test_a_running_run_hears_of_a_flat_score_in_its_second_half() -> None:
    flat = [*scored(1.0, 1.0).rows]
    assert live_findings(flat, share=0.4) == []
    assert [found.rule for found in live_findings(flat, share=0.5)] == ["the score did not rise"]
    assert live_findings([{"objective/scores_std": 0.0}] * 3) == []  # fewer than 4 rows


@pytest.mark.slow
def test_a_collapse_is_said_once_while_training(caplog: pytest.LogCaptureFixture) -> None:
    """With a rate a thousand times too high, within 12 iterations; a usual one is silent."""
    said = {}
    for rate in (3e-2, 1e-5):
        caplog.clear()
        trainer = small(
            total_episodes=192,
            per_device_train_batch_size=16,
            learning_rate=rate,
            reward_model=None,
            reward_funcs=[count_w5],
            max_grad_norm=100.0,
        )
        trainer.train()
        said[rate] = [m for m in caplog.messages if m.startswith("entropy collapses (so far, at")]
    assert [len(texts) for texts in said.values()] == [1, 0]
    assert "To try: Lower learning_rate, raise kl_coef" in said[3e-2][0]


def test_what_the_run_asked_for_is_read_beside_its_log(tmp_path: Path) -> None:
    row = {"objective/scores": 1.0, "completions/truncated_ratio": 1.0, "val/num_eos_tokens": 0.0}
    (tmp_path / "metrics.jsonl").write_text((json.dumps(row) + "\n") * 4)
    assert rules(read_log(tmp_path)) == ["nothing ends"]
    stops = {"stop_token": None, "stop_token_ids": None}
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
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(sound.splitlines(keepends=True)[:3]))
    main(["doctor", str(tmp_path)])
    assert "  3 rows: too few to judge a trend, which takes 4; train" in capsys.readouterr().out
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
def test_a_damaged_line_costs_no_other(tmp_path: Path, line: bytes, caplog: Any) -> None:
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
    assert finding.rule == "episodes end before they are done"
    assert finding.seen == "50% by turn limit"
    told = sentences(environment__turns=[8.0] * 10, **cut)["Episodes"]
    assert told.endswith("; how the last ones ended: 50% turn limit, 50% done.")
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
    ends = end_stats([run_of(0.0, 0.0, 0.0, 0.0, 1.0), run_of(0.0, 3.0)], "objective/scores")
    assert ends == (2.0, 1.0, 3.0)
    assert end_stats([run_of(1.0)], "val/ratio") is None
    starts = end_stats([run_of(0.5, 9.0), run_of(1.5, 9.0)], "objective/scores", at="start")
    assert starts == (1.0, 0.5, 1.5)


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


def test_differences_have_intervals_by_hand() -> None:
    def runs(ends: list[float], seeds: list[int]) -> list[RunLog]:
        pairs = zip(ends, seeds, strict=True)
        return [RunLog("x", [{"score": end}], {"seed": seed}) for end, seed in pairs]

    # Equal seeds, in another order: differences 1, 2, 3, so 2 ± 4.303 / 3**0.5.
    base = runs([10, 20, 30], [0, 1, 2])
    text = difference(runs([33, 11, 22], [2, 0, 1]), base, "score")
    assert text == "+2 ± 2.5 (3 pairs with equal seeds)"
    # Other seeds, Welch: variances 2 and 8 of two runs each, so the error is 5**0.5 with
    # 25 / (1 + 16) degrees of freedom, rounded down to 1: 12.706 * 5**0.5.
    text = difference(runs([3, 1], [5, 6]), runs([0, 4], [0, 1]), "score")
    assert text == "+0 ± 28 (2 and 2 runs)"
    assert difference(runs([3], [0]), base, "score") is None
    assert difference(runs([3, math.nan], [0, 1]), base, "score") is None


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(RUNS / "good.jsonl")
    picture = ["--output", str(tmp_path / "x.png")]
    assert main(["compare", "=", *picture]) == 2
    assert main(["compare", good, "--metrics", "no/such", *picture]) == 2
    assert "no run has any of no/such" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), *picture]) == 2


ASSETS = Path(__file__).parents[2] / "src" / "kedge" / "ext" / "report" / "assets"

NASTY = "</script><b>bold</b> ü \u2028 <!--script--> $&"


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    fixed = {"objective/scores_std": 0.5, "rewards/rules": 1.0, "val/ratio": None}
    fixed |= {"eval_held_out_objective/kl": 0.25}
    row = lambda i: {"step": i, "episode": 8 * i, "objective/scores": i / 8}  # noqa: E731
    metrics = [row(i) | fixed for i in range(1, 9)]
    write(folder, "metrics.jsonl", [*metrics, {"step": 8, "eval_objective/scores": 0.75}])
    for step in (2, 4):
        row = {"query": "2 + 2", "model response": NASTY if step == 2 else "4", "score": 0.5}
        write(folder, f"completions/step-{step:06d}.jsonl", [row])
    token = {"prompt": "2 + 2", "tokens": ["4", "<eos>"], "length": 2, "score": 1.0, "rewards": {}}
    rows = [token | {"advantage": [0.5, -1.0]}] * 3
    write(folder, "tokens/step-000004.jsonl", rows)
    return folder


def unpack(html: str) -> Any:
    packed = re.search(r'<script id="data"[^>]*>([^<]*)<', html)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def data(run: Path, **kwargs: int) -> dict[str, object]:
    return gather(run, **kwargs)


def test_the_page_holds_what_the_files_do(run: Path) -> None:
    (run / "run.json").write_text('{"options": {"max_grad_norm": Infinity}}')
    found = unpack(page(data(run)))
    assert found == json.loads(json.dumps(data(run)))
    assert found["series"]["objective/scores"] == {
        "x": [1, 2, 3, 4, 5, 6, 7, 8],
        "y": [i / 8 for i in range(1, 9)],
    }
    assert found["series"]["eval_objective/scores"] == {"x": [8], "y": [0.75]}
    assert "val/ratio" not in found["series"]  # never a number
    assert [t["step"] for t in found["tables"]["completions"]] == [2, 4]
    assert found["tables"]["completions"][0]["rows"][0]["model response"] == NASTY
    assert found["episodes"]["y"][:3] == [0, 8, 16]
    assert (found["updates"], found["findings"]) == (8, [])
    assert found["about"] == {"options": {"max_grad_norm": "Infinity"}}
    # 0.125 to 0.9375 (the mean of the last two of eight), 0.5 a deviation, 16 scores to chance
    assert "from 0.188 to 0.938: up by 1.5 standard deviations" in found["story"][0]["text"]


def test_every_metric_is_explained(run: Path) -> None:
    found = data(run)["meanings"]
    assert isinstance(found, dict)
    assert all(found.values())
    assert found["eval_held_out_objective/kl"].startswith(NAMES["objective/kl"])
    assert found["rewards/rules"] == PREFIXES["rewards/"]
    assert meaning("unheard_of") == ""


def test_the_page_is_one_file_that_asks_nothing_of_the_network(run: Path) -> None:
    html = page(data(run))
    assert NASTY not in html  # texts are inside compressed data, so they cannot be markup
    assert html.count("<script") == html.count("</script>") == 2
    assert "default-src 'none'" in html
    outside = re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:|#)[^\"']*", html)
    assert outside == []
    assert not re.search(r"\bfetch\(|XMLHttpRequest|@import|url\((?!data:)", html)
    assert "<!--" not in html.replace("<!doctype", "")


def test_more_responses_than_asked_for_are_left_out_evenly(run: Path) -> None:
    for step in range(10, 14):
        rows = [{"query": f"q{i}", "model response": "x", "score": i, "n": i} for i in range(10)]
        write(run, f"eval_completions/step-{step:06d}.jsonl", rows)
    tables = data(run, most=12)["tables"]
    assert isinstance(tables, dict)
    assert [len(t["rows"]) for t in tables["eval_completions"]] == [3, 3, 3, 3]
    assert [len(t["rows"]) for t in tables["completions"]] == [1, 1]


def test_words_by_hand() -> None:
    early = {"step": 1, "rows": [{"tokens": ["a"] * 9 + ["b"], "advantage": [0.0] * 10}]}
    last = {"tokens": ["a"] * 5 + ["b"] * 5, "advantage": [-1.0] * 5 + [2.0] * 5}
    late = {"step": 2, "rows": [last]}
    found = vocabulary([early, late])
    assert found["more"] == [["b", 100.0, 500.0]]
    assert found["less"] == [["a", 900.0, 500.0]]
    assert found["praised"] == [["b", 2.0, 5]]
    assert found["blamed"] == [["a", -1.0, 5]]
    for row in (*early["rows"], *late["rows"]):  # what an environment says does not count
        row["trained"] = [1] * 10 + [0] * 20
        row["tokens"] += ["b"] * 20 if row in early["rows"] else ["a"] * 20
        row["advantage"] += [0.0] * 20
    assert vocabulary([early, late]) == found


def test_episodes_by_hand() -> None:
    """Three turns, the environment between them; the last third of the run is its last table."""

    def row(score: float, *rewards: float, **metrics: float) -> dict[str, object]:
        turn = [t for k in range(len(rewards)) for t in (k, -1)]
        advantage = [1.0 * (k + 1) if t >= 0 else 0.0 for k, t in enumerate(turn)]
        told = {"tokens": ["x"] * len(turn), "turn": turn, "advantage": advantage}
        return told | {"score": score, "turn_rewards": list(rewards), "metrics": metrics}

    early = [row(0.0, 0.0, 0.0, 0.0), row(1.0, 0.0, 1.0)]
    late = [row(0.2, 0.2), row(0.0, 0.0, 0.0, 0.0), row(1.0, 0.0, 1.0)]
    tables = [{"step": i, "rows": rows} for i, rows in enumerate((early, early, late))]
    found = episodes(tables)
    assert found["won_by"] == "score above 0.5"
    assert (found["won"], found["lost"]) == ([[2, 2]], [[2, 1], [2, 0]])
    assert (found["won_turns"], found["lost_turns"]) == (2, 2)
    assert found["turns"] == [
        [1, 1.0, 0.0, pytest.approx(0.2 / 3), 1.0],
        [2, pytest.approx(2 / 3), 0.5, 0.5, 3.0],
        [3, pytest.approx(1 / 3), 0.0, 0.0, 5.0],
    ]
    late[0]["metrics"] = {"success": 1.0}  # the environment's own word comes first
    assert episodes(tables)["won"] == [[2, 0]]
    assert episodes([{"step": 1, "rows": [{"tokens": ["a"], "score": 1.0}]}]) == {}


def test_the_command_for_reports(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert unpack((run / "report.html").read_text(encoding="utf-8"))["name"] == "one"
    assert "report.html" in capsys.readouterr().out
    assert main(["report", str(run), "--responses", "0"]) == 2
    assert main(["report", str(run / "nowhere")]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err


def test_the_page_of_two_runs(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "two"
    shutil.copytree(run, other)
    write(other, "completions/step-000000.jsonl", [{"query": "2 + 2", "model response": "?"}])
    for folder, rate in ((run, 1e-5), (other, 2e-5)):
        options = {"learning_rate": rate, "seed": 1, "output_dir": str(folder)}
        about = {"algorithm": "PPO", "model": rate, "options": options}
        (folder / "run.json").write_text(json.dumps(about))
    page_of_both = tmp_path / "both.html"
    assert main(["report", str(run), str(other), "--output", str(page_of_both)]) == 0
    found = unpack(page_of_both.read_text(encoding="utf-8"))
    assert found["name"] == "one and two"
    assert found["differ"] == [["model", 1e-5, 2e-5], ["learning_rate", 1e-5, 2e-5]]
    assert [r["series"]["objective/scores"]["y"][-1] for r in found["runs"]] == [1.0, 1.0]
    steps = [(table["run"], table["step"]) for table in found["tables"]["completions"]]
    assert steps == [("one", 2), ("one", 4), ("two", 0), ("two", 2), ("two", 4)]
    assert main(["report", str(run), str(other), str(run)]) == 2


def test_a_live_page_reloads_until_the_run_ends(run: Path, monkeypatch: Any) -> None:
    pages = []

    def wait(seconds: float) -> None:
        pages.append(unpack((run / "report.html").read_text(encoding="utf-8")))
        assert len(pages) <= 2
        row = {"step": 9, "objective/scores": 1.0}
        row |= {"train_runtime": 1.0} if len(pages) == 2 else {}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    monkeypatch.setattr("kedge.ext.report.command.time.sleep", wait)
    assert main(["report", str(run), "--live"]) == 0
    last = unpack((run / "report.html").read_text(encoding="utf-8"))
    assert [p["live"] for p in (*pages, last)] == [15, 15, 0]
    assert [p["updates"] for p in (*pages, last)] == [8, 9, 10]


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", [False, True])
def test_what_the_untrained_policy_says_is_shown_and_costs_no_number(
    evaluated: bool, tmp_path: Path
) -> None:
    weights, held_out = [], {"eval_dataset": PROMPTS[:3]} if evaluated else {}
    for tables in (2, 0):
        folder = tmp_path / str(tables)
        trainer = small(
            output_dir=str(folder), total_episodes=16, num_sample_generations=tables, **held_out
        )
        untrained = trainer.generate_completions() if not tables else []
        trainer.train()
        weights.append(torch.cat([p.flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*weights)
    shown = gather(tmp_path / "2")["tables"]["completions"]
    assert [table["step"] for table in shown] == [0, 2, 4]
    if evaluated:  # nearly greedy answers to the same prompts
        answers = [row["model response"] for row in shown[0]["rows"]]
        assert answers == [row["model response"] for row in untrained]


def test_what_is_damaged_is_left_out_and_counted(run: Path, caplog: Any) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n{"step": 9, "objective/sc')
    row = b'{"query": "half \\ud800", "model response": "x", "score": NaN}'
    (run / "completions" / "step-000006.jsonl").write_bytes(row + b"\n{broken")
    (run / "completions" / "step-six.jsonl").write_text("{}")
    (run / "run.json").write_bytes(b'{"options": \xff')
    found = unpack(page(data(run)))
    assert found["updates"] == 8
    last = found["tables"]["completions"][-1]["rows"]
    assert last == [{"query": "half \ud800", "model response": "x", "score": None}]
    assert found["about"] == {}
    assert [record.getMessage() for record in caplog.records] == [
        "skipped 2 damaged lines of one/metrics.jsonl",
        "skipped 1 damaged lines of completions/step-000006.jsonl",
    ]
    (run / "metrics.jsonl").write_text("{")
    with pytest.raises(DataError, match="no readable row"):
        data(run)


# -- its sentences --------------------------------------------------------------------------------


def sentences(**series: list[float]) -> dict[str, str]:
    names = {name: name.replace("__", "/") for name in series}
    length = len(next(iter(series.values())))
    rows = [{names[n]: values[i] for n, values in series.items()} for i in range(length)]
    return {section["title"]: section["text"] for section in story(RunLog("run", rows), rows)}


def test_the_ratio_is_told_as_a_range() -> None:
    found = sentences(policy__approxkl_avg=[0.01] * 4, val__ratio=[1.0, 0.98, 1.03, 1.0])
    assert found["Updates"].endswith("; the mean ratio stayed between 0.98 and 1.03.")
    still = sentences(policy__approxkl_avg=[0.0] * 4, val__ratio=[1.0] * 4)["Updates"]
    assert still.endswith("so the probability ratio stays 1.")


def test_a_value_model_that_explains_nothing_is_not_a_negative_share() -> None:
    found = sentences(val__explained_variance=[-0.001, -0.05, -0.12, -0.12, -0.12])["Value"]
    assert found == (
        "The value model explained none of the return variance at the start, none at the end"
        " (worse than predicting the mean)."
    )
    found = sentences(val__explained_variance=[-0.001, 0.2, 0.3, 0.4, 0.41])["Value"]
    assert found.endswith("none of the return variance at the start, 41% at the end.")


def test_the_tab_counts_the_metrics_that_its_page_lists() -> None:
    """The axis "episode" is no metric of the page, in the tab and in its list alike."""
    tab, page = ((ASSETS / name).read_text() for name in ("main.js", "curves.js"))
    shared = r"Object\.keys\(\w+\.series\)\.filter\(\(n\) => n !== \"episode\"\)"
    assert re.search(shared, tab)
    assert re.search(shared, page)


def test_a_fault_of_the_doctor_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(log: RunLog) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("kedge.ext.report.doctor.RULES", [broken])
    trainer = small(total_episodes=20, logging_steps=1)
    trainer.train()
    assert trainer.state.global_step == 5
    assert caplog.text.count("kedge doctor cannot read this log: ZeroDivisionError") == 1
