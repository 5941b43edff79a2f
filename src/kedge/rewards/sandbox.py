"""Runs Python code that nobody has read, in a process with limits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError

CHILD = Path(__file__).with_name("sandbox_child.py")
START_SECONDS = 2.0  # for Python to start, beside the solution's own time


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
    """A process in which a solution has little time, memory and disk, and no network.

    Time, address space, file size and open files are limited by the kernel; where Linux lets
    ordinary users do so, network, processes and privileges are cut off by namespaces.  Everywhere
    an audit hook refuses sockets, processes, signals, and files outside the temporary folder.  The
    tests run in a second process, out of reach of the solution.

    This stops accidents and reward hacking.  It is no wall against somebody who attacks the Python
    interpreter itself: for that, run training inside a container or a virtual machine.

    Args:
        seconds: of wall clock, and of processor time, for one solution.
        memory_mb: address space of a process.
        file_kb: size of one file, and of what is printed.
        packages: whether the solution may import installed packages, beyond the standard library.
        namespaces: refuse to run where namespaces cannot be had.

    Raises:
        ConfigError: a limit does not fit, or the platform has no processes to fork (Windows).
    """

    seconds: float = 5.0
    memory_mb: int = 512
    file_kb: int = 1024
    packages: bool = False
    namespaces: bool = False

    def __post_init__(self) -> None:
        if not hasattr(os, "fork"):
            raise ConfigError("running code needs Linux or macOS: this platform has no fork")
        for name, least in (("seconds", 0.01), ("memory_mb", 64), ("file_kb", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")

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
        job = self._job(code) | {"stdin": None}
        checks = {"tests": list(tests), "entry_point": entry_point, "prefix": prefix}
        with _folder() as folder:
            said, stopped = self._run(folder, [job, checks])
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
        with _folder() as folder, (folder / "stdout").open("w+b") as output:
            (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
            said, stopped = self._run(folder, [self._job(code) | {"stdin": "stdin"}])
            text = output.read(self.file_kb << 10).decode(errors="replace")
        status = next((line["exit"] for line in said if "exit" in line), None)
        if status is None or status < 0:
            stopped = stopped or "crashes"
        error = f"exit code {status}" if status else ""
        return Outcome(output=text, stopped=stopped, error=stopped or error)

    def _job(self, code: str) -> dict[str, Any]:
        return {
            "code": code,
            "seconds": self.seconds,
            "memory_mb": self.memory_mb,
            "file_kb": self.file_kb,
            "path": [place for place in sys.path if place] if self.packages else [],
            "namespaces": self.namespaces,
        }

    def _run(self, folder: Path, frames: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-B", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        bodies = [json.dumps(frame).encode() for frame in frames]
        data = b"".join(struct.pack(">Q", len(body)) + body for body in bodies)
        stopped = ""
        try:
            said, _ = process.communicate(data, timeout=self.seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            stopped = "timeouts"
            said = _killed(process)
        except BaseException:
            _killed(process)
            raise
        lines = [
            json.loads(line) for line in said.splitlines(keepends=True) if line.endswith(b"\n")
        ]
        refused = next((line["refused"] for line in lines if "refused" in line), None)
        if refused:
            raise ConfigError(
                f"the sandbox cannot be closed here: {refused}; allow user namespaces, run inside a"
                " container, or choose Sandbox(namespaces=False)"
            )
        return lines, stopped or next((x["stopped"] for x in lines if "stopped" in x), "")


def _killed(process: subprocess.Popen[bytes]) -> bytes:
    """End a process that still runs, with all it started; returns what it had said."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it ends by itself just now
        os.killpg(process.pid, signal.SIGKILL)
    said, _ = process.communicate()
    return said


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    prefix = "kedge-sandbox-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
