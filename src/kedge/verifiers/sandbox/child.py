"""Entry point inside the sandbox: one process runs the tests, another runs the solution.

The solution's process sees neither the tests nor anything that counts as success, so it cannot pass
by exiting early, printing a result, or returning an object that equals everything: calls and
results are sent over a pipe as plain data.  Executed by path, with only the standard library.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # modules here would shadow the standard library

import builtins
import contextlib
import json
import os
import re
import signal
import types
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any


def load_sibling(name: str) -> types.ModuleType:
    """The module sandbox_NAME in the file NAME.py next to this one."""
    file = os.path.join(
        os.path.dirname(os.path.abspath(__file__)), f"{name.removeprefix('sandbox_')}.py"
    )
    module = types.ModuleType(name)
    sys.modules[name] = module
    SourceFileLoader(name, file).exec_module(module)
    return module


if TYPE_CHECKING:
    from kedge.verifiers.sandbox import calls, wire
else:
    wire, calls = load_sibling("sandbox_wire"), load_sibling("sandbox_calls")

MAX_OPEN, MAX_THREADS = 64, 64
MAX_FILES = 64  # in the working folder
_state: dict[str, Any] = {"report": 1, "secret": ""}


def main() -> None:
    """Read a job and its tests from standard input; write one JSON line per test.

    The solution's process is forked before the tests are read, and with them the secret that every
    valid line must carry.
    """
    job = wire.read_frame(0)
    if job["level"] == "namespaces":
        kernel().enter(job["shown"], job["devices"], job["hidden"], job["folder"])
    if job["level"] != "audit":
        megabytes = 1 + (MAX_FILES * job["file_kb"] >> 10)
        kernel().make_folder(job["folder"], megabytes, files=MAX_FILES + 1)
    limit(job)
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(from_parent)
            os.close(to_parent)
            status = solution(job, to_child, from_child)
        finally:
            os._exit(status)
    os.close(to_child)
    os.close(from_child)
    try:
        isolate_tests(job)
        checks = wire.read_frame(0)
        _state["secret"] = checks["secret"]
        end_with(child, job["seconds"])
        if "stdin" not in job:
            run_tests(checks, from_parent, to_parent)
        else:
            _, status = os.waitpid(child, 0)
            report({"exit": os.waitstatus_to_exitcode(status)})
    finally:
        end(child)


def end_with(child: int, seconds: float) -> None:
    """On timeout, report it and end the solution and this process."""

    def stop(*_: object) -> None:
        report({"stopped": "timeouts"})
        end(child)
        os._exit(1)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def end(child: int) -> None:
    """Kill the solution; without permission, the kernel does so when this process exits."""
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)


# --- limits ---------------------------------------------------------------------------------------


def kernel() -> Any:
    """The module that needs ctypes, loaded on demand."""
    if "sandbox_kernel" not in sys.modules:
        load_sibling("sandbox_seccomp")
        load_sibling("sandbox_kernel")
    return sys.modules["sandbox_kernel"]


def limit(job: dict[str, Any]) -> None:
    """Set resource limits for this process and its children."""
    import resource

    seconds, memory, size = int(job["seconds"]), job["memory_mb"] << 20, job["file_kb"] << 10
    limits = {
        "RLIMIT_CPU": seconds + 2,
        "RLIMIT_AS": memory,
        "RLIMIT_FSIZE": size,
        "RLIMIT_NOFILE": MAX_OPEN,
        "RLIMIT_CORE": 0,
    }
    if job["level"] != "audit" and counts_by_namespace(os.uname().release):
        limits["RLIMIT_NPROC"] = MAX_THREADS
    for name, most in limits.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no address-space limit
            resource.setrlimit(kind, (value, value))


def counts_by_namespace(release: str) -> bool:
    """Whether this Linux counts processes per user namespace, not per user (since 5.14)."""
    version = re.match(r"(\d+)\.(\d+)", release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


def isolate_tests(job: dict[str, Any]) -> None:
    """Protect the tests' process from the solution, and confine it too."""
    if job["level"] != "audit":
        kernel().confine(job["folder"])
    elif sys.platform.startswith("linux"):
        kernel().hide_memory()
    _state["report"] = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # output of tests must not mix with the report
    os.dup2(null, 2)
    os.environ["HOME"] = "/"  # packages read settings from HOME, which the solution can write to
    sys.path.extend(job["packages"])


def isolate_solution(job: dict[str, Any]) -> None:
    """Restrict the solution's process to its memory and the working folder."""
    if job["level"] != "audit":
        kernel().leave()
        kernel().confine(job["folder"])
        return
    fence: Any = load_sibling("sandbox_guard")
    fence.guard(".", [*fence.READABLE, *sys.path, sys.prefix, sys.base_prefix])


# --- the process of the solution ------------------------------------------------------------------


def solution(job: dict[str, Any], requests: int, answers: int) -> int:
    """Run the solution, then serve calls to its functions; returns the exit status."""
    sys.path.extend(job["packages"])
    null = os.open(os.devnull, os.O_RDWR)
    isolate_solution(job)
    standard = "stdin" in job
    os.dup2(job.get("stdin", null), 0)
    os.dup2(job.get("stdout", null), 1)
    os.dup2(null, 2)
    close_files({0, 1, 2} if standard else {0, 1, 2, requests, answers})
    name = "__main__" if standard else "solution"
    module = types.ModuleType(name)
    _state["main"], sys.modules["__main__"] = sys.modules["__main__"], module
    sys.modules[name] = module
    error = run_code(job["code"], module)
    if standard:
        sys.stdout.flush()
        return int(error is not None)
    if error is not None:
        wire.write_frame(answers, {"raised": calls.described(error)})
        return 1
    kept = calls.Kept(module)
    wire.write_frame(answers, kept.described())
    kept.serve(requests, answers)
    return 0


def close_files(kept: set[int]) -> None:
    """Close all file descriptors except ``kept``."""
    for fd in set(range(MAX_OPEN)) - kept:
        with contextlib.suppress(OSError):
            os.close(fd)


def run_code(code: str, module: types.ModuleType) -> BaseException | None:
    """Run code in a module; returns the exception, or None on success."""
    try:
        exec(compile(code, "<solution>", "exec"), module.__dict__)
    except SystemExit as error:
        return error if error.code and module.__name__ == "__main__" else None
    except BaseException as error:
        return error
    return None


# --- the process of the tests ---------------------------------------------------------------------


DIED = "the solution ended"


def run_tests(checks: dict[str, Any], requests: int, answers: int) -> None:
    """Run every test and report each as it finishes."""
    try:
        first = wire.read_frame(answers)
        if first is None or "raised" in first:
            report({"error": DIED if first is None else ": ".join(first["raised"])})
            return
        space = test_namespace(checks, calls.Away(requests, answers, first))
    except Exception as error:  # the solution's process may write anything
        report({"error": f"the solution sent an invalid description ({type(error).__name__})"})
        return
    for number, test in enumerate(checks["tests"]):
        try:
            body = compile(test, "<test>", "exec")
        except (SyntaxError, ValueError) as wrong:
            report({"broken": f"test {number} is not valid Python: {wrong}"})
            return
        problem = failure(body, space)
        if problem is None:
            report({"test": number, "passed": True})
        else:
            report({"test": number, "passed": False, "error": problem})
        if problem == DIED:
            return


def test_namespace(checks: dict[str, Any], away: calls.Away) -> dict[str, Any]:
    """The namespace of the tests: names of the prefix, then of the solution."""
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    space = module.__dict__
    if checks["prefix"]:
        with contextlib.suppress(SyntaxError):  # the prefix may end in an unfinished function
            exec(compile(checks["prefix"], "<prefix>", "exec"), space)
    entry = checks["entry_point"]
    functions = {name for name, thing in space.items() if isinstance(thing, types.FunctionType)}
    for name, thing in away.names([entry] if entry else None, functions).items():
        taken = name in space or hasattr(builtins, name) or name.startswith("__")
        if name == entry or not taken:
            space[name] = thing
    if entry:
        space["candidate"] = space[entry]
    return space


def failure(test: types.CodeType, space: dict[str, Any]) -> str | None:
    """The error of a test, or None if it passed."""
    try:
        exec(test, space)
    except calls.Died:
        return DIED
    except BaseException as error:
        return ": ".join(calls.described(error))
    return None


def report(value: dict[str, Any]) -> None:
    """Write one report line, with the secret that the solution does not know."""
    line = json.dumps({**value, "secret": _state["secret"]})
    wire.write_all(_state["report"], line.encode() + b"\n")


if __name__ == "__main__":
    main()
