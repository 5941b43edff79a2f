"""``kedge async-ppo`` in a process group, as the benchmark of faults on Ray runs it.

A run loads this file for its reward function, so it imports nothing of this folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

SHARED = Path(os.environ.get("KEDGE_SHARED", Path(__file__).parents[2] / "shared"))
ITERATIONS = 10
LIMIT = 300.0  # seconds until a run that neither ends nor makes progress is given up
TIMED = ("time/", "eps", "tokens_per_second", "train_", "step_time", "rollout/restarts")


def words(completions: Sequence[str], **_: Any) -> list[float]:
    """The reward: words of each response.  A file may say that it takes long, once."""
    # Nodes that were started before the run do not have the variable.
    long = Path(os.environ.get("KEDGE_LONG_ITERATION", "none"))
    if long.exists():
        seconds = float(long.read_text())
        long.unlink()
        time.sleep(seconds)
    return [float(len(c.split())) for c in completions]


def command(folder: Path, *flags: str) -> list[str]:
    """The run under test."""
    data = SHARED / "data"
    embedded = () if "--rollout_engine" in flags else ("--ray_engine", "embedded")
    return [
        *(sys.executable, "-m", "kedge", "async-ppo", "--use_cpu", "--output_dir", str(folder)),
        *("--model_name_or_path", str(data / "stories-head32")),
        *("--reward_funcs", f"{Path(__file__).resolve()}:words"),
        *("--dataset_mixer_list", str(data / "story-prompts" / "train.jsonl"), "1.0"),
        *("--local_rollout_batch_size", "8", "--total_episodes", str(8 * ITERATIONS)),
        *("--per_device_train_batch_size", "8", "--response_length", "16", "--num_epochs", "1"),
        *("--learning_rate", "1e-4", "--save_freq", "2", "--vllm_num_engines", "2"),
        *embedded,
        *flags,
    ]


def line_of(process: psutil.Process) -> str:
    """The command line of a process; empty if it is gone."""
    try:
        running = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return " ".join(process.cmdline()) if running else ""
    except psutil.Error:
        return ""


class Run:
    """A started command, in a process group of its own, with its output in files."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.long = folder, folder / "long"
        self._files = leftovers()
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("ab") as out, self._err.open("ab") as err:
            self.process = subprocess.Popen(
                command(folder, *flags),
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=os.environ
                | {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
                | {"KEDGE_LONG_ITERATION": str(self.long)},
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def steps(self) -> int:
        """Iterations with a row of metrics."""
        return len(rows(self.folder))

    @property
    def said(self) -> str:
        """What the run wrote on stderr."""
        return self._err.read_text(errors="replace")

    def ended(self) -> bool:
        """Whether the command has ended."""
        return self.process.poll() is not None

    def wait(self, until: Callable[[], bool], seconds: float = LIMIT) -> float:
        """Seconds until a condition holds; raises TimeoutError."""
        begin = time.monotonic()
        while not until():
            if time.monotonic() - begin > seconds:
                raise TimeoutError(f"not within {seconds:g} s: {self.said[-2000:]}")
            time.sleep(0.1)
        return time.monotonic() - begin

    def children(self) -> list[psutil.Process]:
        """Processes that the command started; remembered, as they may outlive it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[child.pid] = child
        return list(self._seen.values())

    def named(self, *names: str) -> list[psutil.Process]:
        """Running processes whose command contains one of the names."""
        return [p for p in self.children() if any(name in line_of(p) for name in names)]

    def left(self, seconds: float = 30.0) -> list[str]:
        """Processes that still run some time after the end, and files; processes are killed."""
        _, alive = psutil.wait_procs(self._seen.values(), timeout=seconds)
        names = [line_of(p)[:60] for p in alive] + sorted(leftovers() - self._files)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return names


def leftovers() -> set[str]:
    """Files and folders of Kedge and vLLM in shared memory and in the temporary folder."""
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    kinds = ("kedge-weights-*", "kedge-lora-*", "kedge-vllm-*", "psm_*", "sem.mp-*", "vllm_dist_*")
    return {str(path) for place in places for kind in kinds for path in place.glob(kind)}


def rows(folder: Path) -> list[dict[str, Any]]:
    """Logged iterations without times; the last row of each, as after a resume."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    kept: dict[int, dict[str, Any]] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # the line that is being written
            row = json.loads(line)
            if "objective/scores" in row:
                kept[row["step"]] = {k: v for k, v in row.items() if not k.startswith(TIMED)}
    return [kept[step] for step in sorted(kept)]


def same(found: list[dict[str, Any]], calm: list[dict[str, Any]]) -> bool:
    """Whether all rows agree in every number (with several learners, but for rounding)."""
    return len(found) == len(calm) and all(
        abs(a[name] - b[name]) <= 1e-5 * max(1.0, abs(b[name]))
        for a, b in zip(found, calm, strict=True)
        for name in ("objective/scores", "objective/kl", "loss/policy_avg", "grad_norm")
    )
