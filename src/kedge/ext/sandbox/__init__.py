"""Runs untrusted Python code in isolated processes with limits."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.ext.sandbox.calls import encode_frame
from kedge.records.errors import ConfigError

logger = logging.getLogger(__name__)

START_SECONDS = 2.0  # extra seconds for Python to start
LEVELS = ("bubblewrap", "none")
FOLDER = Path(__file__).parent
CODE, WORK = "/kedge-code", "/kedge-sandbox"  # unlikely to exist on any machine
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = (
    "/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", "/nix/store",
    "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of running a solution.

    Attributes:
        passed: per test; a test that was not reached counts as failed.
        output: standard output, if it was run as a program.
        stopped: "timeouts" if it timed out, "crashes" if its process died, "untestable" if a test
            failed on a value that cannot leave its process, else "".
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
    them from this machine:

    * ``bubblewrap``: the program bwrap.  Each process sees the Python runtime and system libraries
      (read-only) and an empty working folder; it has no network, no view of other processes, no
      privileges, and a seccomp filter blocks the system calls that it does not need.
    * ``none``: nothing but limits on time, memory and files.  Programs run as your user and can
      read, write and delete your files; for a container or virtual machine that you can lose.

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
    isolation: str = "bubblewrap"

    def __post_init__(self) -> None:
        if not hasattr(os, "fork"):
            raise ConfigError("running code needs Linux or macOS: this platform has no fork")
        for name, least in (("seconds", 0.01), ("memory_mb", 64), ("file_kb", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.isolation not in LEVELS:
            raise ConfigError(
                f"isolation={self.isolation!r} must be bubblewrap, or none in a container that you"
                " can lose"
            )

    def prepare(self) -> None:
        """Check once per process that this machine can isolate programs.

        Raises:
            ConfigError: the machine cannot; the message says what to install.
        """
        if self.isolation == "none":
            _warn()
        elif problem := _find_problem():
            raise ConfigError(
                "model-written programs cannot be isolated on this machine, so they are not run"
                f" ({problem}). Install bubblewrap (apt-get install bubblewrap) and allow user"
                " namespaces (sysctl kernel.unprivileged_userns_clone=1"
                " user.max_user_namespaces=10000 kernel.apparmor_restrict_unprivileged_userns=0;"
                " for Docker --security-opt seccomp=unconfined --security-opt apparmor=unconfined);"
                " or score on a machine that has it (kedge serve-reward); or, in a container that"
                ' you can lose, pass code_verifier(sandbox="none"), which isolates nothing'
            )

    def test(
        self, code: str, tests: Sequence[str], *, entry_point: str = "", prefix: str = ""
    ) -> Outcome:
        """Run a solution and its tests, in separate processes.

        The tests see the functions, classes and constants of the solution (also as the module
        ``solution``), and ``entry_point`` as ``candidate``.  ``check(candidate)``, functions
        ``test_*`` and classes of unittest that a test defines are called.  Arguments and results
        must have types of the standard library or be instances of the solution's classes created
        by the tests.  Operators and truth of such an instance are those of the solution's class, so
        tests of numbers should compare with ``==`` or convert: ``abs(float(f(2)) - 4) < 1``.

        Args:
            code: source of the solution, a module.
            tests: Python code that raises unless the solution is correct.
            entry_point: the function or class under test; if given, the only visible name.
            prefix: trusted code that the tests also see: imports, helper functions.
        """
        self.prepare()
        checks = {"tests": list(tests), "entry_point": entry_point, "prefix": prefix}
        report, stopped = self._run({"code": code}, checks)
        passed = {line["test"] for line in report if line.get("passed")}
        error = next((line["error"] for line in report if "error" in line), "")
        if not stopped and not any({"error", "test", "broken"} & line.keys() for line in report):
            stopped = "crashes"
        if any("untestable" in line for line in report):
            stopped = stopped or "untestable"
        return Outcome(
            passed=tuple(number in passed for number in range(len(tests))),
            stopped="crashes" if error == "the solution ended" else stopped,
            error=error or stopped,
            broken=next((line["broken"] for line in report if "broken" in line), ""),
        )

    def run(self, code: str, stdin: str = "") -> Outcome:
        """Run a program on an input, its standard input."""
        self.prepare()
        report, stopped = self._run({"code": code, "stdin": True}, {"stdin": stdin})
        end = next((line for line in report if "exit" in line), {})
        status = end.get("exit")
        if status is None or status < 0 or 128 < status <= 192:  # killed by a signal
            stopped = stopped or "crashes"
        error = stopped or (f"exit code {status}" if status else "")
        return Outcome(output=end.get("output", ""), stopped=stopped, error=error)

    def _run(self, job: dict[str, Any], checks: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """Run a job; returns the report of the tests' process and why it was stopped."""
        view = _view(self.packages)
        limits = {name: getattr(self, name) for name in ("seconds", "memory_mb", "file_kb")}
        isolated = self.isolation != "none"
        secret = secrets.token_hex(16)
        common = {"isolated": isolated, "devices": view["devices"], "packages": view["packages"]}
        frames = [common | limits | {"folder": WORK} | job, checks | {"secret": secret}]
        prefix = "kedge-sandbox-"  # hidden from isolated processes
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(
                _command(isolated, view),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=ENVIRONMENT | dict.fromkeys(("HOME", "TMPDIR"), WORK if isolated else folder),
                start_new_session=True,
            )
            data, stopped = b"".join(map(encode_frame, frames)), ""
            try:
                output, problem = process.communicate(data, timeout=self.seconds + START_SECONDS)
            except subprocess.TimeoutExpired:
                stopped = "timeouts"
                output, problem = _kill(process)
            except BaseException:
                _kill(process)
                raise
        if problem and not output:
            last = problem.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(f"the sandbox cannot start: {last}")
        lines = []
        for line in output.splitlines(keepends=True):  # keep complete, valid lines with the secret
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
                signed = isinstance(value, dict) and value.get("secret") == secret
                lines += [value] if signed and line.endswith(b"\n") else []
        return lines, stopped or next((x["stopped"] for x in lines if "stopped" in x), "")


@functools.cache
def _warn() -> None:
    logger.warning(
        'sandbox="none": model-written programs run as your user and are not isolated; they can'
        " read, write and delete your files, leave processes running, and use the network"
    )


@functools.cache
def _find_problem() -> str:
    """Why programs cannot be isolated on this machine, or ""."""
    if not sys.platform.startswith("linux"):
        return "bubblewrap needs Linux"
    if shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    checks = {"tests": ["assert one() == 1"], "entry_point": "", "prefix": ""}
    try:
        report, stopped = Sandbox(seconds=20.0)._run({"code": "def one(): return 1"}, checks)
    except ConfigError as error:
        return str(error)
    if any(line.get("passed") for line in report):
        return ""
    return stopped or next((line["error"] for line in report if "error" in line), "no answer")


def _view(packages: bool) -> dict[str, Any]:
    """A program's view: the interpreter, and paths shown read-only, empty, and as devices."""
    python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    runtime = [python, *(f"{sys.base_prefix}/{name}" for name in ("lib", "lib64"))]
    names = ("site-packages", "dist-packages")
    installed = [path for path in sys.path if Path(path).name in names and Path(path).is_dir()]
    within = Path(os.__file__).parent
    paths = [*SYSTEM, *runtime, *(installed if packages else [])]
    shown: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.exists(path)}):
        if not any(path.startswith(f"{folder}/") for folder in shown):
            shown.append(path)
    return {
        "python": python,
        "shown": shown,
        "hidden": [] if packages else [str(within / n) for n in names if (within / n).is_dir()],
        "devices": [path for path in DEVICES if os.path.exists(path)],
        "packages": installed if packages else [],
    }


def _command(isolated: bool, view: dict[str, Any]) -> list[str]:
    """The command line of the sandbox's first process."""
    program = [view["python"], "-s", "-S", "-B"]
    if not isolated:
        return [*program, str(FOLDER / "child.py")]
    line = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user"]
    line += ["--die-with-parent", "--new-session", "--as-pid-1", "--uid", "65534", "--gid", "65534"]
    line += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    line += ["--cap-add", "CAP_SYS_ADMIN"]  # for kernel.finish_mounts; dropped afterwards
    for path in view["shown"]:
        line += ["--ro-bind", path, path]
    for path in view["hidden"]:
        line += ["--tmpfs", path, "--remount-ro", path]
    for path in view["devices"]:
        line += ["--dev-bind", path, path]
    line += ["--ro-bind", str(FOLDER), CODE, "--dir", WORK, "--remount-ro", "/"]
    return [*line, "--chdir", "/", *program, f"{CODE}/child.py"]


def _kill(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Kill a process and its children; returns its output so far."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the process has just exited
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()
