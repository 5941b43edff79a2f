"""What runs inside the sandbox: one process that runs tests, and one that runs the solution.

The solution's process is told neither the tests nor anything that counts as success, so it cannot
end early, print a verdict, or return an object that equals everything: calls and results cross a
pipe as plain data.  This file is executed by path, with the standard library alone.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder has modules named like some of the standard library

import builtins
import contextlib
import json
import os
import re
import signal
import types
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any


def beside(name: str) -> types.ModuleType:
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
    wire, calls = beside("sandbox_wire"), beside("sandbox_calls")

MAX_OPEN, MAX_THREADS = 64, 64
MAX_FILES = 64  # in the working folder
_state: dict[str, Any] = {"report": 1, "secret": ""}


def main() -> None:
    """Read a job and its tests from standard input; write one JSON line per test.

    The job is for the solution's process, which starts before the rest is read: the tests, and the
    secret without which a line is no verdict.
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
            say({"exit": os.waitstatus_to_exitcode(status)})
    finally:
        end(child)


def end_with(child: int, seconds: float) -> None:
    """End the solution and this process when its time is up, and say so."""

    def stop(*_: object) -> None:
        say({"stopped": "timeouts"})
        end(child)
        os._exit(1)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def end(child: int) -> None:
    """End the solution; where this process may not, the kernel does as soon as it exits itself."""
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)


# --- limits ---------------------------------------------------------------------------------------


def kernel() -> Any:
    """The module that needs ctypes, loaded where the level needs it."""
    if "sandbox_kernel" not in sys.modules:
        beside("sandbox_seccomp")
        beside("sandbox_kernel")
    return sys.modules["sandbox_kernel"]


def limit(job: dict[str, Any]) -> None:
    """Limits of this process and of all it starts."""
    import resource

    seconds, memory, size = int(job["seconds"]), job["memory_mb"] << 20, job["file_kb"] << 10
    wanted = {
        "RLIMIT_CPU": seconds + 2,
        "RLIMIT_AS": memory,
        "RLIMIT_FSIZE": size,
        "RLIMIT_NOFILE": MAX_OPEN,
        "RLIMIT_CORE": 0,
    }
    if job["level"] != "audit" and counts_by_namespace(os.uname().release):
        wanted["RLIMIT_NPROC"] = MAX_THREADS
    for name, most in wanted.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of address space
            resource.setrlimit(kind, (value, value))


def counts_by_namespace(release: str) -> bool:
    """Whether a Linux counts processes by user namespace, not all that the user runs (5.14)."""
    version = re.match(r"(\d+)\.(\d+)", release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


def isolate_tests(job: dict[str, Any]) -> None:
    """Put the process of the tests out of reach of the solution, and limit it likewise."""
    if job["level"] != "audit":
        kernel().confine(job["folder"])
    elif sys.platform.startswith("linux"):
        kernel().hide_memory()
    _state["report"] = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # what tests print is no report
    os.dup2(null, 2)
    os.environ["HOME"] = "/"  # packages read settings there, and the solution can write to its home
    sys.path.extend(job["packages"])


def isolate_solution(job: dict[str, Any]) -> None:
    """Leave the solution's process nothing but its own memory and the working folder."""
    if job["level"] != "audit":
        kernel().leave()
        kernel().confine(job["folder"])
        return
    fence: Any = beside("sandbox_guard")
    fence.guard(".", [*fence.READABLE, *sys.path, sys.prefix, sys.base_prefix])


# --- the process of the solution ------------------------------------------------------------------


def solution(job: dict[str, Any], requests: int, answers: int) -> int:
    """Run the solution, then answer calls of its functions; returns the exit status."""
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
    error = executed(job["code"], module)
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
    """Close all files but some: the program's input and output, or the pipes to the tests."""
    for fd in set(range(MAX_OPEN)) - kept:
        with contextlib.suppress(OSError):
            os.close(fd)


def executed(code: str, module: types.ModuleType) -> BaseException | None:
    """Run code in a module; what it raised, unless it ended well."""
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
    """Run every test, and report each as soon as it is done."""
    try:
        first = wire.read_frame(answers)
        if first is None or "raised" in first:
            say({"error": DIED if first is None else ": ".join(first["raised"])})
            return
        space = names_of_tests(checks, calls.Away(requests, answers, first))
    except Exception as error:  # the solution's process writes what it likes
        say({"error": f"the solution describes itself wrongly ({type(error).__name__})"})
        return
    for number, test in enumerate(checks["tests"]):
        try:
            body = compile(test, "<test>", "exec")
        except (SyntaxError, ValueError) as wrong:
            say({"broken": f"test {number} is not valid Python: {wrong}"})
            return
        problem = failure(body, space)
        if problem is None:
            say({"test": number, "passed": True})
        else:
            say({"test": number, "passed": False, "error": problem})
        if problem == DIED:
            return


def names_of_tests(checks: dict[str, Any], away: calls.Away) -> dict[str, Any]:
    """The names that tests see: those of the prefix, then the solution's."""
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    space = module.__dict__
    if checks["prefix"]:
        with contextlib.suppress(SyntaxError):  # an unfinished function is not a module
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
    """What a test raised, or None if it passed."""
    try:
        exec(test, space)
    except calls.Died:
        return DIED
    except BaseException as error:
        return ": ".join(calls.described(error))
    return None


def say(value: dict[str, Any]) -> None:
    """One line to whoever started the sandbox, with the secret that only the tests know."""
    line = json.dumps({**value, "secret": _state["secret"]})
    wire.write_all(_state["report"], line.encode() + b"\n")


if __name__ == "__main__":
    main()
