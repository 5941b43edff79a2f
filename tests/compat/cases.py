"""The programs of cases.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import yaml


@dataclass(frozen=True)
class Case:
    """One program."""

    name: str
    program: str  # as the page names it
    source: str  # tag and path in TRL's repository, or "-m module"
    arguments: tuple[str, ...] = ()
    compat: tuple[str, ...] = ()  # options of ``kedge.compat run``
    environment: str = "trl"
    packages: tuple[str, ...] = ("trl", "transformers", "torch", "accelerate", "datasets", "peft")
    note: str = ""
    expect: tuple[str, ...] = ()  # files that it writes
    variables: dict[str, str] = field(default_factory=dict)


def _trl(source: str, flags: str, compat: str = "", note: str = "") -> Case:
    tag, path = source.split(":")
    return Case(
        name=f"trl-{tag[1:]}-{path.removesuffix('.py').replace('/', '-')}",
        program=f"TRL {tag[1:]}",
        source=source,
        arguments=tuple(Template(flags).substitute(_DATA["flags"]).split()),
        compat=tuple(compat.split()),
        note=note,
        expect=("out/trl/model.safetensors",) if "$ppo" in flags else (),
    )


def _llamafactory(name: str, environment: str, note: str) -> Case:
    return Case(
        name=f"llamafactory-{name}",
        program="LLaMA-Factory",
        source="-m llamafactory.cli",
        arguments=("train", f"llamafactory/{name}.yaml"),
        compat=("--api", "trl-0.11", "--replace", "--report-version", "0.9.6", "-m"),
        environment=environment,
        packages=("llamafactory", *Case.packages),
        note=note,
        expect=(f"out/llamafactory_{name}/value_head.safetensors",),
        variables={"DISABLE_VERSION_CHECK": "1"},
    )


def _swift(tuner: str) -> Case:
    flags = f"{_DATA['flags']['swift']} --tuner_type {tuner} --output_dir out/swift_{tuner}"
    return Case(
        name=f"ms-swift-{tuner}",
        program="ms-swift",
        source="-m swift.cli.rlhf",
        arguments=tuple(flags.split()),
        compat=("--api", "ms-swift", "--replace", "-m"),
        environment="ms-swift",
        packages=("ms_swift", *Case.packages),
        note=f"`--tuner_type {tuner}`",
        expect=(f"out/swift_{tuner}/checkpoint-3/manifest.json",),
        variables={"USE_HF": "1"},
    )


_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CASES = (
    *(_trl(*row) for row in _DATA["trl"]),
    *(_llamafactory(name, *row) for name, row in _DATA["llamafactory"].items()),
    *(_swift(tuner) for tuner in _DATA["ms-swift"]),
)
