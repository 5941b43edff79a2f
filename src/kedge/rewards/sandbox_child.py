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
import signal
import types
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any


def beside(name: str) -> types.ModuleType:
    """The module in the file of that name next to this one."""
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    module = types.ModuleType(name)
    sys.modules[name] = module
    SourceFileLoader(name, file).exec_module(module)
    return module


if TYPE_CHECKING:
    from kedge.rewards import sandbox_calls as calls
    from kedge.rewards import sandbox_guard as fence
    from kedge.rewards import sandbox_wire as wire
else:
    fence, wire = beside("sandbox_guard"), beside("sandbox_wire")
    calls = beside("sandbox_calls")

CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
CLONE_NEWNET, CLONE_NEWIPC = 0x40000000, 0x08000000
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read a job and its tests from standard input; write one JSON line per test."""
    job = wire.read_frame(0)
    if not isolate() and job["namespaces"]:
        say({"refused": "there are no user namespaces"})
        return
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    limit(job)
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
    end_with(child, job["seconds"])
    try:
        if job["stdin"] is None:
            run_tests(wire.read_frame(0), from_parent, to_parent)
        else:
            _, status = os.waitpid(child, 0)
            say({"exit": os.waitstatus_to_exitcode(status)})
            return
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def end_with(child: int, seconds: float) -> None:
    """End the solution and this process when its time is up, and say so."""

    def end(*_: object) -> None:
        say({"stopped": "timeouts"})
        os.kill(child, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)


# --- limits ---------------------------------------------------------------------------------------

_state: dict[str, Any] = {"library": None, "report": 1}


def isolate() -> bool:
    """Leave the network, the other processes and all privileges behind, where Linux allows it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        import ctypes

        _state["library"] = library = ctypes.CDLL(None)
        flags = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC
        return library.unshare(CLONE_NEWUSER | flags) == 0 or library.unshare(flags) == 0
    except (ImportError, OSError, AttributeError):
        return False


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone."""
    library, _state["library"] = _state["library"], None
    if library is not None:
        library.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def limit(job: dict[str, Any]) -> None:
    """Limits of this process and of all it starts."""
    import resource

    seconds, memory, size = int(job["seconds"]), job["memory_mb"] << 20, job["file_kb"] << 10
    wanted = {
        "RLIMIT_CPU": seconds + 2,
        "RLIMIT_AS": memory,
        "RLIMIT_FSIZE": size,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    for name, most in wanted.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of address space
            resource.setrlimit(kind, (value, value))


# --- the process of the solution ------------------------------------------------------------------


def solution(job: dict[str, Any], requests: int, answers: int) -> int:
    """Run the solution, then answer calls of its functions; returns the exit status."""
    die_with_parent()
    null = os.open(os.devnull, os.O_RDWR)
    standard = job["stdin"] is not None
    os.dup2(os.open("stdin", os.O_RDONLY) if standard else null, 0)
    os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT, 0o600) if standard else null, 1)
    os.dup2(null, 2)
    sys.path.extend(job["path"])
    fence.guard(".", [*fence.READABLE, *sys.path, sys.prefix, sys.base_prefix])
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


def run_tests(job: dict[str, Any], requests: int, answers: int) -> None:
    """Run every test, and report each as soon as it is done."""
    _state["report"] = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what tests print is no report
    first = wire.read_frame(answers)
    if first is None or "raised" in first:
        say({"error": DIED if first is None else ": ".join(first["raised"])})
        return
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    space = module.__dict__
    if job["prefix"]:
        with contextlib.suppress(SyntaxError):  # an unfinished function is no module
            exec(compile(job["prefix"], "<prefix>", "exec"), space)
    entry = job["entry_point"]
    away = calls.Away(requests, answers, first["errors"])
    found = away.names(first, [entry] if entry else [*first["functions"], *first["values"]])
    for name, thing in found.items():
        taken = name in space or hasattr(builtins, name) or name.startswith("__")
        if name == entry or not taken:
            space[name] = thing
    if entry:
        space["candidate"] = space[entry]
    for number, test in enumerate(job["tests"]):
        try:
            body = compile(test, "<test>", "exec")
        except (SyntaxError, ValueError) as wrong:
            say({"broken": f"test {number} is no Python: {wrong}"})
            return
        error = failure(body, space)
        if error is None:
            say({"test": number, "passed": True})
        else:
            say({"test": number, "passed": False, "error": error})
        if error == DIED:
            return


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
    """One line to whoever started the sandbox."""
    wire.write_all(_state["report"], json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
