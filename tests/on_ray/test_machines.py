"""The documented start of several machines, as printed, on two network namespaces."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_ray.clusters import needs_ray
from tests.on_ray.test_async_command import folder  # noqa: F401  (a fixture)

PAGE = (Path(__file__).parents[2] / "docs" / "ray.md").read_text(encoding="utf-8")
HEAD, OTHER = "10.77.0.1", "10.77.0.2"
NAMES = [f"kedge-{os.getpid()}-{i}" for i in range(2)]
isolated = os.name == "posix" and os.geteuid() == 0 and shutil.which("ip") is not None
pytestmark = [
    *needs_ray,
    pytest.mark.slow,
    pytest.mark.skipif(not isolated, reason="network namespaces need root and iproute2"),
]


def ip(command: str, *, check: bool = True) -> str:
    return subprocess.run(
        ["ip", *command.split()], check=check, capture_output=True, text=True
    ).stdout


@pytest.fixture
def machines() -> Iterator[None]:
    """Two namespaces with an address each, and a route by which Ray finds it."""
    try:
        for name in NAMES:
            ip(f"netns add {name}")
        ip(f"link add v0 netns {NAMES[0]} type veth peer name v1 netns {NAMES[1]}")
        for i, (own, other) in enumerate(((HEAD, OTHER), (OTHER, HEAD))):
            ip(f"-n {NAMES[i]} addr add {own}/24 dev v{i}")
            ip(f"-n {NAMES[i]} link set lo up")
            ip(f"-n {NAMES[i]} link set v{i} up")
            ip(f"-n {NAMES[i]} route add default via {other}")
        yield
    finally:
        for name in NAMES:
            for pid in ip(f"netns pids {name}", check=False).split():
                os.kill(int(pid), 9)
            ip(f"netns del {name}", check=False)


def on(machine: int, home: Path, script: str) -> subprocess.Popen[str]:
    """A shell on a machine, with a home and Ray's files of its own."""
    home.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    script = f"mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && set -e\n{script}"
    return subprocess.Popen(
        ["ip", "netns", "exec", NAMES[machine], "unshare", "-m", "sh", "-c", script],
        env=os.environ | {"HOME": str(home), "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_machines_start_as_printed_and_train(folder: Path, tmp_path: Path, machines) -> None:  # noqa: F811
    section = PAGE.partition("## Several machines")[2].partition("## ")[0]
    blocks = re.findall(r"(?:^    .*\n)+", section, flags=re.MULTILINE)
    head, other = (re.sub("^    ", "", block, flags=re.MULTILINE) for block in blocks)
    homes, out = [tmp_path / "a", tmp_path / "b"], tmp_path / "run"
    train = [
        *(sys.executable, "-m", "kedge", "async-ppo", "--use_cpu", "--ray_address", "auto"),
        *("--model_name_or_path", str(folder / "policy"), "--output_dir", str(out)),
        *("--reward_model_path", str(folder / "reward"), "--stop_token", "eos", "--eps", "1e-3"),
        *("--dataset_mixer_list", str(folder / "train.jsonl"), "1.0", "--total_episodes", "16"),
        *("--local_rollout_batch_size", "4", "--per_device_train_batch_size", "2"),
        *("--response_length", "5", "--ray_engine", "embedded", "--vllm_num_engines", "2"),
        *("--actor_num_gpus_per_node", "1", "1", "--save_freq", "-1"),
    ]
    wait = f"until [ -e {tmp_path}/joined ]; do sleep 0.2; done"
    first = on(0, homes[0], f"{head}\necho started\n{wait}\n{shlex.join(train)}")
    assert first.stdout is not None
    for line in first.stdout:
        if line == "started\n":
            break
    join = other.replace("HEAD", HEAD)
    assert join != other
    refused = on(1, homes[1], join)
    assert "no authentication token was found" in refused.communicate(timeout=60)[0]
    assert refused.returncode != 0
    shutil.copytree(homes[0] / ".ray", homes[1] / ".ray")
    second = on(1, homes[1], join)
    said = second.communicate(timeout=90)[0]
    assert second.returncode == 0, said
    (tmp_path / "joined").touch()
    said = first.communicate(timeout=300)[0]
    assert first.returncode == 0, said
    assert re.search(rf"learner \d  on {HEAD}", said)
    assert re.search(rf"learner \d  on {OTHER}", said)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss/policy_avg" in row for row in rows) == 2
