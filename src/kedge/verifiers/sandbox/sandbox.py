"""Runs untrusted Python code in isolated processes with limits."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kedge.errors import ConfigError
from kedge.verifiers.sandbox.isolation import LEVELS, WORK, choose, command, make_plan

START_SECONDS = 2.0  # for Python to start, in addition to the time limit


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of running a solution.

    Attributes:
        passed: per test; a test that was not reached counts as failed.
        output: standard output, if it was run as a program.
        stopped: "timeouts" if it timed out, "crashes" if its process died, else "".
        error: the first error message.
        broken: an error in the tests themselves, or "".
    """

    passed: tuple[bool, ...] = ()
    output: str = ""
    stopped: str = ""
    error: str = ""
    broken: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """Isolated processes with limited time, memory and disk and no access to the user's files.

    The solution runs in one process and its tests in another.  ``isolation`` selects what separates
    them from each other and from this machine:

    * ``bubblewrap``: the program bwrap.  Each process sees the Python runtime and system libraries
      (read-only) and an empty working folder; it has no network, no view of other processes, no
      privileges, and a seccomp filter blocks the system calls that it does not need.
    * ``namespaces``: the same without bwrap, with user namespaces and Landlock.
    * ``audit``: a Python audit hook and limits on time, memory and files.  It stops accidents, but
      a program that attacks the interpreter can read and write your files.
    * ``auto``: bubblewrap if it works on this machine, else namespaces.

    Args:
        seconds: limit of wall-clock time and of CPU time per solution.
        memory_mb: address space of a process.
        file_kb: size of one file and of the output; the folder holds up to 64 files.
        packages: whether the solution may import installed packages.
        isolation: see above.

    Raises:
        ConfigError: a limit is too small, or the platform has no fork (Windows).
    """

    seconds: float = 5.0
    memory_mb: int = 512
    file_kb: int = 1024
    packages: bool = False
    isolation: str = "auto"

    def __post_init__(self) -> None:
        if not hasattr(os, "fork"):
            raise ConfigError("running code needs Linux or macOS: this platform has no fork")
        for name, least in (("seconds", 0.01), ("memory_mb", 64), ("file_kb", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.isolation not in ("auto", *LEVELS):
            raise ConfigError(f"isolation={self.isolation!r} must be auto, {', '.join(LEVELS)}")

    def level(self) -> str:
        """The isolation that programs get on this machine; raises ConfigError without any."""
        return choose(self.isolation, _attempt)

    def test(
        self, code: str, tests: Sequence[str], *, entry_point: str = "", prefix: str = ""
    ) -> Outcome:
        """Run tests against a solution.

        The tests see the solution's functions, classes and constants by name, and ``entry_point``
        as ``candidate``.  Arguments and results must have built-in types or be instances of the
        solution's classes created by the tests; those support no arithmetic and compare by
        identity.

        Args:
            code: the solution, a module.
            tests: Python code that raises unless the solution is correct.
            entry_point: the function or class under test; if given, the only visible name.
            prefix: trusted code that the tests also see: imports, helper functions.
        """
        checks = {"tests": list(tests), "entry_point": entry_point, "prefix": prefix}
        report, stopped = self._run(self.level(), {"code": code}, checks)
        passed = {line["test"] for line in report if line.get("passed")}
        error = next((line["error"] for line in report if "error" in line), "")
        if not stopped and not any({"error", "test", "broken"} & line.keys() for line in report):
            stopped = "crashes"
        return Outcome(
            passed=tuple(number in passed for number in range(len(tests))),
            stopped="crashes" if error == "the solution ended" else stopped,
            error=error or stopped,
            broken=next((line["broken"] for line in report if "broken" in line), ""),
        )

    def run(self, code: str, stdin: str = "") -> Outcome:
        """Run a program on an input, its standard input."""
        with tempfile.TemporaryFile() as stdin_file, tempfile.TemporaryFile() as output:
            stdin_file.write(stdin.encode(errors="replace"))
            stdin_file.seek(0)
            job = {"code": code, "stdin": stdin_file.fileno(), "stdout": output.fileno()}
            report, stopped = self._run(self.level(), job, {})
            output.seek(0)
            text = output.read(self.file_kb << 10).decode(errors="replace")
        status = next((line["exit"] for line in report if "exit" in line), None)
        if status is None or status < 0 or 128 < status <= 192:  # killed by a signal
            stopped = stopped or "crashes"
        error = f"exit code {status}" if status else ""
        return Outcome(output=text, stopped=stopped, error=stopped or error)

    def _run(
        self, level: str, job: dict[str, Any], checks: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], str]:
        """The report of the tests' process on a job, and why it was stopped."""
        plan = make_plan(packages=self.packages)
        limits = {name: getattr(self, name) for name in ("seconds", "memory_mb", "file_kb")}
        secret = secrets.token_hex(16)
        frames = [asdict(plan) | limits | {"level": level} | job, checks | {"secret": secret}]
        with _folder(level) as folder:
            process = subprocess.Popen(
                command(level, plan),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=_environment(folder),
                pass_fds=[job[name] for name in ("stdin", "stdout") if name in job],
                start_new_session=True,
            )
            bodies = [json.dumps(frame).encode() for frame in frames]
            data = b"".join(struct.pack(">Q", len(body)) + body for body in bodies)
            stopped = ""
            try:
                output, problem = process.communicate(data, timeout=self.seconds + START_SECONDS)
            except subprocess.TimeoutExpired:
                stopped = "timeouts"
                output, problem = _kill(process)
            except BaseException:
                _kill(process)
                raise
        if problem and not output:
            raise ConfigError(f"the sandbox cannot start: {_last_line(problem)}")
        lines = _signed_lines(output, secret)
        return lines, stopped or next((x["stopped"] for x in lines if "stopped" in x), "")


def _attempt(level: str) -> str:
    """The error of a test program at an isolation level, or ""."""
    checks = {"tests": ["assert one() == 1"], "entry_point": "", "prefix": ""}
    try:
        job = {"code": "def one(): return 1"}
        report, stopped = Sandbox(seconds=20.0)._run(level, job, checks)
    except ConfigError as error:
        return str(error)
    if any(line.get("passed") for line in report):
        return ""
    return stopped or next((line["error"] for line in report if "error" in line), "no answer")


def _signed_lines(output: bytes, secret: str) -> list[dict[str, Any]]:
    """The complete, valid report lines that carry the secret."""
    lines = []
    for line in output.splitlines(keepends=True):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if line.endswith(b"\n") and isinstance(value, dict) and value.get("secret") == secret:
                lines.append(value)
    return lines


def _kill(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Kill a process and its children; returns its output so far."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just exited
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def _last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().rpartition("\n")[2]


@contextlib.contextmanager
def _folder(level: str) -> Iterator[str]:
    """Working directory of the first process; the others get a private one."""
    if level != "audit":
        yield "/"
        return
    prefix = "kedge-sandbox-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield folder


def _environment(folder: str) -> dict[str, str]:
    home = WORK if folder == "/" else folder
    return {
        "PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
