"""The stages of ``kedge pipeline``, read from its file and checked before any of them runs."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError
from kedge.suggestions import hint
from kedge.trainers import TRAINERS, load_trainer

SCRIPT = "script"  # a custom program
POSITIONAL = {
    **dict.fromkeys(("sft", "reward", *TRAINERS), ()),
    "generate": ("model", "prompts"),
    "judge": ("ours", "theirs"),
    SCRIPT: ("path",),
}  # arguments without a flag, by command
HERE = "here"  # variable: the folder of the pipeline's file
_KEYS = ("output_dir", "stages", "variables")
_REFERENCE = re.compile(r"\$\{([^}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command of a pipeline.

    Args:
        name: of the stage and of its folder.
        command: of ``kedge``, or "script".
        options: of the command, with references to the folders of other stages.
        here: folder of the pipeline's file.
        launch: command that starts it in separate processes.
        uses: stages whose folders its options name.
    """

    name: str
    command: str
    options: Mapping[str, Any]
    here: str = "."
    launch: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()

    @property
    def definition(self) -> dict[str, Any]:
        """Everything that determines its results, as JSON: options and digests of programs."""
        digests = {}
        for value in self.options.values():
            for word in value if isinstance(value, list) else [value]:
                name = re.sub(r"(\.py):\w+$", r"\1", word) if isinstance(word, str) else ""
                file = Path(name.replace("${here}", self.here))
                if name.endswith(".py") and file.is_file():
                    digests[name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        options = json.loads(json.dumps(dict(self.options)))
        return {"command": self.command, "options": options, "programs": digests}

    def words(self, folder: Path) -> list[str]:
        """Its command line, without the output folder."""

        def text(value: Any) -> str:
            text = value if isinstance(value, str) else json.dumps(value)
            return _REFERENCE.sub(
                lambda match: self.here if match[1] == HERE else str(folder / match[1]), text
            )

        places, nullable = POSITIONAL[self.command], frozenset[str]()
        if self.command in TRAINERS:
            from kedge.cli import arguments

            nullable = arguments.nullable([load_trainer(self.command).SPEC.command_config])
        words = [text(self.options[name]) for name in places]
        for name, value in self.options.items():
            if name in places:
                continue
            if value is None:
                words += [f"--{name}=none"] if name in nullable else []
            elif isinstance(value, list):
                words += [f"--{name}", *map(text, value)]
            elif isinstance(value, bool) and places:  # a command whose flags take no true or false
                words += [f"--{name}"] if value else []
            else:
                words.append(f"--{name}={text(value)}")
        return words


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An output folder and the stages that write to it."""

    folder: Path
    stages: tuple[Stage, ...]

    def only(self, names: Sequence[str]) -> Pipeline:
        """The named stages, and the stages that these use."""
        known = [stage.name for stage in self.stages]
        for name in names:
            if name not in known:
                raise ConfigError(f"unknown stage {name!r}; the stages are {', '.join(known)}")
        wanted = set(names)
        for stage in reversed(self.stages):  # a stage uses earlier ones
            if stage.name in wanted:
                wanted.update(stage.uses)
        return Pipeline(self.folder, tuple(stage for stage in self.stages if stage.name in wanted))


def read(file: str, given: Mapping[str, Any] | None = None) -> Pipeline:
    """Read a pipeline file and check every option; ``given`` overrides its variables."""
    path, given = Path(file).expanduser(), given or {}
    content = _load(path, file)
    variables, here = content.get("variables") or {}, str(path.resolve().parent)
    if not isinstance(variables, dict):
        raise ConfigError(f"{file}: variables must be name: value, got {variables!r}")
    for name in given:
        if name not in variables:
            raise ConfigError(f"{file}: {_unknown('variable', name, variables)}")
    variables |= given
    for name, value in variables.items():
        if value is None:
            raise ConfigError(f"{file}: the variable {name} has no value; add --set {name}=VALUE")
    stages: list[Stage] = []
    for number, entry in enumerate(content["stages"], 1):
        entry = _substitute(entry, variables)  # noqa: PLW2901
        stage = _read_stage(entry, f"{file}, stage {number}", stages, here)
        if stage.name in (*variables, HERE):
            raise ConfigError(f"{file}: {stage.name!r} is both a variable and a stage; rename one")
        stages.append(stage)
    output = str(_substitute(content["output_dir"], {**variables, HERE: here}))
    return Pipeline(Path(output).expanduser(), tuple(stages))


def _load(path: Path, file: str) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        raise ConfigError(f"{file}: the file does not exist")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("stages"), list):
        raise ConfigError(f"{file} must have output_dir and a list of stages")
    unknown = sorted(set(map(str, content)) - {*_KEYS})
    if unknown or not isinstance(content.get("output_dir"), str):
        problem = f"unknown key {unknown[0]!r}" if unknown else "output_dir is missing"
        raise ConfigError(f"{file}: {problem}; a pipeline has {', '.join(_KEYS)}")
    return content


def _substitute(value: Any, variables: Mapping[str, Any]) -> Any:
    """Substitute variables; one that is the whole value keeps its type."""
    if isinstance(value, dict):
        return {key: _substitute(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, variables) for item in value]
    if not isinstance(value, str):
        return value
    alone = _REFERENCE.fullmatch(value)
    if alone and alone[1] in variables:
        return variables[alone[1]]
    return _REFERENCE.sub(lambda match: str(variables.get(match[1], match[0])), value)


def _read_stage(entry: Any, where: str, earlier: Sequence[Stage], here: str) -> Stage:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be COMMAND: {{options}}, got {entry!r}")
    rest = {str(key): value for key, value in entry.items() if key not in ("name", "launch")}
    if len(rest) != 1:
        raise ConfigError(f"{where} must be one command, got {', '.join(sorted(rest)) or 'none'}")
    ((command, options),) = rest.items()
    options = options or {}
    _check_options(command, options, where, here)
    name, names = str(entry.get("name", command)), [stage.name for stage in earlier]
    if name in names or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ConfigError(
            f"{where}: the name {name!r} must be unique and a valid folder name; set `name: other`"
        )
    uses = dict.fromkeys(_REFERENCE.findall(json.dumps(options)))
    uses.pop(HERE, None)
    for used in uses:
        if used not in names:
            raise ConfigError(
                f"{where}: ${{{used}}} must be a variable or an earlier stage; earlier stages:"
                f" {', '.join(names) or 'none'}"
            )
    return Stage(
        name=name,
        command=command,
        options=options,
        here=here,
        launch=tuple(shlex.split(str(entry.get("launch", "")))),
        uses=tuple(uses),
    )


def _check_options(command: str, options: Any, where: str, here: str) -> None:
    if command not in POSITIONAL:
        raise ConfigError(f"{where}: {_unknown('command', command, POSITIONAL)}")
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: the options of {command} must be name: value")
    missing = [place for place in POSITIONAL[command] if place not in options]
    if missing:
        raise ConfigError(f"{where}: {command} needs {' and '.join(missing)}")
    accepted = {*options} if command == SCRIPT else _option_names(command)
    for key in options:
        if key in ("output_dir", "output"):
            raise ConfigError(f"{where}: {key} is set by the pipeline; leave it out")
        if key not in accepted:
            raise ConfigError(f"{where}: {_unknown('option', key, accepted)}")
    program = str(options.get("path", "")).replace("${here}", here)
    if command == SCRIPT and not Path(program).is_file():
        raise ConfigError(
            f"{where}: the file {program} does not exist; ${{here}} is the folder of the pipeline"
        )


def _option_names(command: str) -> set[str]:
    flags: Any
    if command in TRAINERS:
        from kedge.cli.arguments import parser

        flags = parser(command, load_trainer(command).SPEC.command_config)
    elif POSITIONAL[command]:
        flags = importlib.import_module(f"kedge.cli.tools.{command}").parser()
    else:
        from kedge.cli.train.reward import RewardArguments
        from kedge.cli.train.sft import BeforeArguments, build_parser

        if command == "reward":
            flags = build_parser("reward", RewardArguments)
        else:
            flags = build_parser("sft", BeforeArguments)
    return {action.dest for action in flags._actions} - {"help"}


def _unknown(kind: str, word: Any, known: Iterable[str]) -> str:
    return f"unknown {kind} {word!r}{hint(str(word), {*known})}"
