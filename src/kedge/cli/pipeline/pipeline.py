"""``kedge pipeline``: commands one after another, each in a folder of its own, resumable."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.cli.arguments import Flags
from kedge.cli.pipeline.stages import RL, SCRIPT, Pipeline, Stage, read
from kedge.errors import ConfigError, KedgeError

EPILOG = """\
FILE.yaml:
  output_dir: runs/mine
  variables: {seed: 0}
  stages:
    - sft:      {model_name_or_path: MODEL, dataset_name: texts.jsonl, seed: "${seed}"}
    - reward:   {model_name_or_path: "${sft}", dataset_name: pairs.jsonl}
    - ppo:      {model_name_or_path: "${sft}", reward_model_path: "${reward}", dataset_name: p.json}
    - generate: {model: "${ppo}", prompts: test.jsonl}
    - judge:    {ours: "${generate}/completions.jsonl", theirs: "@reference", reward_model: GOLD}
Options are the command's flags; ${NAME} is the folder of an earlier stage, or a variable; ${here}
is the folder of the file.  A stage is named after its command, or by `name: other` beside it;
`launch: "accelerate launch --config_file fsdp2.yaml"` beside it starts it in several processes;
`script: {path: mine.py, ...}` runs a program of yours with --output_dir."""
DONE = "done.json"  # written last


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = Flags(
        prog="kedge pipeline",
        description="Run commands one after another.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("file", metavar="FILE.yaml")
    flags.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="values of variables"
    )
    flags.add_argument(
        "--seeds", nargs="+", type=int, help="all of it for each value of the variable seed"
    )
    flags.add_argument(
        "--only", nargs="+", metavar="NAME", help="these stages, and the stages that they use"
    )
    flags.add_argument("--redo", metavar="NAME", help="run this stage again, and what follows it")
    flags.add_argument("--dry_run", action="store_true", help="print the commands alone")
    return flags


def main(argv: Sequence[str]) -> None:
    """Run what is not done yet, and show what was judged."""
    from kedge.cli.pipeline.results import results, show

    asked = parser().parse_args(list(argv))
    base, plans = load_pipelines(asked)
    for plan in plans:
        run(plan, redo=asked.redo, dry=asked.dry_run)
    if not asked.dry_run:
        found = results([(plan.folder, plan.stages) for plan in plans])
        if found:
            show(found)
            (base / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(f"kedge: the results are in {base / 'results.json'}")


def load_pipelines(asked: argparse.Namespace) -> tuple[Path, list[Pipeline]]:
    """The folder of all, and a plan for each seed, every one of them checked.

    Raises:
        ConfigError: something in the file or in the flags is wrong.
    """
    given = _given(asked.set)
    if asked.seeds is not None and "seed" in given:
        raise ConfigError("--seeds and --set seed=... are both given; choose one")
    base = read(asked.file, {**given, **({"seed": asked.seeds[0]} if asked.seeds else {})})
    plans = [base]
    if asked.seeds:
        plans = [
            replace(read(asked.file, {**given, "seed": seed}), folder=base.folder / f"seed-{seed}")
            for seed in dict.fromkeys(asked.seeds)
        ]
    if asked.only:
        plans = [plan.only(asked.only) for plan in plans]
    names = [stage.name for stage in plans[0].stages]
    if asked.redo is not None and asked.redo not in names:
        raise ConfigError(f"--redo {asked.redo}: the stages are {', '.join(names)}")
    return base.folder, plans


def _given(pairs: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` words; values are read as YAML, so that 3 is a number."""
    import yaml

    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise ConfigError(f"--set {pair}: write NAME=VALUE")
        found[name] = yaml.safe_load(value)
    return found


def run(plan: Pipeline, *, redo: str | None = None, dry: bool = False) -> None:
    """Run the stages that are not done; each marker is written when its stage has ended.

    Raises:
        ConfigError: a stage was done with other options.
        KedgeError: what a stage raises.
    """
    marks: dict[str, str] = {}
    for stage in plan.stages:
        place = plan.folder / stage.name
        inputs = {name: marks[name] for name in stage.uses}
        mark = _done(place, stage, inputs, again=redo == stage.name)
        if dry or mark is None:
            told = f"kedge {stage.command}" if stage.command != SCRIPT else "python"
            words = " ".join(_words(stage, plan.folder))
            print(f"kedge: stage {stage.name}: {told} {words}", flush=True)
        else:
            print(f"kedge: stage {stage.name} is done", flush=True)
        if dry:
            marks[stage.name] = mark or ""
            continue
        if mark is None:
            mark = _run_stage(stage, plan.folder, inputs)
        marks[stage.name] = mark


def _run_stage(stage: Stage, folder: Path, inputs: Mapping[str, str]) -> str:
    from kedge.cli.main import load_command

    place, words = folder / stage.name, _words(stage, folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / DONE).unlink(missing_ok=True)
    if stage.command == SCRIPT:
        _start([*(stage.launch or (sys.executable,)), *words], stage)
    elif stage.launch:
        _start([*stage.launch, "-m", "kedge.cli.main", stage.command, *words], stage)
    else:
        load_command(stage.command)(words)
    mark = uuid.uuid4().hex
    about = {"run": mark, "asked": stage.asked, "inputs": inputs}
    unfinished = place / f"{DONE}.new"
    unfinished.write_text(json.dumps(about, indent=1), encoding="utf-8")
    unfinished.replace(place / DONE)
    return mark


def _start(words: list[str], stage: Stage) -> None:
    """Run a program to its end."""
    try:
        code = subprocess.run(words, check=False).returncode
    except OSError as error:
        raise KedgeError(f"stage {stage.name}: {words[0]!r} cannot be started: {error}") from error
    if code:
        raise KedgeError(f"stage {stage.name}: {' '.join(words[:3])} ... ended with code {code}")


def _done(place: Path, stage: Stage, inputs: Mapping[str, str], *, again: bool) -> str | None:
    """The mark of a stage that need not run again, else None."""
    file = place / DONE
    if again or not file.is_file():
        return None
    before = json.loads(file.read_text(encoding="utf-8"))
    if before["asked"] != stage.asked:
        raise ConfigError(
            f"stage {stage.name} in {place} was done with other options"
            f" ({_changes(before['asked'], stage.asked)}); run it again with --redo {stage.name},"
            " or name another output_dir"
        )
    if before["inputs"] != dict(inputs):
        return None  # a stage before it ran again
    return str(before["run"])


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What a stage was asked before, and what now."""
    told = []
    for part in ("options", "programs"):
        was, is_ = before.get(part, {}), now[part]
        for name in sorted({*was, *is_}):
            if was.get(name) != is_.get(name):
                said = f"{was.get(name)!r} before, {is_.get(name)!r} now"
                told.append(f"{name}: {said}" if part == "options" else f"{name} has changed")
    return ", ".join(told) or "another command"


def _words(stage: Stage, folder: Path) -> list[str]:
    """The words of a stage's command line."""
    place = folder / stage.name
    if stage.command == "generate":
        return [*stage.words(folder), "--output", str(place / "completions.jsonl")]
    return [*stage.words(folder), "--output_dir", str(place), *_resumed(stage, place)]


def _resumed(stage: Stage, place: Path) -> list[str]:
    """What makes a stage that was killed go on where it was."""
    if stage.command not in (*RL, "sft", "reward"):
        return []
    numbers = [int(p.name.rpartition("-")[2]) for p in place.glob("checkpoint-*[0-9]")]
    if not numbers or "resume_from_checkpoint" in stage.options:
        return []
    if (place / DONE).is_file():  # to be done again, from the start
        return ["--overwrite_output_dir"] if stage.command in RL else []
    newest = str(place / f"checkpoint-{max(numbers)}")
    return ["--resume_from_checkpoint", "True" if stage.command in RL else newest]
