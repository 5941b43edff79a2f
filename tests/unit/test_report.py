"""``kedge report``: what the page holds, from files written by hand and from a run."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.errors import DataError
from kedge.loop.metrics import NAMES, PREFIXES
from kedge.reporting.log import RunLog
from kedge.reporting.report import episodes, gather, meaning, page, story, vocabulary

ASSETS = Path(__file__).parents[2] / "src" / "kedge" / "reporting" / "assets"

NASTY = "</script><b>bold</b> ü \u2028 <!--script--> $&"


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    metrics = [
        {
            "step": i,
            "episode": 8 * i,
            "objective/scores": i / 8,
            "objective/scores_std": 0.5,
            "rewards/rules": 1.0,
            "eval_held_out_objective/kl": 0.25,
            "val/ratio": None,
        }
        for i in range(1, 9)
    ]
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
        rows = [
            {"query": f"q{i}", "model response": "x", "score": 1.0 * i, "n": i} for i in range(10)
        ]
        write(run, f"eval_completions/step-{step:06d}.jsonl", rows)
    tables = data(run, most=12)["tables"]
    assert isinstance(tables, dict)
    assert [len(t["rows"]) for t in tables["eval_completions"]] == [3, 3, 3, 3]
    assert [len(t["rows"]) for t in tables["completions"]] == [1, 1]


def test_words_by_hand() -> None:
    early = {"step": 1, "rows": [{"tokens": ["a"] * 9 + ["b"], "advantage": [0.0] * 10}]}
    late = {
        "step": 2,
        "rows": [{"tokens": ["a"] * 5 + ["b"] * 5, "advantage": [-1.0] * 5 + [2.0] * 5}],
    }
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


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert unpack((run / "report.html").read_text(encoding="utf-8"))["name"] == "one"
    assert "report.html" in capsys.readouterr().out
    assert main(["report", str(run), "--responses", "0"]) == 2
    assert main(["report", str(run / "nowhere")]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err


def test_what_is_damaged_is_left_out_and_counted(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
