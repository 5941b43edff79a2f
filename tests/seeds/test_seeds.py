"""What the documents that Kedge began with name is there, under these names (seeds.yaml)."""

from __future__ import annotations

import inspect
import json
import re
import runpy
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

from tests.e2e.small import small
from tests.e2e.test_async_ppo import trainer as async_ppo
from tests.e2e.test_groups import rloo

ROOT = Path(__file__).parents[2]
SEEDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("seeds.yaml").read_text())


def test_files_exist() -> None:
    assert [name for name in SEEDS["files"] if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("command", SEEDS["commands"])
def test_commands_parse(command: str, tmp_path: Path) -> None:
    """With every flag acting: a value that is printed is in the config."""
    taken: list[Any] = []
    script, *words = command.replace("OUT", str(tmp_path)).split()
    main = runpy.run_path(str(ROOT / script))["main"]
    main.__globals__["train"] = lambda options, **_: taken.append(options)
    main([*words, "--use_cpu"])
    (options,) = taken
    for name, value in pairwise(words):
        if name in ("--learning_rate", "--total_episodes", "--num_ppo_epochs", "--kl_coef"):
            assert getattr(options.config, name.removeprefix("--")) == float(value)


@pytest.mark.parametrize(("script", "flags"), SEEDS["evaluation"].items())
def test_scripts_of_evaluation_have_the_flags(script: str, flags: str) -> None:
    known = re.findall(r'add_argument\("(--\w+)"', (ROOT / script).read_text())
    assert {*flags.split()} <= {*known}


@pytest.mark.parametrize(("config", "names"), SEEDS["options"].items())
def test_options_exist(config: str, names: str) -> None:
    module, _, name = config.rpartition(".")
    kind = resolve_name(f"{module}:{name}")
    known = {f.name for f in fields(kind)}
    assert {*names.split()} - known == set()


@pytest.mark.parametrize(("config", "file"), SEEDS["defaults"].items())
def test_printed_defaults_are_listed(config: str, file: list[Any]) -> None:
    """Their values are compared by the tests of the configs."""
    path, count = file
    printed = json.loads((ROOT / path).read_text())
    module, _, name = config.rpartition(".")
    kind = resolve_name(f"{module}:{name}")
    known = {f.name for f in fields(kind)}
    assert len(printed) == count
    assert printed.keys() - known == set()


@pytest.mark.parametrize(("what", "names"), SEEDS["signatures"].items())
def test_signatures(what: str, names: str) -> None:
    module, _, rest = what.partition(".PPOTrainer")
    signature = inspect.signature(resolve_name(f"{module}:PPOTrainer{rest}"))
    own = [p for p in signature.parameters.values() if p.name != "self"]
    wanted = names.split()
    if wanted[-1:] == ["**"]:
        wanted.pop()
        assert own[-1].kind is inspect.Parameter.VAR_KEYWORD
    assert [p.name for p in own][: len(wanted)] == wanted
    more = [p for p in own[len(wanted) :] if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [p.name for p in more if p.default is p.empty] == []


@pytest.mark.parametrize(("name", "metrics"), SEEDS["metrics"].items())
def test_metrics_are_logged(name: str, metrics: str, tmp_path: Path) -> None:
    makers: dict[str, Any] = {
        "ppo": lambda: small(output_dir=str(tmp_path)),
        "rloo": lambda: rloo(output_dir=str(tmp_path)),
        "async_ppo": lambda: async_ppo(tmp_path),
    }
    made = makers[name]()
    made.train()
    rows = [row for row in made.state.log_history if "objective/scores" in row]
    assert {*metrics.split()} - rows[-1].keys() == set()


@pytest.mark.parametrize("place", SEEDS["tests"].values())
def test_longer_tests_are_there(place: str) -> None:
    file, text = place.split("::")
    assert text in (ROOT / file).read_text()
