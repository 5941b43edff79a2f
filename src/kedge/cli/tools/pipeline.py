"""``kedge pipeline``: runs commands in order, each in its own folder, resumable."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge import plugins
from kedge.cli.flags import Flags, print_table
from kedge.cli.main import load_command
from kedge.cli.train import ppo
from kedge.ext.judge.judges import WORTH
from kedge.math.intervals import share_interval
from kedge.records.errors import ConfigError, KedgeError
from kedge.reporting.base import write_whole
from kedge.reporting.log import read_objects
from kedge.suggestions import hint
from kedge.trainers import trainer_commands

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
SCRIPT = "script"  # a custom program
POSITIONAL = {
    **dict.fromkeys(("sft", "reward", *trainer_commands()), ()),
    "generate": ("model", "prompts"),
    "judge": ("ours", "theirs"),
    SCRIPT: ("path",),
}  # arguments without a flag, by command
HERE = "here"  # variable: folder of the pipeline file
DONE = "done.json"  # written last, marks a finished stage
_REFERENCE = re.compile(r"\$\{([^}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command of a pipeline."""

    place: Path  # folder of the stage, which has the stage's name
    command: str  # a command of ``kedge``, or "script"
    options: Mapping[str, Any]  # may refer to folders of other stages
    here: str  # folder of the pipeline's file
    launch: tuple[str, ...]  # command that starts the stage in separate processes
    uses: tuple[str, ...]  # stages whose folders the options name

    @property
    def name(self) -> str:
        """Its name."""
        return self.place.name

    @property
    def definition(self) -> dict[str, Any]:
        """Everything that determines the stage's results, as JSON: options and program digests."""
        digests = {}
        for value in self.options.values():
            for word in value if isinstance(value, list) else [value]:
                name = re.sub(r"(\.py):\w+$", r"\1", str(word))
                file = Path(name.replace("${here}", self.here))
                if name.endswith(".py") and file.is_file():
                    digests[name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        return {"command": self.command, **json.loads(json.dumps(self.options)), **digests}

    def command_line(self) -> list[str]:
        """The stage's command line, with flags to resume an interrupted run."""
        folders = {name: str(self.place.parent / name) for name in self.uses}
        options = substitute(self.options, {HERE: self.here, **folders})
        positional = POSITIONAL[self.command]
        words = [_text(options[name]) for name in positional]
        for name, value in options.items():
            if isinstance(value, list):
                words += [f"--{name}", *map(_text, value)]
            elif isinstance(value, bool) and positional:  # flags of these commands take no value
                words += [f"--{name}"] if value else []
            elif name not in positional:
                words.append(f"--{name}={_text(value)}")
        if self.command == "generate":
            return [*words, "--output", str(self.place / "completions.jsonl")]
        words += ["--output_dir", str(self.place)]
        resumable = not positional and "resume_from_checkpoint" not in options
        if resumable and any(self.place.glob("checkpoint-*[0-9]")):
            if not (self.place / DONE).is_file():
                words += ["--resume_from_checkpoint", "True"]
            elif self.command in trainer_commands():  # training restarts from scratch
                words += ["--overwrite_output_dir"]
        return words


def main(argv: Sequence[str]) -> None:
    """Run the unfinished stages and show the results of the judges."""
    import yaml

    parser = Flags("kedge pipeline", "Run commands in order.", EPILOG)
    parser.add_argument("file", metavar="FILE.yaml")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="values of variables"
    )
    seeds_help = "run the pipeline once for each value of the variable seed"
    parser.add_argument("--seeds", nargs="+", type=int, help=seeds_help)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="run only these stages and the stages they use"
    )
    parser.add_argument("--redo", metavar="NAME", help="run this stage and its dependents again")
    parser.add_argument("--dry_run", action="store_true", help="only print the commands")
    flags = parser.parse_args(list(argv))
    variables: dict[str, Any] = {}
    for pair in flags.set:
        name, _, value = pair.partition("=")
        if not name or "=" not in pair:
            raise ConfigError(f"--set must be NAME=VALUE, got {pair}")
        variables[name] = yaml.safe_load(value)  # parses numbers: "3" becomes 3
    if flags.seeds is not None and "seed" in variables:
        raise ConfigError("--seeds and --set seed=... are both given; set only one")
    seeds: list[dict[str, Any]] = [{"seed": seed} for seed in dict.fromkeys(flags.seeds or [])]
    runs = []
    for seed in seeds or [{}]:
        folder, stages = read(flags.file, variables | seed, **seed)
        runs.append(select(stages, flags.only) if flags.only else stages)
    names = [stage.name for stage in runs[0]]
    if flags.redo is not None and flags.redo not in names:
        raise ConfigError(f"--redo {flags.redo} must be one of the stages {', '.join(names)}")
    for stages in runs:
        run(stages, redo=flags.redo, dry=flags.dry_run)
    rows = [] if flags.dry_run else results(runs)
    if rows:
        show(rows)
        (folder / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        print(f"kedge: the results are in {folder / 'results.json'}")


# -- the file --------------------------------------------------------------------------------------


def read(
    file: str, given: Mapping[str, Any] | None = None, *, seed: int | None = None
) -> tuple[Path, list[Stage]]:
    """The output folder and the stages of a pipeline file, with every option checked.

    ``given`` overrides variables of the file; with a seed the stages are in ``seed-N``.
    """
    from kedge.ext.trl.scripts import read_yaml

    content, given = read_yaml(file, ""), given or {}
    output, entries = content.get("output_dir"), content.get("stages")
    known = content.keys() <= {"output_dir", "stages", "variables"}
    if not known or not isinstance(output, str) or not isinstance(entries, list):
        raise ConfigError(
            f"{file} must have output_dir, a folder, a list of stages, and at most variables; got"
            f" {', '.join(map(str, content)) or 'nothing'}"
        )
    variables = content.get("variables") or {}
    for name in given:
        if name not in variables:
            raise ConfigError(f"{file}: unknown variable {name!r}{hint(name, variables)}")
    variables = {**variables, **given}
    for name, value in variables.items():
        if value is None:
            raise ConfigError(f"{file}: the variable {name} has no value; add --set {name}=VALUE")
    here = str(Path(file).expanduser().resolve().parent)
    folder = Path(substitute(output, {**variables, HERE: here})).expanduser()
    place = folder if seed is None else folder / f"seed-{seed}"
    stages: dict[str, Stage] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{file}, stage {number}"
        name, command, launch, options = _read_entry(substitute(entry, variables), where, here)
        if name in {*stages, *variables, HERE} or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ConfigError(
                f"{where}: the name {name!r} must be unique, also among variables, and a valid"
                " folder name; set `name: other`"
            )
        uses = {match: None for match in _REFERENCE.findall(json.dumps(options)) if match != HERE}
        for used in uses.keys() - stages.keys():
            raise ConfigError(
                f"{where}: ${{{used}}} must be a variable or an earlier stage; earlier stages:"
                f" {', '.join(stages) or 'none'}"
            )
        stages[name] = Stage(
            place=place / name,
            command=command,
            options=options,
            here=here,
            launch=launch,
            uses=tuple(uses),
        )
    return folder, list(stages.values())


def substitute(value: Any, names: Mapping[str, Any]) -> Any:
    """Replace ``${NAME}`` by its value, which keeps its type if nothing else is in the text."""
    if isinstance(value, dict):
        return {key: substitute(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [substitute(item, names) for item in value]
    if not isinstance(value, str):
        return value
    alone = _REFERENCE.fullmatch(value)
    if alone and alone[1] in names:
        return names[alone[1]]
    return _REFERENCE.sub(lambda match: str(names.get(match[1], match[0])), value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read_entry(
    entry: Any, where: str, here: str
) -> tuple[str, str, tuple[str, ...], dict[str, Any]]:
    """Name, command, launcher and options of a stage, with the options checked."""
    rest = dict(entry) if isinstance(entry, dict) else {}
    launch, name = shlex.split(str(rest.pop("launch", ""))), rest.pop("name", None)
    if len(rest) != 1:
        got = ", ".join(sorted(map(str, rest))) or entry
        raise ConfigError(f"{where} must be one COMMAND: {{options}}, got {got}")
    ((command, options),) = rest.items()
    options = {} if options is None else options
    if command not in POSITIONAL:
        raise ConfigError(f"{where}: unknown command {command!r}{hint(str(command), POSITIONAL)}")
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: the options of {command} must be name: value")
    missing = [place for place in POSITIONAL[command] if place not in options]
    if missing:
        raise ConfigError(f"{where}: {command} needs {' and '.join(missing)}")
    nullable: Iterable[str] = ()
    if command == SCRIPT:
        accepted, program = {*options}, str(options["path"]).replace("${here}", here)
        if not Path(program).is_file():
            problem = f"{where}: the file {program} does not exist"
            raise ConfigError(f"{problem}; ${{here}} is the folder of the pipeline")
    else:
        entry = plugins.find("kedge.commands").get(command)
        module = importlib.import_module(entry.module if entry else "kedge.cli.tools.generate")
        flags = ppo.parser(command) if command in trainer_commands() else module.parser()
        accepted = {action.dest for action in flags._actions} - {"help"}
        nullable = getattr(flags, "nullable", ())
    for key in options:
        if key in ("output_dir", "output"):
            raise ConfigError(f"{where}: {key} is set by the pipeline; leave it out")
        if key not in accepted:
            raise ConfigError(f"{where}: unknown option {key!r}{hint(str(key), accepted)}")
    options = {  # drop null values, or write "none" for options that accept it
        name: "none" if value is None else value
        for name, value in options.items()
        if value is not None or name in nullable
    }
    return str(name or command), command, tuple(launch), options


def select(stages: Sequence[Stage], names: Sequence[str]) -> list[Stage]:
    """The named stages and the stages they use."""
    known = [stage.name for stage in stages]
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown stage {name!r}; the stages are {', '.join(known)}")
    wanted = set(names)
    for stage in reversed(stages):  # stages only use results of earlier ones
        if stage.name in wanted:
            wanted.update(stage.uses)
    return [stage for stage in stages if stage.name in wanted]


# -- the run ---------------------------------------------------------------------------------------


def run(stages: Sequence[Stage], *, redo: str | None = None, dry: bool = False) -> None:
    """Run the unfinished stages; a marker is written when a stage ends."""
    marks: dict[str, str] = {}
    for stage in stages:
        inputs = {name: marks[name] for name in stage.uses}
        mark = None if redo == stage.name else _finished(stage, inputs)
        words = stage.command_line()
        if dry or mark is None:
            program = f"kedge {stage.command}" if stage.command != SCRIPT else "python"
            print(f"kedge: stage {stage.name}: {program} {' '.join(words)}", flush=True)
        else:
            print(f"kedge: stage {stage.name} is done", flush=True)
        if mark is None and not dry:
            mark = uuid.uuid4().hex
            _run_stage(stage, words)
            about = {"run": mark, "definition": stage.definition, "inputs": inputs}
            write_whole(stage.place / DONE, json.dumps(about, indent=1))
        marks[stage.name] = mark or ""


def _finished(stage: Stage, inputs: Mapping[str, str]) -> str | None:
    """The marker of a finished stage that is up to date, else None."""
    if not (stage.place / DONE).is_file():
        return None
    done, now = json.loads((stage.place / DONE).read_text(encoding="utf-8")), stage.definition
    before = done["definition"]
    changes = [
        f"{name}: {before.get(name)!r} before, {now.get(name)!r} now"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if changes:
        raise ConfigError(
            f"stage {stage.name} in {stage.place} was run with other options"
            f" ({', '.join(changes)}); run it again with --redo {stage.name}, or set another"
            " output_dir"
        )
    return str(done["run"]) if done["inputs"] == inputs else None


def _run_stage(stage: Stage, words: list[str]) -> None:
    stage.place.mkdir(parents=True, exist_ok=True)
    (stage.place / DONE).unlink(missing_ok=True)
    if stage.command != SCRIPT and not stage.launch:
        load_command(stage.command)(words)
        return
    module = [] if stage.command == SCRIPT else ["-m", "kedge.cli.main", stage.command]
    program = [*(stage.launch or (sys.executable,)), *module, *words]
    try:
        code: object = subprocess.run(program, check=False).returncode
    except OSError as error:
        code = error
    if code:
        raise KedgeError(
            f"stage {stage.name}: {' '.join(program[:3])} ... failed with exit code {code}"
        )


# -- the results of the judges ---------------------------------------------------------------------


def results(runs: Sequence[Sequence[Stage]]) -> list[dict[str, Any]]:
    """One row for each judge stage: means, intervals and sums over the seeds."""
    rows = []
    for stages in zip(*runs, strict=True):
        if stages[0].command != "judge":
            continue
        summaries, outcomes = [], []
        for stage in stages:
            summaries.append(json.loads((stage.place / "summary.json").read_text()))
            lines = read_objects(stage.place / "judgments.jsonl")
            outcomes.append([WORTH[x["outcome"]] for x in lines if x["outcome"] in WORTH])
        low, high = share_interval(outcomes if len(outcomes) > 1 else [[x] for x in outcomes[0]])
        rates = [one["win_rate"] for one in summaries]
        controlled = [one["length_controlled_win_rate"] for one in summaries]
        rows.append(
            {
                "stage": stages[0].name,
                "judge": summaries[0]["judge"],
                "win_rate": fmean(rates),
                "win_rate_low": low,
                "win_rate_high": high,
                "each": rates,
                "length_controlled_win_rate": None if None in controlled else fmean(controlled),
                "prompts": sum(one["prompts"] for one in summaries),
                "invalid": sum(one["invalid"] for one in summaries),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    seeds, cells = len(rows[0]["each"]), []
    for row in rows:
        controlled = row["length_controlled_win_rate"]
        cells.append(
            (
                row["stage"],
                f"{row['win_rate']:.1%}",
                f"{row['win_rate_low']:.1%} .. {row['win_rate_high']:.1%}",
                "-" if controlled is None else f"{controlled:.1%}",
                ", ".join(f"{x:.1%}" for x in row["each"]),
            )
        )
    title = "win rates" if seeds == 1 else f"win rates, mean of {seeds} seeds"
    print_table(title, cells, ("stage", "win rate", "95%", "at equal length", "each seed"))
