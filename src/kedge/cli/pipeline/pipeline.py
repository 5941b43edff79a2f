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
from kedge.cli.pipeline.stages import SCRIPT, Pipeline, Stage, read
from kedge.errors import ConfigError, KedgeError
from kedge.trainers import TRAINERS

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
    import yaml

    variables: dict[str, Any] = {}
    for pair in flags.set:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise ConfigError(f"--set must be NAME=VALUE, got {pair}")
        variables[name] = yaml.safe_load(value)  # 3 is a number
    if flags.seeds is not None and "seed" in variables:
        raise ConfigError("--seeds and --set seed=... are both given; set only one")
    pipelines = []
    for seed in dict.fromkeys(flags.seeds or [None]):
        pipeline = read(flags.file, variables if seed is None else variables | {"seed": seed})
        base = pipeline.folder
        pipeline = pipeline if seed is None else replace(pipeline, folder=base / f"seed-{seed}")
        pipelines.append(pipeline.only(flags.only) if flags.only else pipeline)
    names = [stage.name for stage in pipelines[0].stages]
    if flags.redo is not None and flags.redo not in names:
        raise ConfigError(f"--redo {flags.redo} must be one of the stages {', '.join(names)}")
    return base, pipelines


def run(pipeline: Pipeline, *, redo: str | None = None, dry: bool = False) -> None:
    """Run the unfinished stages; a marker is written when a stage ends."""
    marks: dict[str, str] = {}
    for stage in pipeline.stages:
        place = pipeline.folder / stage.name
        inputs = {name: marks[name] for name in stage.uses}
        mark = None if redo == stage.name else _finished(place, stage, inputs)
        if dry or mark is None:
            words = command_line(stage, pipeline.folder)
            program = f"kedge {stage.command}" if stage.command != SCRIPT else "python"
            print(f"kedge: stage {stage.name}: {program} {' '.join(words)}", flush=True)
        else:
            print(f"kedge: stage {stage.name} is done", flush=True)
        if mark is None:
            mark = "" if dry else _run_stage(stage, place, words, inputs)
        marks[stage.name] = mark


def _run_stage(stage: Stage, place: Path, words: list[str], inputs: Mapping[str, str]) -> str:
    from kedge.cli.main import load_command

    place.mkdir(parents=True, exist_ok=True)
    (place / DONE).unlink(missing_ok=True)
    if stage.command == SCRIPT or stage.launch:
        module = [] if stage.command == SCRIPT else ["-m", "kedge.cli.main", stage.command]
        program = [*(stage.launch or (sys.executable,)), *module, *words]
        try:
            code = subprocess.run(program, check=False).returncode
        except OSError as error:
            raise KedgeError(
                f"stage {stage.name}: {program[0]!r} cannot be started ({error})"
            ) from error
        if code:
            raise KedgeError(
                f"stage {stage.name}: {' '.join(program[:3])} ... failed with exit code {code}"
            )
    else:
        load_command(stage.command)(words)
    mark = uuid.uuid4().hex
    about = {"run": mark, "definition": stage.definition, "inputs": inputs}
    unfinished = place / f"{DONE}.new"
    unfinished.write_text(json.dumps(about, indent=1), encoding="utf-8")
    unfinished.replace(place / DONE)
    return mark


def _finished(place: Path, stage: Stage, inputs: Mapping[str, str]) -> str | None:
    """The marker of a stage that is up to date, else None."""
    if not (place / DONE).is_file():
        return None
    before = json.loads((place / DONE).read_text(encoding="utf-8"))
    now = stage.definition
    if before["definition"] != now:
        changes = []
        for part in ("options", "programs"):
            was, is_ = before["definition"].get(part, {}), now[part]
            for name in sorted(n for n in {*was, *is_} if was.get(n) != is_.get(n)):
                change = f": {was.get(name)!r} before, {is_.get(name)!r} now"
                changes.append(f"{name}{change}" if part == "options" else f"{name} has changed")
        raise ConfigError(
            f"stage {stage.name} in {place} was run with other options"
            f" ({', '.join(changes) or 'another command'}); run it again with --redo {stage.name},"
            " or set another output_dir"
        )
    return str(before["run"]) if before["inputs"] == dict(inputs) else None


def command_line(stage: Stage, folder: Path) -> list[str]:
    """The words of a stage's command line, with flags that resume what was interrupted."""
    place, words = folder / stage.name, stage.words(folder)
    if stage.command == "generate":
        return [*words, "--output", str(place / "completions.jsonl")]
    words += ["--output_dir", str(place)]
    rl, steps = (
        stage.command in TRAINERS,
        [int(p.name.rpartition("-")[2]) for p in place.glob("checkpoint-*[0-9]")],
    )
    if not steps or not (rl or stage.command in ("sft", "reward")):
        return words
    if "resume_from_checkpoint" in stage.options:
        return words
    if (place / DONE).is_file():  # it runs again from the start
        return [*words, "--overwrite_output_dir"] if rl else words
    newest = str(place / f"checkpoint-{max(steps)}")
    return [*words, "--resume_from_checkpoint", "True" if rl else newest]
