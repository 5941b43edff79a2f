"""``kedge pipeline``: runs commands in order, each in its own folder, resumable."""

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

from kedge.cli.flags import Flags
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
Options are the command's flags.  ${NAME} is the folder of an earlier stage, or a variable; ${here}
is the folder of the file.  Next to a command, `name: other` names its stage (default: the command)
and `launch: "accelerate launch --config_file fsdp2.yaml"` starts it in several processes.
`script: {path: mine.py, ...}` runs a custom program with --output_dir."""
DONE = "done.json"  # written last


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = Flags("kedge pipeline", "Run commands in order.", EPILOG)
    flags.add_argument("file", metavar="FILE.yaml")
    flags.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="values of variables"
    )
    seeds = "run the pipeline once for each value of the variable seed"
    flags.add_argument("--seeds", nargs="+", type=int, help=seeds)
    flags.add_argument(
        "--only", nargs="+", metavar="NAME", help="run only these stages and the stages they use"
    )
    flags.add_argument("--redo", metavar="NAME", help="run this stage and its dependents again")
    flags.add_argument("--dry_run", action="store_true", help="only print the commands")
    return flags


def main(argv: Sequence[str]) -> None:
    """Run the unfinished stages and show the results of the judges."""
    from kedge.cli.pipeline.results import results, show

    flags = parser().parse_args(list(argv))
    base, pipelines = load_pipelines(flags)
    for pipeline in pipelines:
        run(pipeline, redo=flags.redo, dry=flags.dry_run)
    if not flags.dry_run:
        rows = results([(pipeline.folder, pipeline.stages) for pipeline in pipelines])
        if rows:
            show(rows)
            (base / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
            print(f"kedge: the results are in {base / 'results.json'}")


def load_pipelines(flags: argparse.Namespace) -> tuple[Path, list[Pipeline]]:
    """The output folder, and one checked pipeline per seed."""
    variables = _parse_variables(flags.set)
    if flags.seeds is not None and "seed" in variables:
        raise ConfigError("--seeds and --set seed=... are both given; set only one")
    if flags.seeds:
        seeds = dict.fromkeys(flags.seeds)
        pipelines = [read(flags.file, {**variables, "seed": seed}) for seed in seeds]
        base = pipelines[0].folder
        pipelines = [
            replace(pipeline, folder=base / f"seed-{seed}")
            for pipeline, seed in zip(pipelines, seeds, strict=True)
        ]
    else:
        pipelines = [read(flags.file, variables)]
        base = pipelines[0].folder
    if flags.only:
        pipelines = [plan.only(flags.only) for plan in pipelines]
    names = [stage.name for stage in pipelines[0].stages]
    if flags.redo is not None and flags.redo not in names:
        raise ConfigError(f"--redo {flags.redo} must be one of the stages {', '.join(names)}")
    return base, pipelines


def _parse_variables(pairs: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` words; values are read as YAML, so that 3 is a number."""
    import yaml

    variables = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise ConfigError(f"--set must be NAME=VALUE, got {pair}")
        variables[name] = yaml.safe_load(value)
    return variables


def run(pipeline: Pipeline, *, redo: str | None = None, dry: bool = False) -> None:
    """Run the unfinished stages; a marker is written when a stage ends."""
    marks: dict[str, str] = {}
    for stage in pipeline.stages:
        place = pipeline.folder / stage.name
        inputs = {name: marks[name] for name in stage.uses}
        mark = _done(place, stage, inputs, again=redo == stage.name)
        if dry or mark is None:
            program = f"kedge {stage.command}" if stage.command != SCRIPT else "python"
            words = " ".join(_words(stage, pipeline.folder))
            print(f"kedge: stage {stage.name}: {program} {words}", flush=True)
        else:
            print(f"kedge: stage {stage.name} is done", flush=True)
        if mark is None:
            mark = "" if dry else _run_stage(stage, pipeline.folder, inputs)
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
    about = {"run": mark, "definition": stage.definition, "inputs": inputs}
    unfinished = place / f"{DONE}.new"
    unfinished.write_text(json.dumps(about, indent=1), encoding="utf-8")
    unfinished.replace(place / DONE)
    return mark


def _start(words: list[str], stage: Stage) -> None:
    """Run a program to its end."""
    try:
        code = subprocess.run(words, check=False).returncode
    except OSError as error:
        raise KedgeError(f"stage {stage.name}: {words[0]!r} cannot be started ({error})") from error
    if code:
        raise KedgeError(
            f"stage {stage.name}: {' '.join(words[:3])} ... failed with exit code {code}"
        )


def _done(place: Path, stage: Stage, inputs: Mapping[str, str], *, again: bool) -> str | None:
    """The marker of a stage that is up to date, else None."""
    file = place / DONE
    if again or not file.is_file():
        return None
    before = json.loads(file.read_text(encoding="utf-8"))
    if before["definition"] != stage.definition:
        changes = _changes(before["definition"], stage.definition)
        raise ConfigError(
            f"stage {stage.name} in {place} was run with other options ({changes}); run it again"
            f" with --redo {stage.name}, or set another output_dir"
        )
    if before["inputs"] != dict(inputs):
        return None  # an earlier stage ran again
    return str(before["run"])


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between the options of two runs of a stage."""
    changes = []
    for part in ("options", "programs"):
        was, is_ = before.get(part, {}), now[part]
        for name in sorted({*was, *is_}):
            if was.get(name) != is_.get(name):
                change = f"{was.get(name)!r} before, {is_.get(name)!r} now"
                changes.append(f"{name}: {change}" if part == "options" else f"{name} has changed")
    return ", ".join(changes) or "another command"


def _words(stage: Stage, folder: Path) -> list[str]:
    """The words of a stage's command line."""
    place = folder / stage.name
    if stage.command == "generate":
        return [*stage.words(folder), "--output", str(place / "completions.jsonl")]
    return [*stage.words(folder), "--output_dir", str(place), *_resumed(stage, place)]


def _resumed(stage: Stage, place: Path) -> list[str]:
    """Flags that resume an interrupted stage."""
    if stage.command not in (*RL, "sft", "reward"):
        return []
    numbers = [int(p.name.rpartition("-")[2]) for p in place.glob("checkpoint-*[0-9]")]
    if not numbers or "resume_from_checkpoint" in stage.options:
        return []
    if (place / DONE).is_file():  # it runs again from the start
        return ["--overwrite_output_dir"] if stage.command in RL else []
    newest = str(place / f"checkpoint-{max(numbers)}")
    return ["--resume_from_checkpoint", "True" if stage.command in RL else newest]
