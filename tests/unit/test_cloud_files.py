"""The SkyPilot and Modal files: Kedge accepts their command, and their own parsers read them.

Neither was ever run.  Without SkyPilot or Modal, that part is skipped.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "cloud"


def arguments(kind: str) -> list[str]:
    """The arguments of ``kedge async-ppo``, with variables as the file sets them."""
    if kind == "modal":
        source = (FOLDER / "modal_app.py").read_text()
        body = source[source.index("def command(") : source.index("@app.function")]
        space: dict[str, Any] = {"ENGINES": 4, "GPUS": 8, "RUNS": "/runs"}
        exec(body, space)
        return [*space["command"]("M", "prompts.jsonl", "reward.py:short", "run")]
    task = yaml.safe_load((FOLDER / "sky.yaml").read_text())
    known = task["envs"] | {"RUN": "runs/sky", "RESUME": "--resume_from_checkpoint"}
    line = next(x for x in task["run"].replace("\\\n", "").split("\n") if x.startswith("kedge"))
    return shlex.split(re.sub(r"\$(\w+)", lambda found: known[found[1]], line))[1:]


@pytest.mark.parametrize("kind", ["sky", "modal"])
def test_the_command_of_a_cloud_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedge.ext.open_instruct.command import parse_options

    monkeypatch.setattr("kedge.config.rollout_engines.installed", lambda name: True)
    name, *flags = arguments(kind)
    assert name == "async-ppo"
    flags.remove("--bf16")  # no GPU is at hand
    config = parse_options([*flags, "--ray_engine", "embedded"]).config
    assert (config.rollout_engine, config.vllm_num_engines) == ("ray", 4)
    assert config.actor_num_gpus_per_node == [4]


def test_sky_reads_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    sky = pytest.importorskip("sky")
    monkeypatch.chdir(FOLDER.parents[1])
    task = sky.Task.from_yaml(str(FOLDER / "sky.yaml"))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators) == (1, {"H100": 8})
    assert "kedge async-ppo" in task.run


def test_modal_imports_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    modal = pytest.importorskip("modal")
    monkeypatch.chdir(FOLDER.parents[1])
    spec = importlib.util.spec_from_file_location("modal_app", FOLDER / "modal_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.app, modal.App)
    assert isinstance(module.train, modal.Function)
