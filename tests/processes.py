"""Python processes that start in a moment, forked from one that has imported what they need.

An interpreter that imports PyTorch, Transformers and Kedge takes about six seconds of a core, and
the tests start some hundred.  A fork of one that has done so takes a few milliseconds.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PRELOADED = (
    *("pytest", "peft", "kedge.cli.main", "kedge.trainers.ppo", "kedge.trainers.rloo"),
    *("kedge.trainers.grpo", "kedge.learner.distributed", "kedge.learner.learner_state"),
    *("tests.e2e.test_resume", "tests.environments.toys", "torch.distributed.checkpoint"),
)


class Process:
    """A started process, with the methods of ``subprocess.Popen`` that the tests use."""

    def __init__(self, server: Server, pid: int, codes: list[int], files: tuple[str, str]) -> None:
        self.pid, self._server, self._codes, self._files = pid, server, codes, files

    @property
    def returncode(self) -> int | None:
        return self._codes[0] if self._codes else None

    def poll(self) -> int | None:
        self._server.receive(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self._server.receive(left)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to stdout and stderr, once it has ended."""
        self.wait(timeout)
        out, err = (Path(file).read_text(errors="replace") for file in self._files)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks, as the tests see it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        replies, theirs = os.pipe()
        command = [sys.executable, "-m", "tests.processes", str(theirs)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs], cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | PATHS,
        )  # fmt: skip
        os.close(theirs)
        self._replies = os.fdopen(replies, "rb", buffering=0)
        self._rest = b""
        self._running: dict[int, list[int]] = {}  # pid -> filled with its exit code at its end
        self._started: list[tuple[int, list[int]]] = []
        atexit.register(self.close)

    def start(self, arguments: list[str], env: dict[str, str], cwd: str) -> Process:
        self._count += 1
        out, err = (f"{self._folder.name}/{self._count}.{name}" for name in ("out", "err"))
        job = {"arguments": arguments, "env": env, "cwd": cwd, "out": out, "err": err}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        while not self._started:
            self.receive(300)
        return Process(self, *self._started.pop(), (out, err))

    def receive(self, seconds: float | None) -> None:
        """Read what the server reports: ``[pid]`` has started, ``[pid, code]`` has ended."""
        if not select.select([self._replies], [], [], seconds)[0]:
            return
        read = self._replies.read(65536)
        assert read, "the process that forks is gone"
        *lines, self._rest = (self._rest + read).split(b"\n")
        for pid, *code in map(json.loads, lines):
            if code:  # from here on the system may give the pid to another process
                self._running.pop(pid).append(code[0])
            else:
                self._running[pid] = codes = []
                self._started.append((pid, codes))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._replies.close()
        self._folder.cleanup()


PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


@functools.cache
def _server(owner: int) -> Server:
    return Server()


def start(*arguments: str, env: dict[str, str] | None = None) -> Process:
    """Run Python with these arguments: a file, ``-m MODULE`` or ``-c CODE``, and its own.

    Args:
        arguments: the command line without the interpreter.
        env: the whole environment; by default that of this process.
    """
    full = (dict(os.environ) if env is None else env) | PATHS
    return _server(os.getpid()).start(list(arguments), full, os.getcwd())


def run(
    *arguments: str, env: dict[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end; ``subprocess.run`` with captured output."""
    process = start(*arguments, env=env)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(arguments), process.returncode or 0, out, err)


def _serve(replies: int) -> dict[str, Any]:
    """Fork for each request; returns in the child, with what it has to do."""
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    requests = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _report_the_ended(running, replies)
        if 0 in ready:
            read = os.read(0, 65536)
            if not read:
                break
            *lines, requests = (requests + read).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for fd in (wake, wakes, replies):
                        os.close(fd)
                    return json.loads(line)
                running.add(pid)
                os.write(replies, json.dumps([pid]).encode() + b"\n")
    for pid in running:  # the tests have ended
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _report_the_ended(running: set[int], replies: int) -> None:
    for pid in list(running):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            running.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            os.write(replies, json.dumps([pid, code]).encode() + b"\n")


def _become(job: dict[str, Any]) -> list[str]:
    """Take over what a new process has: streams, environment, folder, signals, arguments."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for fd, name in ((1, "out"), (2, "err")):
        file = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments: list[str] = job["arguments"]
    while arguments[0] == "-W":
        warnings._setoption(arguments[1])  # type: ignore[attr-defined]
        arguments = arguments[2:]
    return arguments


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the children share these pages
    first, *others = _become(_serve(int(sys.argv[1])))
    if first == "-c":
        source, sys.argv = others[0], ["-c", *others[1:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(source, "<string>", "exec"), module.__dict__)
    elif first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *others]
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
