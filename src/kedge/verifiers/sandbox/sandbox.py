"""Runs Python code that nobody has read, in a process with limits."""

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

START_SECONDS = 2.0  # for Python to start, beyond the solution's own time


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a solution.

    Attributes:
        passed: per test; a test that was not reached did not pass.
        output: what the program printed, if it was run as a program.
        stopped: "timeouts" if it ran out of time, "crashes" if its process died, else "".
        error: the first error, for people.
        broken: what is wrong with the tests themselves, or "".
    """

    passed: tuple[bool, ...] = ()
    output: str = ""
    stopped: str = ""
    error: str = ""
    broken: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """Processes in which a solution has little time, memory and disk, and nothing of the user's.

    The solution runs in one process and its tests in another.  ``isolation`` says what keeps them
    apart and away from this machine:

    * ``bubblewrap``: the program bwrap.  Each process sees the Python runtime, system libraries
      and an empty folder, all but the folder read-only; it has no network, no other process, no
      privileges, and a filter refuses the system calls that it does not need.
    * ``namespaces``: the same, by the kernel's user namespaces and Landlock without bwrap.
    * ``audit``: an audit hook of Python and limits of time, memory and files.  It stops accidents,
      not a program that attacks the interpreter: such a one can read and write your files.
    * ``auto``: the first of the first two that works on this machine.

    Args:
        seconds: of wall clock, and of processor time, for one solution.
        memory_mb: address space of a process.
        file_kb: size of one file, and of what is printed; 64 files fit in the folder.
        packages: whether the solution may import installed packages, beyond the standard library.
        isolation: see above.

    Raises:
        ConfigError: a limit does not fit, or the platform has no processes to fork (Windows).
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
        """The kind of isolation that programs get on this machine.

        Raises:
            ConfigError: it cannot be had; the message says what to install or to allow.
        """
        return choose(self.isolation, _attempt)

    def test(
        self, code: str, tests: Sequence[str], *, entry_point: str = "", prefix: str = ""
    ) -> Outcome:
        """Run tests against a solution.

        The tests see the solution's functions, classes and constants by name, and as ``candidate``
        what ``entry_point`` names.  Arguments and results are of built-in types, or objects that
        the tests made of a class of the solution; those have no arithmetic, and each equals itself
        alone.

        Args:
            code: the solution, a module.
            tests: each a piece of Python that raises unless the solution is right.
            entry_point: the function or class under test; the only name the tests then see.
            prefix: trusted code that the tests also see: imports, helper functions.
        """
        checks = {"tests": list(tests), "entry_point": entry_point, "prefix": prefix}
        said, stopped = self._run(self.level(), {"code": code}, checks)
        passed = {line["test"] for line in said if line.get("passed")}
        error = next((line["error"] for line in said if "error" in line), "")
        if not stopped and not any({"error", "test", "broken"} & line.keys() for line in said):
            stopped = "crashes"
        return Outcome(
            passed=tuple(number in passed for number in range(len(tests))),
            stopped="crashes" if error == "the solution ended" else stopped,
            error=error or stopped,
            broken=next((line["broken"] for line in said if "broken" in line), ""),
        )

    def run(self, code: str, stdin: str = "") -> Outcome:
        """Run a program on an input.

        Args:
            code: the program.
            stdin: what it reads.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
            given.write(stdin.encode(errors="replace"))
            given.seek(0)
            job = {"code": code, "stdin": given.fileno(), "stdout": output.fileno()}
            said, stopped = self._run(self.level(), job, {})
            output.seek(0)
            text = output.read(self.file_kb << 10).decode(errors="replace")
        status = next((line["exit"] for line in said if "exit" in line), None)
        if status is None or status < 0 or 128 < status <= 192:  # ended by a signal
            stopped = stopped or "crashes"
        error = f"exit code {status}" if status else ""
        return Outcome(output=text, stopped=stopped, error=stopped or error)

    def _run(
        self, level: str, job: dict[str, Any], checks: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], str]:
        """What the tests' process says of a job, and why it was stopped."""
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
                said, problem = process.communicate(data, timeout=self.seconds + START_SECONDS)
            except subprocess.TimeoutExpired:
                stopped = "timeouts"
                said, problem = _killed(process)
            except BaseException:
                _killed(process)
                raise
        if problem and not said:
            raise ConfigError(f"the sandbox does not start: {_last_line(problem)}")
        lines = _signed(said, secret)
        return lines, stopped or next((x["stopped"] for x in lines if "stopped" in x), "")


def _attempt(level: str) -> str:
    """What goes wrong when a program runs at a level of isolation, or ""."""
    checks = {"tests": ["assert one() == 1"], "entry_point": "", "prefix": ""}
    try:
        job = {"code": "def one(): return 1"}
        said, stopped = Sandbox(seconds=20.0)._run(level, job, checks)
    except ConfigError as error:
        return str(error)
    if any(line.get("passed") for line in said):
        return ""
    return stopped or next((line["error"] for line in said if "error" in line), "no answer")


def _signed(said: bytes, secret: str) -> list[dict[str, Any]]:
    """The lines that the tests' process wrote: whole, valid, and with the secret."""
    lines = []
    for line in said.splitlines(keepends=True):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if line.endswith(b"\n") and isinstance(value, dict) and value.get("secret") == secret:
                lines.append(value)
    return lines


def _killed(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """End a process that still runs, with all it started; returns what it had said."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it ends by itself just now
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def _last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().rpartition("\n")[2]


@contextlib.contextmanager
def _folder(level: str) -> Iterator[str]:
    """Where the first process starts; the others have a working folder that is theirs alone."""
    if level != "audit":
        yield "/"
        return
    prefix = "kedge-sandbox-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield folder


def _environment(folder: str) -> dict[str, str]:
    home = WORK if folder == "/" else folder
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
