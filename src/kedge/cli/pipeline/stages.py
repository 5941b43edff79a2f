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

RL = ("ppo", "rloo", "grpo", "async-ppo")
PLACES = {"generate": ("model", "prompts"), "judge": ("ours", "theirs")}  # positional arguments
SCRIPT = "script"  # a custom program
COMMANDS = ("sft", "reward", *RL, *PLACES, SCRIPT)
HERE = "here"  # variable: the folder of the pipeline's file
_KEYS = {"output_dir", "variables", "stages"}
_REFERENCE = re.compile(r"\$\{([^}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command of a pipeline."""

    name: str
    command: str
    options: Mapping[str, Any]
    here: str = "."  # folder of the pipeline's file
    launch: tuple[str, ...] = ()  # command that starts it in separate processes
    uses: tuple[str, ...] = ()  # stages whose folders its options name

    @property
    def definition(self) -> dict[str, Any]:
        """Everything that determines its results, as JSON: options and digests of programs."""
        options = json.loads(json.dumps(dict(self.options)))
        return {"command": self.command, "options": options, "programs": self._programs()}

    def _programs(self) -> dict[str, str]:
        """Digests of the Python files that options name, alone or as ``file.py:function``."""
        digests = {}
        for value in self.options.values():
            for word in value if isinstance(value, list) else [value]:
                name = re.sub(r"(\.py):\w+$", r"\1", word) if isinstance(word, str) else ""
                file = Path(name.replace("${here}", self.here))
                if name.endswith(".py") and file.is_file():
                    digests[name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        return digests

    def words(self, folder: Path) -> list[str]:
        """Its command line, without the output folder."""

        def filled(value: Any) -> str:
            text = value if isinstance(value, str) else json.dumps(value)
            return _REFERENCE.sub(
                lambda match: self.here if match[1] == HERE else str(folder / match[1]), text
            )

        places = ("path",) if self.command == SCRIPT else PLACES.get(self.command, ())
        switches = self.command in PLACES or self.command == SCRIPT
        words = [filled(self.options[name]) for name in places]
        for name, value in self.options.items():
            if name in places:
                continue
            if value is None:
                words += [f"--{name}=none"] if name in self._nullable() else []
            elif isinstance(value, list):
                words += [f"--{name}", *map(filled, value)]
            elif isinstance(value, bool) and switches:
                words += [f"--{name}"] if value else []
            else:
                words.append(f"--{name}={filled(value)}")
        return words

    def _nullable(self) -> frozenset[str]:
        """Options for which null differs from the default."""
        from kedge.cli.arguments import nullable
        from kedge.cli.planning.plan import CONFIGS

        return nullable([CONFIGS[self.command]]) if self.command in RL else frozenset()


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
    path = Path(file).expanduser()
    content = _load(path, file)
    variables, here = _variables(content, file, given or {}), str(path.resolve().parent)
    output = str(_filled(content["output_dir"], {**variables, HERE: here}))
    stages: list[Stage] = []
    for number, entry in enumerate(content["stages"], 1):
        stage = _stage(_filled(entry, variables), f"{file}, stage {number}", stages, here)
        if stage.name in (*variables, HERE):
            raise ConfigError(f"{file}: {stage.name!r} is both a variable and a stage; rename one")
        stages.append(stage)
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
    unknown = sorted(set(map(str, content)) - _KEYS)
    if unknown or not isinstance(content.get("output_dir"), str):
        raise ConfigError(
            f"{file}: {f'unknown key {unknown[0]!r}' if unknown else 'output_dir is missing'};"
            f" a pipeline has {', '.join(sorted(_KEYS))}"
        )
    return content


def _variables(content: dict[str, Any], file: str, given: Mapping[str, Any]) -> dict[str, Any]:
    named = content.get("variables") or {}
    if not isinstance(named, dict):
        raise ConfigError(f"{file}: variables must be name: value, got {named!r}")
    for name in given:
        if name not in named:
            raise ConfigError(f"{file}: {_unknown('variable', name, named)}")
    values = {**named, **given}
    for name, value in values.items():
        if value is None:
            raise ConfigError(f"{file}: the variable {name} has no value; add --set {name}=VALUE")
    return values


def _filled(value: Any, variables: Mapping[str, Any]) -> Any:
    """Substitute variables; one that is the whole value keeps its type."""
    if isinstance(value, dict):
        return {key: _filled(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, variables) for item in value]
    if not isinstance(value, str):
        return value
    alone = _REFERENCE.fullmatch(value)
    if alone and alone[1] in variables:
        return variables[alone[1]]
    return _REFERENCE.sub(
        lambda match: str(variables[match[1]]) if match[1] in variables else match[0], value
    )


def _stage(entry: Any, where: str, earlier: Sequence[Stage], here: str) -> Stage:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be COMMAND: {{options}}, got {entry!r}")
    rest = {key: value for key, value in entry.items() if key not in ("name", "launch")}
    if len(rest) != 1:
        raise ConfigError(
            f"{where} must be one command, got {', '.join(sorted(map(str, rest))) or 'none'}"
        )
    ((command, options),) = rest.items()
    options = _checked(str(command), options or {}, where, here)
    name = str(entry.get("name", command))
    names = [stage.name for stage in earlier]
    if name in names or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ConfigError(
            f"{where}: the name {name!r} must be unique and a valid folder name; set `name: other`"
        )
    references = dict.fromkeys(_REFERENCE.findall(json.dumps(options)))
    uses = tuple(name for name in references if name != HERE)
    for used in uses:
        if used not in names:
            raise ConfigError(
                f"{where}: ${{{used}}} must be a variable or an earlier stage; earlier stages:"
                f" {', '.join(names) or 'none'}"
            )
    return Stage(
        name=name,
        command=str(command),
        options=options,
        here=here,
        launch=tuple(shlex.split(str(entry.get("launch", "")))),
        uses=uses,
    )


def _checked(command: str, options: Any, where: str, here: str) -> dict[str, Any]:
    """Check that the options of a command exist."""
    if command not in COMMANDS:
        raise ConfigError(f"{where}: {_unknown('command', command, COMMANDS)}")
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: the options of {command} must be name: value")
    needed = ("path",) if command == SCRIPT else PLACES.get(command, ())
    missing = [place for place in needed if place not in options]
    if missing:
        raise ConfigError(f"{where}: {command} needs {' and '.join(missing)}")
    accepted = {*options} if command == SCRIPT else _options(command)
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
    return options


def _options(command: str) -> set[str]:
    """The names of a command's options."""
    flags: Any
    if command in RL:
        from kedge.cli.arguments import parser
        from kedge.cli.planning.plan import CONFIGS

        flags = parser(command, CONFIGS[command])
    elif command in PLACES:
        flags = importlib.import_module(f"kedge.cli.tools.{command}").parser()
    else:
        from kedge.cli.train.reward import RewardArguments
        from kedge.cli.train.sft import BeforeArguments, build_parser

        reward = command == "reward"
        flags = (
            build_parser("reward", RewardArguments)
            if reward
            else build_parser("sft", BeforeArguments)
        )
    return {action.dest for action in flags._actions} - {"help"}


def _unknown(kind: str, word: Any, known: Iterable[str]) -> str:
    return f"unknown {kind} {word!r}{hint(str(word), {*known})}"
