"""``kedge pipeline``: checked before it runs, done once, resumed, never silently stale."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kedge.cli.main import main
from kedge.cli.tools import pipeline
from kedge.records.errors import ConfigError, KedgeError

pytest.importorskip("trl", reason="TRL is not installed (the pipeline extra)")
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")


def write(tmp_path: Path, *stages: dict[str, Any], **more: Any) -> str:
    file = tmp_path / "pipe.yaml"
    text = {"output_dir": str(tmp_path / "out"), "stages": list(stages)} | more
    file.write_text(yaml.safe_dump(text, sort_keys=False))
    return str(file)


SFT = {"sft": {"model_name_or_path": "m", "dataset_name": "d.jsonl"}}
PPO = {"ppo": {"model_name_or_path": "${sft}", "dataset_name": "p.jsonl", "learning_rate": 1e-5}}
JUDGE = {"judge": {"ours": "${ppo}/a.jsonl", "theirs": "@reference", "score": "f.py:f"}}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Commands that were run, instead of running them."""
    calls: list[tuple[str, list[str]]] = []

    def command_of(name: str) -> Callable[[list[str]], None]:
        return lambda words: calls.append((name, words))

    monkeypatch.setattr("kedge.cli.tools.pipeline.load_command", command_of)
    return calls


def start(file: str, **options: Any) -> None:
    pipeline.run(pipeline.read(file)[1], **options)


def test_stages_get_one_anothers_folders(tmp_path: Path, ran: list[Any]) -> None:
    start(write(tmp_path, SFT, PPO, JUDGE))
    out = tmp_path / "out"
    assert [name for name, _ in ran] == ["sft", "ppo", "judge"]
    assert f"--model_name_or_path={out / 'sft'}" in ran[1][1]
    assert ran[1][1][-2:] == ["--output_dir", str(out / "ppo")]
    assert ran[2][1][:2] == [str(out / "ppo" / "a.jsonl"), "@reference"]


def test_what_is_done_is_not_done_again_but_redone_with_what_uses_it(
    tmp_path: Path, ran: list[Any]
) -> None:
    other = {"sft": SFT["sft"], "name": "alone"}
    start(write(tmp_path, SFT, other, PPO))
    ran.clear()
    file = write(tmp_path, SFT, other, PPO, JUDGE)
    start(file)
    assert [name for name, _ in ran] == ["judge"]
    ran.clear()
    start(file, redo="sft")
    assert [name for name, _ in ran] == ["sft", "ppo", "judge"]  # not the one by itself
    ran.clear()
    start(file)
    assert ran == []


def test_a_stage_with_other_options_is_never_silently_reused(
    tmp_path: Path, ran: list[Any]
) -> None:
    start(write(tmp_path, SFT, PPO))
    changed = {"ppo": PPO["ppo"] | {"learning_rate": 3e-5}}
    with pytest.raises(ConfigError, match=r"learning_rate: 1e-05 before, 3e-05 now"):
        start(write(tmp_path, SFT, changed))
    start(write(tmp_path, SFT, changed), redo="ppo")
    assert [name for name, _ in ran] == ["sft", "ppo", "ppo"]


def test_a_stage_that_failed_is_not_done_and_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def command_of(name: str) -> Callable[[list[str]], None]:
        def command(words: list[str]) -> None:
            calls.append(words)
            if name == "ppo" and len(calls) == 2:
                (tmp_path / "out" / "ppo" / "checkpoint-7").mkdir()
                raise RuntimeError("killed")

        return command

    monkeypatch.setattr("kedge.cli.tools.pipeline.load_command", command_of)
    file = write(tmp_path, SFT, PPO)
    with pytest.raises(RuntimeError, match="killed"):
        start(file)
    assert not (tmp_path / "out" / "ppo" / "done.json").exists()
    start(file)
    assert len(calls) == 3
    assert calls[2][-2:] == ["--resume_from_checkpoint", "True"]


def test_a_dry_run_runs_nothing(
    tmp_path: Path, ran: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    start(write(tmp_path, SFT, PPO), dry=True)
    assert ran == []
    assert "stage ppo: kedge ppo --" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"pop": {}}], "unknown command 'pop'; the nearest is ppo"),
        (
            [{"ppo": {"learnin_rate": 1}}],
            "unknown option 'learnin_rate'; the nearest is learning_rate",
        ),
        ([{"sft": {"learnin_rate": 1}}], "the nearest is learning_rate"),
        ([PPO], r"\$\{sft\} must be a variable or an earlier stage; earlier stages: none"),
        ([SFT, SFT], "the name 'sft' must be unique"),
        ([{"sft": {}, "ppo": {}}], "must be one COMMAND: {options}, got ppo, sft"),
        ([{"judge": {"ours": "a"}}], "judge needs theirs"),
        ([{"sft": {"output_dir": "x"}}], "set by the pipeline"),
        (["sft"], "must be one COMMAND: {options}, got sft"),
        ([{"script": {}}], "script needs path"),
        (
            [{"script": {"path": "none.py"}}],
            r"the file none.py does not exist; \$\{here\} is the folder",
        ),
        ([{"sft": [1]}], "must be name: value"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    entries: list[Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        pipeline.read(write(tmp_path, *entries))


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.yaml").write_text("[1]")
    for file, said in (
        ("none.yaml", "there is no such file"),
        (str(tmp_path / "list.yaml"), "must map names to values"),
        (tmp_path / "more.yaml", "at most variables; got output_dir, stages, stage"),
        (tmp_path / "number.yaml", "must have output_dir, a folder, a list of stages"),
    ):
        if isinstance(file, Path):
            more = {"stage": 1} if file.stem == "more" else {"output_dir": 3}
            file = write(tmp_path, SFT, **more)  # noqa: PLW2901
        assert main(["pipeline", file]) == 2
        assert said in capsys.readouterr().err
    assert main(["pipeline", write(tmp_path, SFT), "--redo", "x"]) == 2


def test_variables_are_replaced_and_keep_their_type(tmp_path: Path, ran: list[Any]) -> None:
    asked = {
        "ppo": PPO["ppo"] | {"seed": "${seed}", "run_name": "a-${seed}", "dataset_name": "${d}"}
    }
    file = write(tmp_path, SFT, asked, variables={"seed": 3, "d": None})
    with pytest.raises(ConfigError, match="the variable d has no value; add --set d=VALUE"):
        pipeline.read(file)
    _, (_, ppo) = pipeline.read(file, {"d": "x.jsonl"})
    assert (ppo.options["seed"], ppo.options["run_name"]) == (3, "a-3")
    assert ppo.options["dataset_name"] == "x.jsonl"
    pipeline.main([file, "--set", "d=x.jsonl", "seed=4"])
    assert "--seed=4" in ran[1][1]
    assert "--run_name=a-4" in ran[1][1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--set", "sed=1"], "unknown variable 'sed'; the nearest is seed"),
        (["--set", "seed"], "must be NAME=VALUE"),
        (["--set", "seed=1", "--seeds", "1"], "are both given; set only one"),
        (["--only", "pop"], "unknown stage 'pop'; the stages are sft, ppo"),
        (["--only", "sft", "--redo", "ppo"], "--redo ppo must be one of the stages sft"),
    ],
)
def test_flags_that_ask_for_what_is_not_there(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, SFT, PPO, variables={"seed": 3})
    assert main(["pipeline", file, *flags]) == 2
    assert said in capsys.readouterr().err


def test_only_some_stages_and_what_they_use(tmp_path: Path, ran: list[Any]) -> None:
    other = {"sft": SFT["sft"], "name": "alone"}
    pipeline.main([write(tmp_path, SFT, other, PPO), "--only", "ppo"])
    assert not (tmp_path / "out" / "results.json").exists()  # nothing was judged
    assert [words[-1] for _, words in ran] == [str(tmp_path / "out" / n) for n in ("sft", "ppo")]


def judged(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, list[str]]) -> None:
    """Let ``judge`` write these outcomes for each folder of a seed."""

    def command(words: list[str]) -> None:
        place = Path(words[-1])
        said = outcomes[place.parent.name]
        rows = "".join(json.dumps({"outcome": each, "ours": "\u2028"}) + "\n" for each in said)
        (place / "judgments.jsonl").write_text(rows)
        rate = sum({"win": 1.0, "tie": 0.5}.get(each, 0.0) for each in said) / len(said)
        summary = {"win_rate": rate, "length_controlled_win_rate": None, "judge": "j"}
        (place / "summary.json").write_text(
            json.dumps(summary | {"prompts": len(said), "invalid": said.count("invalid")})
        )

    monkeypatch.setattr("kedge.cli.tools.pipeline.load_command", lambda name: command)


def test_seeds_and_their_closing_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(monkeypatch, {"seed-1": ["win"] * 30 + ["loss"] * 10, "seed-2": ["tie"] * 40})
    file = write(
        tmp_path,
        {"judge": {"ours": "a", "theirs": "b", "score": "f.py:f", "seed": "${seed}"}},
        variables={"seed": 0},
    )
    pipeline.main([file, "--seeds", "1", "2"])
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert row["each"] == [0.75, 0.5]
    assert row["win_rate"] == 0.625
    assert row["win_rate_low"] < 0.1  # two seeds say little about a third
    assert row["prompts"] == 80
    assert "mean of 2 seeds" in capsys.readouterr().out


def test_a_script_of_the_user(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys, pathlib\n"
        "pathlib.Path(sys.argv[-1], 'said.txt').write_text(' '.join(sys.argv[1:-1]))\n"
    )
    told = {"path": "${here}/mine.py", "rows": 3, "fast": True, "slow": False}
    file = write(tmp_path, {"script": told})
    start(file)
    assert (tmp_path / "out" / "script" / "said.txt").read_text() == "--rows=3 --fast --output_dir"
    start(file)
    assert "stage script is done" in capfd.readouterr().out
    (tmp_path / "moved").mkdir()
    for name in ("mine.py", "pipe.yaml"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    start(str(tmp_path / "moved" / "pipe.yaml"))  # elsewhere, and the same
    with (tmp_path / "moved" / "mine.py").open("a") as program:
        program.write("1\n")
    with pytest.raises(
        ConfigError, match=r"mine.py: .* before, .* now\); run it again with --redo"
    ):
        start(str(tmp_path / "moved" / "pipe.yaml"))
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    with pytest.raises(KedgeError, match=r"stage script: .* failed with exit code 3"):
        start(write(tmp_path, {"script": {"path": "${here}/bad.py"}}, output_dir=str(tmp_path)))
    assert not (tmp_path / "script" / "done.json").exists()


def test_a_launcher_starts_the_command_in_processes_of_its_own(tmp_path: Path) -> None:
    launch = tmp_path / "launch.py"
    launch.write_text("import sys, pathlib\npathlib.Path('said').write_text(str(sys.argv[1:]))\n")
    file = write(tmp_path, SFT | {"launch": f"{sys.executable} {launch} --num 2"})
    here = Path.cwd()
    try:
        os.chdir(tmp_path)
        start(file)
    finally:
        os.chdir(here)
    said = (tmp_path / "said").read_text()
    assert said.startswith("['--num', '2', '-m', 'kedge.cli.main', 'sft', '--model_name_or_path=m'")


def test_null_is_passed_on_where_it_says_something(tmp_path: Path) -> None:
    options = {"stop_token": None, "eval_steps": None, "seed": 1}
    _, (stage,) = pipeline.read(write(tmp_path, {"ppo": options}))
    assert stage.command_line()[:2] == ["--stop_token=none", "--seed=1"]
