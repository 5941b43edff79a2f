"""Entry point inside the sandbox: one process runs the tests, another runs the solution.

The solution's process sees neither the tests nor anything that counts as success, so it cannot pass
by exiting early, printing a result, or returning an object that equals everything: calls and
results are sent over a pipe as plain data.  Executed by path, with only the standard library.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # modules here would shadow the standard library

import ast
import builtins
import contextlib
import json
import os
import re
import signal
import threading
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
    from kedge.ext.sandbox import calls
else:
    calls = load_sibling("sandbox_calls")

MAX_OPEN, MAX_THREADS = 64, 64
MAX_FILES = 64  # in the working folder
_state: dict[str, Any] = {"report": 1, "secret": ""}


def main() -> None:
    """Read a job and its tests from standard input; write one JSON line per test.

    The solution's process is forked before the tests are read, and with them the secret that every
    valid line must carry.
    """
    job = calls.read_frame(0)
    if job["isolated"]:
        megabytes = 1 + (MAX_FILES * job["file_kb"] >> 10)
        kernel().finish_mounts(job["devices"], job["folder"], megabytes, files=MAX_FILES + 1)
    set_limits(job)
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(from_parent)
            os.close(to_parent)
            status = run_solution(job, to_child, from_child)
        finally:
            os._exit(status)
    os.close(to_child)
    os.close(from_child)
    try:
        isolate_tests(job)
        checks = calls.read_frame(0)
        _state["secret"] = checks["secret"]
        end_with(child, job["seconds"])
        if "stdin" not in job:
            run_tests(checks, from_parent, to_parent)
        else:
            output = exchange(checks["stdin"], from_parent, to_parent, job["file_kb"] << 10)
            if output is None:
                end(child)
            _, status = os.waitpid(child, 0)
            text = (output or b"").decode(errors="replace")
            report({"exit": os.waitstatus_to_exitcode(status), "output": text})
    finally:
        end(child)


def exchange(text: str, to_program: int, from_program: int, most: int) -> bytes | None:
    """Write a program's input and read its output; None if there are more than `most` bytes."""

    def feed() -> None:
        with contextlib.suppress(OSError):  # the program may leave input unread
            calls.write_all(to_program, text.encode(errors="replace"))
        os.close(to_program)

    threading.Thread(target=feed, daemon=True).start()
    output = bytearray()
    while chunk := os.read(from_program, 1 << 16):
        output += chunk
        if len(output) > most:
            return None
    return bytes(output)


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
    """Load the module that needs ctypes on demand."""
    return sys.modules.get("sandbox_kernel") or load_sibling("sandbox_kernel")


def set_limits(job: dict[str, Any]) -> None:
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
    if job["isolated"] and counts_by_namespace(os.uname().release):
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
    if job["isolated"]:
        kernel().confine()
    elif sys.platform.startswith("linux"):
        kernel().hide_memory()
    _state["report"] = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # keeps test output out of the report
    os.dup2(null, 2)
    os.environ["HOME"] = "/"  # packages read settings from HOME, which a solution can write to
    sys.path.extend(job["packages"])


# --- the solution's process -----------------------------------------------------------------------


def run_solution(job: dict[str, Any], requests: int, answers: int) -> int:
    """Run the solution, then serve calls to its functions; returns the exit status."""
    sys.path.extend(job["packages"])
    null = os.open(os.devnull, os.O_RDWR)
    if job["isolated"]:
        kernel().leave()
        kernel().confine()
    standard = "stdin" in job
    os.dup2(requests if standard else null, 0)
    os.dup2(answers if standard else null, 1)
    os.dup2(null, 2)
    for fd in set(range(3, MAX_OPEN)) - (set() if standard else {requests, answers}):
        with contextlib.suppress(OSError):
            os.close(fd)
    name = "__main__" if standard else "solution"
    module = types.ModuleType(name)
    _state["main"], sys.modules["__main__"] = sys.modules["__main__"], module
    sys.modules[name] = module
    error = run_code(job["code"], module)
    if standard:
        sys.stdout.flush()
        return int(error is not None)
    if error is not None:
        calls.write_frame(answers, {"raised": calls.describe_error(error)})
        return 1
    table = calls.ObjectTable(module)
    calls.write_frame(answers, table.describe())
    table.serve(requests, answers)
    return 0


def run_code(code: str, module: types.ModuleType) -> BaseException | None:
    """Run code in a module; returns the exception, or None on success."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # what Python started without `site` lacks
    try:
        exec(compile(code, "<solution>", "exec"), module.__dict__)
    except SystemExit as error:
        return error if error.code and module.__name__ == "__main__" else None
    except BaseException as error:
        return error
    return None


# --- the tests' process ---------------------------------------------------------------------------


DIED = "the solution ended"


def run_tests(checks: dict[str, Any], requests: int, answers: int) -> None:
    """Run every test and report each as it finishes."""
    try:
        first = calls.read_frame(answers)
        if first is None or "raised" in first:
            report({"error": DIED if first is None else ": ".join(first["raised"])})
            return
        remote = calls.RemoteSolution(requests, answers, first)
        space = test_namespace(checks, remote)
    except Exception as error:  # the solution's process may send anything
        report({"error": f"the solution sent an invalid description ({type(error).__name__})"})
        return
    idle = True  # no test has failed or used the solution
    for number, test in enumerate(checks["tests"]):
        try:
            tree = ast.parse(test, "<test>")
            body = compile(tree, "<test>", "exec")
        except (SyntaxError, ValueError) as wrong:
            report({"broken": f"test {number} is not valid Python: {wrong}"})
            return
        if compares_only(tree):
            report({"broken": f"test {number} compares without assert: {test.strip()[:80]!r}"})
            return
        remote.untestable = ""
        problem = run_test(body, space, remote)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used = remote.calls > 0 or bool(first["values"].keys() & names)
        if problem is None and not used and first["errors"].keys() & names:
            problem = "the solution defines an exception where the test expects a function"
        line: dict[str, Any] = {"test": number, "passed": problem is None}
        if problem is not None:
            line |= {"error": problem} | ({"untestable": True} if remote.untestable else {})
        report(line)
        if problem == DIED:
            return
        idle = idle and problem is None and not used
    if idle:
        report({"broken": NO_CALL})


NO_CALL = (
    "no test calls the solution, so every program would pass; name it as entry_point if a test"
    " defines check(candidate), or call it: assert add(1, 2) == 3"
)


def compares_only(tree: ast.Module) -> bool:
    """Whether the test only compares, without anything that could fail."""
    nodes = list(ast.walk(tree))
    states = any(isinstance(n, ast.Expr) and isinstance(n.value, ast.Compare) for n in tree.body)
    return states and not any(isinstance(node, (ast.Assert, ast.Raise)) for node in nodes)


def test_namespace(checks: dict[str, Any], remote: calls.RemoteSolution) -> dict[str, Any]:
    """The namespace of the tests: names of the prefix, then of the solution."""
    module, offered = types.ModuleType("tests"), types.ModuleType("solution")
    sys.modules["tests"], sys.modules["solution"] = module, offered
    space = module.__dict__
    entry, prefix = checks["entry_point"], parse_prefix(checks["prefix"])
    exec(compile(prefix, "<prefix>", "exec"), space)
    last: Any = prefix.body[-1] if prefix.body else None
    completed = {entry, last.name} if is_unfinished(last) else {entry}
    functions = {name for name, thing in space.items() if isinstance(thing, types.FunctionType)}
    for name, thing in remote.names(entry, functions).items():
        taken = name in space or hasattr(builtins, name) or name.startswith("__")
        if name in completed or not taken:
            space[name] = thing
        setattr(offered, name, thing)
    if entry:
        space["candidate"] = space[entry]
    return space


def parse_prefix(prefix: str) -> ast.Module:
    """Parse the longest valid part of the prefix, which may end in an unfinished function."""
    lines = prefix.splitlines()
    for end in range(len(lines), 0, -1):
        margin = re.match(r"\s*", lines[end - 1])
        indent = margin[0] if margin else ""
        for rest in ("", f"{indent}    pass", f"{indent}pass"):
            with contextlib.suppress(SyntaxError, ValueError):
                return ast.parse("\n".join([*lines[:end], rest]), "<prefix>")
    return ast.parse("")


def is_unfinished(node: Any) -> bool:
    """Whether a function or class ends in its signature or docstring."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False
    last = node.body[-1]
    text = isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant)
    return text or isinstance(last, ast.Pass) or is_unfinished(last)


def run_test(
    test: types.CodeType, space: dict[str, Any], remote: calls.RemoteSolution
) -> str | None:
    """Run a test; returns its error, or None if it passed."""
    before = dict(space)
    try:
        exec(test, space)
        for name, thing in list(space.items()):
            if before.get(name) is not thing:
                call_defined(name, thing, space)
    except calls.SolutionDied:
        return DIED
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError):
            remote.untestable = str(error)
        return ": ".join(calls.describe_error(error))
    return None


def call_defined(name: str, thing: Any, space: dict[str, Any]) -> None:
    """Call the functions and classes that a test defines for HumanEval, pytest or unittest."""
    if isinstance(thing, types.FunctionType) and thing.__module__ == "tests":
        if name == "check" and "candidate" in space:
            thing(space["candidate"])
        elif name.startswith("test") and not thing.__code__.co_argcount:
            thing()
    elif isinstance(thing, type) and thing.__module__ == "tests":
        unittest = sys.modules.get("unittest")
        if unittest and issubclass(thing, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(thing).run(result)
            for _, text in (*result.failures, *result.errors):
                raise AssertionError(text.strip().rpartition("\n")[2])
        elif name.startswith("Test"):
            for method in [each for each in vars(thing) if each.startswith("test")]:
                getattr(thing(), method)()


def report(value: dict[str, Any]) -> None:
    """Write one report line, with the secret that the solution does not know."""
    line = json.dumps({**value, "secret": _state["secret"]})
    calls.write_all(_state["report"], line.encode() + b"\n")


if __name__ == "__main__":
    main()
