"""Metrics, tables and tokens reach files, screen and memory as they are."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kedge.config.ppo import PPOConfig
from kedge.ext.report.report import gather
from kedge.records.errors import ConfigError, RewardError
from kedge.reporting.base import JsonlTracker, format_duration
from kedge.reporting.log import draw_curves
from kedge.reporting.responses import IntervalSchedule, completion_rows, token_texts
from kedge.reporting.trackers import ConsoleTracker, TableLogger, run_links
from kedge.testing import ConstantReward
from tests import processes
from tests.e2e.small import PROMPTS, rows, small
from tests.unit.text_toys import blank_swallowing_tokenizer, rollout_of, word_tokenizer

ROOT = Path(__file__).parents[2]


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_jsonl_writes_rows_at_once_and_tables_apart(tmp_path):
    tracker = JsonlTracker(tmp_path / "run")
    tracker.log({"loss/policy_avg": 0.1 + 0.2, "val/ratio": math.nan}, step=1)
    want = [{"step": 1, "loss/policy_avg": 0.30000000000000004, "val/ratio": None}]
    assert lines(tmp_path / "run" / "metrics.jsonl") == want  # before close
    want = [{"query": "a\nb", "score": 1.5}, {"query": "ü half \ud800", "score": 2}]
    tracker.table("completions", want, step=12)
    assert lines(tmp_path / "run" / "completions" / "step-000012.jsonl") == want
    tracker.close()


def test_a_new_run_in_an_old_folder_sets_rows_and_tables_aside(tmp_path):
    row = {"query": "q", "score": 1.0}
    for run in range(3):
        tracker = JsonlTracker(tmp_path)
        assert not (tmp_path / "completions").exists()
        tracker.table("completions", [row | {"score": run}], step=1)
        tracker.log({"n": run}, step=1)
    JsonlTracker(tmp_path, history=[{"n": 2, "step": 1}])  # the same run goes on
    for number, suffix in enumerate((".1", ".2", "")):
        table = tmp_path / f"completions{suffix}" / "step-000001.jsonl"
        assert lines(table)[0]["score"] == number
        assert lines(tmp_path / f"metrics{suffix}.jsonl") == [{"n": number, "step": 1}]


def test_jsonl_goes_on_without_losing_or_doubling_rows(tmp_path):
    first = JsonlTracker(tmp_path)
    for step in (1, 2, 3):
        first.log({"n": step / 3, "bad": math.inf}, step=step)
    first.close()
    with (tmp_path / "metrics.jsonl").open("ab") as f:
        f.write(b'\xff\n{"step": 4, "n"')  # damaged, and killed in mid-line
    history = [{"bad": math.inf, "n": step / 3, "step": step} for step in (1, 2)]
    for _ in range(2):  # going on twice from the same checkpoint
        second = JsonlTracker(tmp_path, history=history)
        second.log({"n": 30}, step=3)
        second.close()
        rows = lines(tmp_path / "metrics.jsonl")
        assert [(r["step"], r["n"]) for r in rows] == [(1, 1 / 3), (2, 2 / 3), (3, 30)]
    assert (tmp_path / "metrics.1.jsonl").read_bytes().count(b"\n") == 4
    reordered = [dict(sorted(row.items(), reverse=True)) for row in history]
    JsonlTracker(tmp_path, history=[*reordered, {"n": 30, "step": 3}]).close()
    assert not (tmp_path / "metrics.3.jsonl").exists()  # nothing in it that is not kept


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def screen(terminal=False, **kwargs):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    clock = Clock()
    return ConsoleTracker(10, console=console, clock=clock, **kwargs), out, clock


def test_without_a_terminal_one_plain_line_per_row():
    shown, out, clock = screen(start=2)
    clock.now = 20.0
    shown.advance(4, {})
    metrics = {"objective/scores": 1.23456, "objective/kl": 0.5, "eps": 12.0, "episode": 256.0}
    shown.log(metrics, step=4)
    shown.close()
    want = "step 4/10  episode 256  score 1.235  kl 0.5  eps 12  1 min 00 s left\n"
    assert out.getvalue() == want  # 2 updates took 20 s, 6 are left
    shown, out, _ = screen(terminal=True, bar=False)  # disable_tqdm
    shown.log({"objective/scores": 1.0}, step=1)
    assert out.getvalue() == "step 1/10  score 1  0 s left\n"


def test_on_a_terminal_a_bar_moves_with_every_update():
    shown, out, clock = screen(terminal=True)
    clock.now = 30.0
    shown.advance(3, {"objective/scores": 1.5, "objective/kl": 0.25, "eps": 8.0})
    shown.log({"objective/scores": 1.5}, step=3)
    shown.close()
    text = out.getvalue()
    assert "3/10" in text
    assert "score 1.5  kl 0.25  eps 8" in text
    assert "1 min 10 s left" in text
    assert text.count("step 3/10  score 1.5  1 min 10 s left") == 1  # rows scroll above the bar
    shown.log({"eval_objective/scores": 2.0, "eval_new_objective/kl": 3.0}, step=3)
    shown.log({"eval_new_pass@4": 0.5, "eval_win_rate": 0.25}, step=3)
    assert "eval score 2  eval new kl 3" in out.getvalue()
    assert "eval new pass@4 0.5  eval win rate 0.25" in out.getvalue()
    text = out.getvalue()
    shown.log({"eval_time/step": 1.0}, step=3)
    assert out.getvalue() == text  # a line that says nothing is not printed


def test_rows_of_a_terminal_break_between_metrics():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    shown = ConsoleTracker(10, console=console, bar=False)
    names = ("objective/scores", "objective/kl", "policy/entropy_avg", "loss/policy_avg")
    names += ("loss/value_avg", "val/ratio", "policy/clipfrac_avg", "completions/mean_length")
    shown.log(dict.fromkeys(names, -0.12345), step=10)
    lines = out.getvalue().splitlines()
    assert "entropy -0.1235" in lines[0]
    assert [max(map(len, lines)) <= 80, len(lines)] == [True, 2]
    assert [len(re.findall(r"-0\.1235(?=  |$)", line)) for line in lines] == [4, 4]
    assert all(line.endswith("-0.1235") for line in lines)


def test_durations_of_every_size_have_one_form():
    given = (0.0418, 8.3, 42.4, 59.9, 82, 3599.9, 3720, 360_000)
    texts = ["0.042 s", "8.3 s", "42 s", "1 min 00 s", "1 min 22 s", "1 h 00 min", "1 h 02 min"]
    assert [*map(format_duration, given)] == [*texts, "100 h 00 min"]


def test_the_bar_counts_no_start():
    shown, _, clock = screen(terminal=True)
    clock.now = 300.0
    assert shown._bar.tasks[0].elapsed is None
    shown.advance(1, {"time/step": 2.0})
    assert 2.0 <= shown._bar.tasks[0].elapsed < 60.0
    shown.close()


def test_the_time_left_is_that_of_the_median_iteration():
    """Neither 94 s of starting engines nor an iteration of 39 minutes while stopped count."""
    shown, out, clock = screen()
    for step, seconds, taken in ((1, 94, 2), (2, 2, 2), (3, 2340, 2340), (4, 2, 2)):
        clock.now += seconds
        shown.log({"objective/scores": 1.0, "time/step": float(taken)}, step=step)
    assert re.findall(r"(\S+ s) left", out.getvalue()) == ["18 s", "16 s", "14 s", "12 s"]


def test_tables_come_at_most_every_half_minute_and_after_training():
    shown, out, clock = screen()
    rows = [{"query": "a " * 200 + "Why?", "model response": "b", "score": 1.0}]
    for step, now in enumerate((0.0, 10.0, 31.0, 35.0), 1):
        clock.now = now
        shown.table("completions", rows, step=step)
    shown.close()
    shown.table("completions", rows, step=4)
    text = out.getvalue()
    titles = [line.rstrip() for line in text.splitlines() if line.startswith("completions")]
    assert titles == [
        *("completions, step 1", "completions, step 3", "completions, after training, step 4")
    ]
    assert text.count("Why?") == 3  # the end of a long prompt is what was asked
    quiet, out, _ = screen(tables=False)
    quiet.table("completions", rows, step=1)
    assert out.getvalue() == ""


def test_the_table_escapes_markup_and_cuts_long_cells():
    shown, out, _ = screen(max_rows=2, max_chars=30)
    rows = [
        {"query": "[bold]q[/bold]", "model response": "x" * 50 + "END", "score": 3.921875},
        {"query": "[/oops] \x1b[31m", "model response": "r", "score": None},
        {"query": "third", "model response": "r", "score": 0.0},
    ]
    shown.table("completions", rows, step=7)
    text = out.getvalue()
    present = ("[bold]q[/bold]", "[/oops]", "model response", "3.922", "n/a", "x" * 29 + "…")
    assert all(part in text for part in present)
    assert not any(part in text for part in ("\x1b", "END", "third"))
    shown.table("completions", [], step=8)


class FakeService(ModuleType):
    """Stands for wandb and trackio, which are not needed to test what they are sent."""

    def __init__(self, name):
        super().__init__(name)
        self.sent, self.run = [], "a run"

    def log(self, row):
        self.sent.append(row)

    def Table(self, **kwargs):
        return kwargs


ROWS = [{"query": "q", "score": 1.5}, {"query": "r|<b>\n", "score": 2.0}]


def test_tables_go_to_wandb_and_trackio(monkeypatch):
    wandb, trackio = FakeService("wandb"), FakeService("trackio")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    tables = TableLogger(["comet_ml", "wandb", "trackio"])
    tables.log({"lr": 1.0}, step=3)
    tables.table("completions", ROWS, step=3)
    tables.table("completions", [], step=4)
    want = {"columns": ["query", "score"], "data": [["q", 1.5], ["r|<b>\n", 2.0]]}
    assert wandb.sent == [{"completions": want, "train/global_step": 3}]
    (sent,) = trackio.sent
    assert sent["completions"]["dataframe"].to_dict("records") == ROWS
    wandb.run = None  # not rank 0, or not started
    tables.table("completions", ROWS, step=5)
    assert len(wandb.sent) == 1


def test_links_of_runs(monkeypatch):
    wandb, trackio, mlflow = (FakeService(name) for name in ("wandb", "trackio", "mlflow"))
    wandb.run = SimpleNamespace(url="https://wandb/run/1")
    space = SimpleNamespace(get=lambda: "me/board")
    trackio.context_vars = SimpleNamespace(current_space_id=space)
    info = SimpleNamespace(experiment_id="3", run_id="ab")
    mlflow.active_run = lambda: SimpleNamespace(info=info)
    mlflow.get_tracking_uri = lambda: "http://server:5000/"
    for service in (wandb, trackio, mlflow):
        monkeypatch.setitem(sys.modules, service.__name__, service)
    names = ["wandb", "trackio", "mlflow", "comet_ml"]
    assert run_links(names) == {
        "wandb": "https://wandb/run/1",
        "trackio": "https://huggingface.co/spaces/me/board",
        "mlflow": "http://server:5000/#/experiments/3/runs/ab",
    }
    mlflow.get_tracking_uri, wandb.run.url = (lambda: "sqlite:///x.db"), None
    assert set(run_links(names)) == {"trackio"}


def test_tables_and_histograms_go_to_tensorboard_and_wandb(monkeypatch):
    texts, sent, logged = [], [], []
    writer = SimpleNamespace(
        add_text=lambda *args: texts.append(args), add_histogram=lambda *args: sent.append(args)
    )
    TableLogger(["tensorboard"], tensorboard=lambda: writer).table("completions", ROWS, step=3)
    want = "| query | score |\n| --- | --- |\n| q | 1.5 |\n| r&#124;&lt;b><br> | 2 |"
    assert texts == [("completions", want, 3)]
    TableLogger(["tensorboard"]).table("completions", ROWS, step=3)  # no writer yet
    wandb = SimpleNamespace(run=object(), Histogram=tuple, log=logged.append)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    lengths, services = torch.tensor([3, 5]), ["tensorboard", "wandb"]
    TableLogger(services, tensorboard=lambda: writer).histogram("n", lengths, step=0)
    TableLogger(["mlflow"]).histogram("n", lengths, step=0)
    assert sent == [("n", lengths, 0)]
    assert logged == [{"n": (3, 5), "train/global_step": 0}]


def png_size(file):
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_curves_are_drawn_without_pyplot(tmp_path):
    rows = [{"step": i, "objective/scores": i * 0.1, "loss/value_avg": 1 / i} for i in range(1, 9)]
    rows.append({"step": 9, "eval_objective/scores": 1.0, "objective/scores": math.nan})
    file = draw_curves(rows, tmp_path / "deep" / "curves.png")
    assert file == tmp_path / "deep" / "curves.png"
    width, height = png_size(file)
    assert width > 1000
    assert height < 400  # two panels fit into one row
    import matplotlib._pylab_helpers as figures

    assert figures.Gcf.figs == {}


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [{"step": 1, "lr": math.nan}]])
def test_nothing_to_draw_gives_no_file(tmp_path, rows):
    assert draw_curves(rows, tmp_path / "curves.png") is None
    assert not (tmp_path / "curves.png").exists()


_RUN = """
import sys
from pathlib import Path
from tests.e2e.test_resume import trainer

trainer(
    Path(sys.argv[1]), report_to=[sys.argv[2]], logging_steps=1, max_steps=2, total_episodes=None,
    num_sample_generations=1, run_name="small",
).train()
"""


_CLASSIC = """
import sys
from tests.classic_models import gpt2, samples, trainer

found = trainer(gpt2(), log_with=sys.argv[2], tracker_kwargs={sys.argv[2]: {"name": "small"}})
queries, responses, scores = samples()
batch = {"query": ["q"] * 8, "response": ["r"] * 8}
for _ in range(2):
    found.log_stats(found.step(queries, responses, scores), batch, scores)
found.accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "name"),
    [
        *((_RUN, name) for name in ("wandb", "trackio", "mlflow", "tensorboard")),
        *((_CLASSIC, name) for name in ("wandb", "trackio")),
    ],
)
def test_a_run_reports_to_the_real_package(code, name, tmp_path):
    """Without an account: wandb offline, the others into local files."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    env = {k: v for k, v in os.environ.items() if k != "HF_TOKEN"}
    env |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    env |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    env |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    ran = processes.run("-c", code, str(tmp_path / "run"), name, env=env, timeout=300)
    assert ran.returncode == 0, ran.stderr
    files = {"wandb": "run-*.wandb", "trackio": "*.db", "mlflow": "*.db", "tensorboard": "events*"}
    found = [p for p in tmp_path.rglob(files[name]) if p.stat().st_size > 0]
    assert found
    if name == "tensorboard":
        assert b"prompts/length" in b"".join(p.read_bytes() for p in found)


WORD = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one word."""
    pieces = {f"<0x{i:02X}>": i for i in range(256)} | {"word": WORD}
    core = Tokenizer(models.BPE(pieces, [], unk_token="<0x00>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    ("tokenizer", "ids", "texts"),
    [
        (word_tokenizer(), [3, 4, 0], ["w3", " w4", " <eos>"]),
        (blank_swallowing_tokenizer(), [3, 4, 5], ["a", " b", "c"]),
        (byte_tokenizer(), list("aü!".encode()), ["a", "", "ü", "!"]),
        (byte_tokenizer(), list("\N{CHESTNUT}".encode()), ["", "", "", "\N{CHESTNUT}"]),
        (word_tokenizer(), [], []),
        (byte_tokenizer(), [0xF0, WORD, 0xFF], ["", "\ufffdword", "\ufffd"]),  # a broken character
    ],
)
def test_texts(tokenizer: Any, ids: list[int], texts: list[str]) -> None:
    assert token_texts(ids, tokenizer) == texts
    assert "".join(texts) == tokenizer.decode(ids)


def read(folder: Path) -> dict[int, list[dict[str, Any]]]:
    files = sorted(folder.glob("tokens/step-*.jsonl"))
    return {int(f.stem[5:]): [json.loads(x) for x in f.read_text().splitlines()] for f in files}


def test_a_run_writes_rows_that_agree_with_its_metrics(tmp_path: Path) -> None:
    trainer = small(
        output_dir=str(tmp_path), total_episodes=16, logging_steps=2, log_token_rows=4, kl_coef=0.2
    )
    trainer.train()
    found = read(tmp_path)
    assert list(found) == [1, 2, 4]  # the first update, and where metrics are logged
    batch, row = found[4], found[4][0]
    assert len(batch) == 4  # the whole batch
    assert row["prompt"] in {p["prompt"] for p in PROMPTS}
    lists = ("tokens", "logprob", "after", "reference", "advantage", "reward", "value", "return")
    assert {len(row[name]) for name in lists} == {row["length"]}
    assert list(row["rewards"].values()) == [row["score"]]
    # Rewards of a response are its score minus what the KL costs.
    kl = [a - b for a, b in zip(row["logprob"], row["reference"], strict=True)]
    assert sum(row["reward"]) == pytest.approx(row["score"] - 0.2 * sum(kl), rel=5e-3)
    assert all(math.isfinite(x) for x in row["after"])
    assert row["after"] != row["logprob"]  # the update moved it
    assert len(rows(trainer)) == 2


def test_numbers_are_the_same_with_and_without(tmp_path: Path) -> None:
    finals = []
    for count in (0, 3):
        trainer = small(output_dir=str(tmp_path / str(count)), log_token_rows=count)
        trainer.train()
        finals.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*finals)
    assert not (tmp_path / "0" / "tokens").exists()
    assert {len(r) for r in read(tmp_path / "3").values()} == {3}


def test_run_json_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["kedge", "ppo", "--hub_token", "hf_1", "--stop_token", "eos", "--wandb_api_key=k"]
    monkeypatch.setattr("sys.argv", words)
    small(output_dir=str(tmp_path), hub_token="hf_1", kl_coef=0.05).train()
    text = (tmp_path / "run.json").read_text()
    about = json.loads(text)
    assert "hf_1" not in text
    assert about["command"] == "kedge ppo --hub_token ... --stop_token eos --wandb_api_key=..."
    assert about["algorithm"] == "PPO"
    assert "response_length" in about["changed"]
    assert not {"kl_coef", "vf_coef", "bf16", "batch_size", "world_size"} & {*about["changed"]}
    assert about["options"]["response_length"] == 6


def test_no_file_and_no_message_holds_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "kedge grpo --hub-token hf_CANARY0 --hub-token=hf_CANARY0 --hub_token --x hf_CANARY0"
        ' --environment_kwargs {"api_key":"CANARY1CANARY1"} --model_init_kwargs={"token":"CANARY2"}'
        " --rollout_engine http://u:CANARY3@h:1 --reward_funcs http://h/score?key=CANARY4"
    )
    monkeypatch.setattr("sys.argv", words.split())
    options = {"hub_token": "hf_CANARY5", "run_name": "http://u:CANARY6@h"}
    trainer = small(output_dir=str(tmp_path), **options)
    trainer.train()
    trainer.create_model_card()
    page = json.dumps(gather(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    held = [path.name for path in files if b"CANARY" in path.read_bytes()]
    assert (held, "README.md" in {path.name for path in files}) == ([], True)
    assert "CANARY" not in f"{page}{trainer.args}"
    for wrong in (
        {"rollout_engine": "http://u:CANARY7@h:1"},
        {"lr_scheduler_kwargs": {"api_key": "CANARY8CANARY8"}},
    ):
        with pytest.raises(ConfigError) as error:
            small(output_dir=str(tmp_path), **options, **wrong).train()
        assert "CANARY" not in str(error.value)
    shown = str(RewardError("\x1b[2J hf_CANARY5 https://u:p@h " + "x" * 100_000))
    assert shown.startswith("\\x1b[2J ... https://...@h")
    assert len(shown) < 5_000


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([("user", "w3")], "w3"),
        ([("system", "w9"), ("user", "w3")], "[system] w9\n[user] w3"),
        ([], "w3 w4"),  # a prompt of tokens
    ],
)
def test_the_table_shows_a_conversation_without_what_its_template_adds(messages, shown) -> None:
    rollout = rollout_of([([3, 4], [5])])
    if messages:
        prompt = [{"role": role, "content": text} for role, text in messages]
        prompts = replace(rollout.prompts, columns={"prompt": [prompt]})
        rollout = replace(rollout, prompts=prompts)
    (row,) = completion_rows([(rollout, ConstantReward().score(rollout))], word_tokenizer())
    assert row["query"] == shown


@pytest.mark.parametrize(
    ("options", "iterations", "samples", "tokens"),
    [
        ({"logging_steps": 6}, 20, [*range(2, 21, 2)], [1, 6, 12, 18, 20]),
        ({"logging_steps": 0.25, "num_sample_generations": 2}, 20, [10, 20], [1, 5, 10, 15, 20]),
        ({"logging_strategy": "epoch"}, 10, [*range(1, 11)], [1, 3, 5, 8, 10]),
        ({"logging_strategy": "no", "num_sample_generations": 0}, 20, [], []),
        ({"logging_steps": 1, "num_sample_generations": 0}, 1000, [], [1, *range(10, 1001, 10)]),
        ({"log_token_rows": 0, "num_sample_generations": 1}, 20, [20], []),
    ],
)
def test_cadence(tmp_path, options, iterations, samples, tokens):
    config = PPOConfig(output_dir=str(tmp_path), **options)
    schedule = IntervalSchedule(config, iterations=iterations, iterations_per_epoch=2.5)
    done = range(1, iterations + 1)
    assert [i for i in done if schedule.samples(i)] == samples
    assert [i for i in done if schedule.writes_tokens(i)] == tokens
