"""The stages of ``kedge pipeline``, read from its file and checked before any of them runs."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError
from kedge.suggestions import hint

RL = ("ppo", "rloo", "grpo", "async-ppo")
PLACES = {"generate": ("model", "prompts"), "judge": ("ours", "theirs")}  # without a flag
SCRIPT = "script"  # a program of the user's
HERE = "here"  # stands for the folder of the pipeline's file
_KEYS = {"output_dir", "variables", "stages"}
_REFERENCE = re.compile(r"\$\{([^}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command of a pipeline."""

    name: str
    command: str
    options: Mapping[str, Any]
    here: str = "."  # folder of the pipeline's file
    launch: tuple[str, ...] = ()  # what starts it in processes of its own
    uses: tuple[str, ...] = field(default=())  # stages whose folders its options name

    @property
    def asked(self) -> dict[str, Any]:
        """What makes its results what they are, as JSON: options, and what its programs say."""
        options = json.loads(json.dumps(dict(self.options)))
        return {"command": self.command, "options": options, "programs": self._programs()}

    def _programs(self) -> dict[str, str]:
        """Digests of the Python files that options name, alone or as ``file.py:function``."""
        found = {}
        for value in self.options.values():
            for word in value if isinstance(value, list) else [value]:
                name = re.sub(r"(\.py):\w+$", r"\1", word) if isinstance(word, str) else ""
                file = Path(name.replace("${here}", self.here))
                if name.endswith(".py") and file.is_file():
                    found[name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        return found

    def words(self, folder: Path) -> list[str]:
        """Its command line, without the place of its output."""

        def filled(value: Any) -> str:
            text = value if isinstance(value, str) else json.dumps(value)
            return _REFERENCE.sub(
                lambda found: self.here if found[1] == HERE else str(folder / found[1]), text
            )

        places = ("path",) if self.command == SCRIPT else PLACES.get(self.command, ())
        switches = self.command in PLACES or self.command == SCRIPT
        found = [filled(self.options[name]) for name in places]
        for name, value in self.options.items():
            if name in places:
                continue
            if value is None:
                found += [f"--{name}=none"] if name in self._nullable() else []
            elif isinstance(value, list):
                found += [f"--{name}", *map(filled, value)]
            elif isinstance(value, bool) and switches:
                found += [f"--{name}"] if value else []
            else:
                found.append(f"--{name}={filled(value)}")
        return found

    def _nullable(self) -> frozenset[str]:
        """Options for which null says something other than leaving them out."""
        from kedge.cli.arguments import nullable
        from kedge.cli.planning.plan import CONFIGS

        return nullable([CONFIGS[self.command]]) if self.command in CONFIGS else frozenset()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A folder, and the stages that fill it."""

    folder: Path
    stages: tuple[Stage, ...]

    def only(self, names: Sequence[str]) -> Pipeline:
        """The named stages, and the stages that these use.

        Raises:
            ConfigError: there is no such stage.
        """
        known = {stage.name: stage for stage in self.stages}
        wanted: set[str] = set()

        def want(name: str) -> None:
            if name not in known:
                raise ConfigError(f"there is no stage {name!r}; the stages are {', '.join(known)}")
            wanted.add(name)
            for used in known[name].uses:
                want(used)

        for name in names:
            want(name)
        return Pipeline(self.folder, tuple(stage for stage in self.stages if stage.name in wanted))


def read(file: str, given: Mapping[str, Any] | None = None) -> Pipeline:
    """Folder and stages of a file, every option checked.

    Args:
        file: YAML with ``output_dir``, ``stages`` and perhaps ``variables``.
        given: values of variables, instead of the file's.

    Raises:
        ConfigError: no such file, variable, stage, option or earlier stage.
    """
    path = Path(file).expanduser()
    found = _loaded(path, file)
    variables, here = _variables(found, file, given or {}), str(path.resolve().parent)
    output = str(_filled(found["output_dir"], {**variables, HERE: here}))
    stages: list[Stage] = []
    for number, entry in enumerate(found["stages"], 1):
        stage = _stage(_filled(entry, variables), f"{file}, stage {number}", stages, here)
        if stage.name in (*variables, HERE):
            raise ConfigError(f"{file}: {stage.name!r} is a variable and a stage; rename one")
        stages.append(stage)
    return Pipeline(Path(output).expanduser(), tuple(stages))


def _loaded(path: Path, file: str) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        raise ConfigError(f"{file}: there is no such file")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("stages"), list):
        raise ConfigError(f"{file} needs output_dir, and a list of stages")
    unknown = sorted(set(map(str, found)) - _KEYS)
    if unknown or not isinstance(found.get("output_dir"), str):
        raise ConfigError(
            f"{file}: {f'unknown key {unknown[0]!r}' if unknown else 'output_dir is missing'};"
            f" a pipeline has {', '.join(sorted(_KEYS))}"
        )
    return found


def _variables(found: dict[str, Any], file: str, given: Mapping[str, Any]) -> dict[str, Any]:
    named = found.get("variables") or {}
    if not isinstance(named, dict):
        raise ConfigError(f"{file}: variables must be name: value, got {named!r}")
    for name in given:
        if name not in named:
            raise ConfigError(f"{file}: {nearest(name, named, 'variable')}")
    values = {**named, **given}
    for name, value in values.items():
        if value is None:
            raise ConfigError(f"{file}: the variable {name} has no value; add --set {name}=VALUE")
    return values


def _filled(value: Any, variables: Mapping[str, Any]) -> Any:
    """With variables replaced; one that stands alone keeps its type."""
    if isinstance(value, dict):
        return {key: _filled(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, variables) for each in value]
    if not isinstance(value, str):
        return value
    alone = _REFERENCE.fullmatch(value)
    if alone and alone[1] in variables:
        return variables[alone[1]]
    return _REFERENCE.sub(
        lambda found: str(variables[found[1]]) if found[1] in variables else found[0], value
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
            f"{where}: the name {name!r} is taken, or no name of a folder; add `name: other`"
        )
    found = dict.fromkeys(_REFERENCE.findall(json.dumps(options)))
    uses = tuple(each for each in found if each != HERE)
    for used in uses:
        if used not in names:
            raise ConfigError(
                f"{where}: ${{{used}}} is no variable and no earlier stage; stages before it:"
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
    """The options of a command, all of which it has."""
    known = _commands()
    if command not in (*known, SCRIPT):
        raise ConfigError(f"{where}: {nearest(command, (*known, SCRIPT), 'command')}")
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: the options of {command} must be name: value")
    needed = ("path",) if command == SCRIPT else PLACES.get(command, ())
    missing = [place for place in needed if place not in options]
    if missing:
        raise ConfigError(f"{where}: {command} needs {' and '.join(missing)}")
    accepted = {*options} if command == SCRIPT else known[command]()
    for key in options:
        if key in ("output_dir", "output"):
            raise ConfigError(f"{where}: {key} is decided by the pipeline; leave it out")
        if key not in accepted:
            raise ConfigError(f"{where}: {nearest(str(key), accepted, 'option')}")
    program = str(options.get("path", "")).replace("${here}", here)
    if command == SCRIPT and not Path(program).is_file():
        raise ConfigError(
            f"{where}: there is no file {program}; ${{here}} is the folder of the pipeline"
        )
    return options


def _commands() -> dict[str, Callable[[], set[str]]]:
    """What can be a stage, and the options that it has."""

    def flags_of(made: Any) -> set[str]:
        return {action.dest for action in made._actions if action.dest != "help"}

    def rl(name: str) -> set[str]:
        from kedge.cli.arguments import parser
        from kedge.cli.planning.plan import CONFIGS

        return flags_of(parser(name, CONFIGS[name]))

    def before(name: Any) -> set[str]:
        from kedge.cli.train.reward import RewardArguments
        from kedge.cli.train.sft import BeforeArguments, build_parser

        return flags_of(
            build_parser(name, RewardArguments if name == "reward" else BeforeArguments)
        )

    def small(name: str) -> set[str]:
        from kedge.cli.tools import generate, judge

        return flags_of((generate if name == "generate" else judge).parser())

    found: dict[str, Callable[[], set[str]]] = {}
    for name in ("sft", "reward"):
        found[name] = lambda name=name: before(name)  # type: ignore[misc]
    for name in RL:
        found[name] = lambda name=name: rl(name)  # type: ignore[misc]
    for name in PLACES:
        found[name] = lambda name=name: small(name)  # type: ignore[misc]
    return found


def nearest(word: str, known: Any, kind: str) -> str:
    """That there is no such word, and which one was perhaps meant."""
    return f"there is no {kind} {word!r}{hint(word, {*known})}"
