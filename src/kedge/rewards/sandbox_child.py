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
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any


def beside(name: str) -> types.ModuleType:
    """The module in the file of that name next to this one."""
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    module = types.ModuleType(name)
    SourceFileLoader(name, file).exec_module(module)
    return module


if TYPE_CHECKING:
    from kedge.rewards import sandbox_guard as fence
    from kedge.rewards import sandbox_wire as wire
else:
    fence, wire = beside("sandbox_guard"), beside("sandbox_wire")

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
    end_with(child, job["seconds"] + 3)
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
    """End the solution and this process after a while, in case nobody waits for them."""

    def end(*_: object) -> None:
        os.kill(child, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)


# --- limits ---------------------------------------------------------------------------------------

_state: dict[str, Any] = {"library": None}


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

    seconds, memory, size = job["seconds"], job["memory_mb"] << 20, job["file_kb"] << 10
    wanted = {
        "RLIMIT_CPU": seconds + 1,
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
        wire.write_frame(answers, {"raised": described(error)})
        return 1
    functions = [key for key, value in list(module.__dict__.items()) if callable(value)]
    wire.write_frame(answers, {"functions": functions})
    serve_calls(module, requests, answers)
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


def serve_calls(module: types.ModuleType, requests: int, answers: int) -> None:
    """Answer calls until there are no more."""
    while (request := wire.read_frame(requests)) is not None:
        try:
            arguments, named = wire.unpack(request["args"]), wire.unpack(request["kwargs"])
            result = getattr(module, request["name"])(*arguments, **named)
            answer = wire.encoded({"result": wire.pack(result), "args": wire.pack(arguments)})
        except BaseException as error:
            answer = wire.encoded({"raised": described(error)})
        wire.write_all(answers, answer)


def described(error: BaseException) -> list[str]:
    """Class and message of an error."""
    text = ""
    with contextlib.suppress(Exception):
        text = str(error)[:300]
    return [type(error).__name__, text]


# --- the process of the tests ---------------------------------------------------------------------


DIED = "the solution ended"


class Died(BaseException):
    """The solution's process is gone; no test can catch this."""


def run_tests(job: dict[str, Any], requests: int, answers: int) -> None:
    """Run every test, and report each as soon as it is done."""
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
    names = [job["entry_point"]] if job["entry_point"] else first["functions"]
    for name in filter(str.isidentifier, names):
        taken = name in space or hasattr(builtins, name) or name.startswith("__")
        if name == job["entry_point"] or not taken:
            space[name] = proxy(name, requests, answers)
    if job["entry_point"]:
        space["candidate"] = space[job["entry_point"]]
    for number, test in enumerate(job["tests"]):
        error = failure(test, space)
        if error is None:
            say({"test": number, "passed": True})
        else:
            say({"test": number, "passed": False, "error": error})
        if error == DIED:
            return


def failure(test: str, space: dict[str, Any]) -> str | None:
    """What a test raised, or None if it passed."""
    try:
        exec(compile(test, "<test>", "exec"), space)
    except Died:
        return DIED
    except BaseException as error:
        return ": ".join(described(error))
    return None


def proxy(name: str, requests: int, answers: int) -> Callable[..., Any]:
    """A function that calls the solution's function of that name."""

    def call(*arguments: Any, **named: Any) -> Any:
        wire.write_frame(
            requests, {"name": name, "args": wire.pack(arguments), "kwargs": wire.pack(named)}
        )
        answer = wire.read_frame(answers)
        if answer is None:
            raise Died
        if "raised" in answer:
            kind, text = answer["raised"]
            error = getattr(builtins, kind, None)
            if isinstance(error, type) and issubclass(error, Exception):
                raise error(text)
            raise RuntimeError(f"{kind}: {text}")
        for own, new in zip(arguments, wire.unpack(answer["args"]), strict=True):
            update(own, new)
        return wire.unpack(answer["result"])

    call.__name__ = name
    return call


def update(own: Any, new: Any) -> None:
    """Give a mutable argument the contents that the call left it with."""
    if isinstance(own, list):
        own[:] = new
    elif isinstance(own, (dict, set)) and own != new:
        own.clear()
        own.update(new)


def say(value: dict[str, Any]) -> None:
    """One line to whoever started the sandbox."""
    wire.write_all(1, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
