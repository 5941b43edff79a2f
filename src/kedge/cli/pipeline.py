"""``kedge pipeline``: commands one after another, each in a folder of its own, resumable."""

from __future__ import annotations

import difflib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.cli.flags import Flags
from kedge.errors import ConfigError

EPILOG = """\
FILE.yaml:
  output_dir: runs/mine
  stages:
    - sft:      {model_name_or_path: MODEL, dataset_name: texts.jsonl}
    - reward:   {model_name_or_path: "${sft}", dataset_name: pairs.jsonl}
    - ppo:      {model_name_or_path: "${sft}", reward_model_path: "${reward}", dataset_name: p.json}
    - generate: {model: "${ppo}", prompts: test.jsonl}
    - judge:    {ours: "${generate}/completions.jsonl", theirs: "@reference", reward_model: GOLD}
Options are the command's flags; ${NAME} is the folder of an earlier stage.  A stage is named after
its command, or by `name: other` beside it."""
DONE = "done.json"  # written last
_REFERENCE = re.compile(r"\$\{([^}]*)\}")
_PLACES = {"generate": ("model", "prompts"), "judge": ("ours", "theirs")}  # without a flag
_RL = ("ppo", "rloo", "grpo", "async-ppo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command of a pipeline."""

    name: str
    command: str
    options: Mapping[str, Any]
    uses: tuple[str, ...] = field(default=())  # stages whose folders its options name


def main(argv: Sequence[str]) -> None:
    """Run what is not done yet."""
    import argparse

    flags = Flags(
        prog="kedge pipeline",
        description="Run commands one after another.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("file", metavar="FILE.yaml")
    flags.add_argument("--redo", metavar="NAME", help="run this stage again, and what follows it")
    flags.add_argument("--dry_run", action="store_true", help="print the commands alone")
    asked = flags.parse_args(list(argv))
    folder, stages = read(asked.file)
    if asked.redo is not None and asked.redo not in {stage.name for stage in stages}:
        raise ConfigError(
            f"--redo {asked.redo}: the stages are {', '.join(s.name for s in stages)}"
        )
    run(folder, stages, redo=asked.redo, dry=asked.dry_run)


def read(file: str) -> tuple[Path, list[Stage]]:
    """Folder and stages, every option checked.

    Raises:
        ConfigError: no such file, stage, option or earlier stage.
    """
    import yaml

    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{file}: there is no such file")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("stages"), list):
        raise ConfigError(f"{file} needs output_dir, and a list of stages")
    unknown = sorted(set(found) - {"output_dir", "stages"})
    if unknown or not isinstance(found.get("output_dir"), str):
        raise ConfigError(
            f"{file}: {f'unknown key {unknown[0]!r}' if unknown else 'output_dir is missing'};"
            " a pipeline has output_dir and stages"
        )
    stages: list[Stage] = []
    for number, entry in enumerate(found["stages"], 1):
        stages.append(_stage(entry, f"{file}, stage {number}", stages))
    return Path(found["output_dir"]).expanduser(), stages


def _stage(entry: Any, where: str, earlier: Sequence[Stage]) -> Stage:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be COMMAND: {{options}}, got {entry!r}")
    rest = {key: value for key, value in entry.items() if key != "name"}
    if len(rest) != 1:
        raise ConfigError(
            f"{where} must be one command, got {', '.join(sorted(map(str, rest))) or 'none'}"
        )
    ((command, options),) = rest.items()
    options = _checked(str(command), options or {}, where)
    name = str(entry.get("name", command))
    names = [stage.name for stage in earlier]
    if name in names or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ConfigError(
            f"{where}: the name {name!r} is taken, or no name of a folder; add `name: other`"
        )
    uses = tuple(dict.fromkeys(_REFERENCE.findall(json.dumps(options))))
    for used in uses:
        if used not in names:
            raise ConfigError(
                f"{where}: ${{{used}}} is no earlier stage; there are {', '.join(names) or 'none'}"
            )
    return Stage(name=name, command=str(command), options=options, uses=uses)


def _checked(command: str, options: Any, where: str) -> dict[str, Any]:
    """The options of a command, all of which it has."""
    known = _commands()
    if command not in known:
        raise ConfigError(f"{where}: {_nearest(command, known, 'command')}")
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: the options of {command} must be name: value")
    accepted = known[command]()
    for key in options:
        if key in ("output_dir", "output"):
            raise ConfigError(f"{where}: {key} is decided by the pipeline; leave it out")
        if key not in accepted:
            raise ConfigError(f"{where}: {_nearest(str(key), accepted, 'option')}")
    missing = [place for place in _PLACES.get(command, ()) if place not in options]
    if missing:
        raise ConfigError(f"{where}: {command} needs {' and '.join(missing)}")
    return options


def _commands() -> dict[str, Callable[[], set[str]]]:
    """What can be a stage, and the options that it has."""

    def flags_of(made: Any) -> set[str]:
        return {action.dest for action in made._actions if action.dest != "help"}

    def rl(name: str) -> set[str]:
        from kedge.cli.arguments import parser
        from kedge.cli.plan import CONFIGS

        return flags_of(parser(name, CONFIGS[name]))

    def before(name: Any) -> set[str]:
        from kedge.cli.reward import RewardArguments
        from kedge.cli.sft import BeforeArguments, parser_of

        return flags_of(parser_of(name, RewardArguments if name == "reward" else BeforeArguments))

    def small(name: str) -> set[str]:
        from kedge.cli import generate, judge

        return flags_of((generate if name == "generate" else judge).parser())

    found: dict[str, Callable[[], set[str]]] = {}
    for name in ("sft", "reward"):
        found[name] = lambda name=name: before(name)  # type: ignore[misc]
    for name in _RL:
        found[name] = lambda name=name: rl(name)  # type: ignore[misc]
    for name in _PLACES:
        found[name] = lambda name=name: small(name)  # type: ignore[misc]
    return found


def _nearest(word: str, known: Any, kind: str) -> str:
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    hint = f"; the nearest is {near[0]}" if near else ""
    return f"there is no {kind} {word!r}{hint}"


def run(
    folder: Path, stages: Sequence[Stage], *, redo: str | None = None, dry: bool = False
) -> None:
    """Run the stages that are not done; each marker is written when its stage has ended.

    Raises:
        ConfigError: a stage was done with other options.
        KedgeError: what a stage raises.
    """
    from kedge.cli.main import command_of

    marks: dict[str, str] = {}
    for stage in stages:
        place = folder / stage.name
        inputs = {name: marks[name] for name in stage.uses}
        mark = _done(place, stage, inputs, again=redo == stage.name)
        if mark is None or dry:
            command = words(stage, folder)
            print(
                f"kedge: stage {stage.name}: kedge {stage.command} {' '.join(command)}", flush=True
            )
        else:
            print(f"kedge: stage {stage.name} is done", flush=True)
        if dry:
            marks[stage.name] = mark or ""
            continue
        if mark is None:
            place.mkdir(parents=True, exist_ok=True)
            (place / DONE).unlink(missing_ok=True)
            command_of(stage.command)(command)
            mark = uuid.uuid4().hex
            about = {"run": mark, "asked": _asked(stage), "inputs": inputs}
            unfinished = place / f"{DONE}.new"
            unfinished.write_text(json.dumps(about, indent=1), encoding="utf-8")
            unfinished.replace(place / DONE)
        marks[stage.name] = mark


def _asked(stage: Stage) -> dict[str, Any]:
    return {"command": stage.command, "options": dict(stage.options)}


def _done(place: Path, stage: Stage, inputs: Mapping[str, str], *, again: bool) -> str | None:
    """The mark of a stage that need not run again, else None."""
    file = place / DONE
    if again or not file.is_file():
        return None
    before = json.loads(file.read_text(encoding="utf-8"))
    asked = _asked(stage)
    if before["asked"] != json.loads(json.dumps(asked)):
        was, now = before["asked"]["options"], asked["options"]
        changed = sorted(k for k in {*was, *now} if was.get(k) != now.get(k)) or ["the command"]
        told = ", ".join(f"{k}: {was.get(k)!r} before, {now.get(k)!r} now" for k in changed)
        raise ConfigError(
            f"stage {stage.name} in {place} was done with other options ({told}); run it again with"
            f" --redo {stage.name}, or name another output_dir"
        )
    if before["inputs"] != dict(inputs):
        return None  # a stage before it ran again
    return str(before["run"])


def words(stage: Stage, folder: Path) -> list[str]:
    """The words of a stage's command line."""

    def filled(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return _REFERENCE.sub(lambda found: str(folder / found[1]), text)

    places = _PLACES.get(stage.command, ())
    found = [filled(stage.options[name]) for name in places]
    for name, value in stage.options.items():
        if name in places or value is None:
            continue
        if isinstance(value, list):
            found += [f"--{name}", *map(filled, value)]
        elif isinstance(value, bool) and stage.command in _PLACES:
            found += [f"--{name}"] if value else []
        else:
            found.append(f"--{name}={filled(value)}")
    place = folder / stage.name
    if stage.command == "generate":
        return [*found, "--output", str(place / "completions.jsonl")]
    return [*found, "--output_dir", str(place), *_resumed(stage, place)]


def _resumed(stage: Stage, place: Path) -> list[str]:
    """What makes a stage that was killed go on where it was."""
    numbers = [int(p.name.rpartition("-")[2]) for p in place.glob("checkpoint-*[0-9]")]
    if not numbers or "resume_from_checkpoint" in stage.options:
        return []
    if (place / DONE).is_file():  # to be done again, from the start
        return ["--overwrite_output_dir"] if stage.command in _RL else []
    newest = str(place / f"checkpoint-{max(numbers)}")
    return ["--resume_from_checkpoint", "True" if stage.command in _RL else newest]
