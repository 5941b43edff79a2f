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
import struct
import types
from collections.abc import Callable, Iterator
from typing import Any

CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
CLONE_NEWNET, CLONE_NEWIPC = 0x40000000, 0x08000000
PR_SET_PDEATHSIG = 1
MAX_FRAME = 64 << 20  # bytes
MAX_FILES = 64  # a solution may create
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READABLE = ("/dev/null", "/dev/zero", "/dev/urandom", "/usr/share/zoneinfo", "/etc/localtime")
FORBIDDEN = (
    "ctypes.", "subprocess.", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.system",
    "os.kill", "os.chown", "os.lchown", "os.link", "os.symlink", "os.chroot", "os.setxattr",
    "os.removexattr", "os.lockf", "os.unshare", "os.setns", "signal.pthread_kill", "pty.",
    "syslog.", "gc.get_", "resource.setrlimit", "resource.prlimit",
    "sys._current_", "sys.addaudithook", "ftplib.", "smtplib.", "telnetlib.", "poplib.",
    "imaplib.", "nntplib.", "urllib.", "http.client", "webbrowser.", "ensurepip.", "fcntl.",
    "_winapi.", "winreg.", "msvcrt.", "socket.", "sqlite3.load", "sqlite3.enable",
)  # fmt: skip
NO_IMPORT = {
    "ctypes", "_ctypes", "_posixsubprocess", "_posixshmem", "_testcapi", "_xxsubinterpreters",
    "_interpreters", "_gdbm", "_dbm", "readline", "_tkinter", "faulthandler", "posix",
}  # fmt: skip


def main() -> None:
    """Read a job and its tests from standard input; write one JSON line per test."""
    job = read_frame(0)
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
            run_tests(read_frame(0), from_parent, to_parent)
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


def guard(folder: str, readable: list[str]) -> None:
    """Refuse, from now on and for ever, what a solution has no business doing.

    The rules are closures over built-in functions and exact built-in types: whatever the solution
    does to modules and classes, they stay as they are.
    """
    own = os.path.realpath(folder)
    inside = path_rule()
    roots = (own, *(os.path.realpath(path) for path in readable))
    rules = path_rules(inside, (own,), roots) | other_rules(inside, own)
    forbidden, denied, missing = FORBIDDEN, PermissionError, ImportError

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        rule = rules.get(event)
        refused = event.startswith(forbidden) if rule is None else rule(arguments)
        if refused:
            error = missing if event == "import" else denied  # packages try and do without
            raise error(f"the sandbox does not allow {event}")

    remove_ways_out()
    sys.addaudithook(hook)


Rule = Callable[[tuple[Any, ...]], bool]  # arguments of an event -> whether it is refused


def plain_path() -> Callable[[str], str]:
    """A path from the root, without dots, found without asking the file system.

    That is right in the solution's folder: it can make no links.
    """
    here = os.getcwd

    def plain(path: str) -> str:
        parts: list[str] = []
        for part in (path if path.startswith("/") else here() + "/" + path).split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                parts.append(part)
        return "/" + "/".join(parts)

    return plain


def path_rule() -> Callable[[Any, tuple[str, ...]], bool]:
    """Whether a path lies in one of some folders."""
    plain, kind, text, raw, whole = plain_path(), type, str, bytes, int

    def inside(path: Any, roots: tuple[str, ...]) -> bool:
        if path is None or kind(path) is whole:  # the current folder; an open file
            return True
        if kind(path) is not text and kind(path) is not raw:
            return False
        where = plain(path if kind(path) is text else path.decode("utf-8", "surrogateescape"))
        for root in roots:  # noqa: SIM110 - any() can be replaced by the solution
            if where == root or where.startswith(root + "/"):
                return True
        return False

    return inside


def path_rules(
    inside: Callable[[Any, tuple[str, ...]], bool], own: tuple[str, ...], roots: tuple[str, ...]
) -> dict[str, Rule]:
    """Rules for events about files."""
    writes, most, made = WRITES, MAX_FILES, [0]

    def opened(arguments: tuple[Any, ...]) -> bool:
        path, _, flags = arguments
        if not (flags or 0) & writes:
            return not inside(path, roots)
        made[0] += 1
        return made[0] > most or not inside(path, own)

    def created(arguments: tuple[Any, ...]) -> bool:
        made[0] += 1
        return made[0] > most or not inside(arguments[0], own)

    def changed(arguments: tuple[Any, ...]) -> bool:
        return not inside(arguments[0], own)

    def renamed(arguments: tuple[Any, ...]) -> bool:
        return not (inside(arguments[0], own) and inside(arguments[1], own))

    def listed(arguments: tuple[Any, ...]) -> bool:
        return not inside(arguments[0], roots)

    changes = ("os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.utime", "os.chdir")
    rules: dict[str, Rule] = dict.fromkeys(changes, changed)
    return rules | {
        "open": opened,
        "os.mkdir": created,
        "os.rename": renamed,
        "os.listdir": listed,
        "os.scandir": listed,
    }


def other_rules(inside: Callable[[Any, tuple[str, ...]], bool], own: str) -> dict[str, Rule]:
    """Rules for imports, sockets, databases, and the frames of these very rules."""
    import _socket

    hidden, local, folders = frozenset(NO_IMPORT), getattr(_socket, "AF_UNIX", None), (own,)

    def imported(arguments: tuple[Any, ...]) -> bool:
        name, file = arguments[:2]
        return name in hidden or (file is not None and inside(file, folders))

    def connected(arguments: tuple[Any, ...]) -> bool:
        return arguments[1] != local  # socket pairs within the process are fine: asyncio needs one

    def read_attribute(arguments: tuple[Any, ...]) -> bool:
        return arguments[1] == "tb_frame"

    def database(arguments: tuple[Any, ...]) -> bool:
        return arguments[0] != ":memory:"

    return {
        "import": imported,
        "socket.__new__": connected,
        "object.__getattr__": read_attribute,
        "sqlite3.connect": database,
    }


def remove_ways_out() -> None:
    """Take away what no audit event covers."""
    for name in NO_IMPORT - {"posix", "_posixsubprocess"}:
        sys.modules.pop(name, None)
    stub = types.ModuleType("_posixsubprocess")
    stub.fork_exec = None  # type: ignore[attr-defined]
    sys.modules["_posixsubprocess"] = stub  # so that modules which import subprocess still load
    for module in (os, sys.modules["posix"]):
        for name in ("setsid", "setpgid", "setpgrp", "mkfifo", "mknod"):
            if hasattr(module, name):
                delattr(module, name)


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
    guard(".", [*READABLE, *sys.path, sys.prefix, sys.base_prefix])
    name = "__main__" if standard else "solution"
    module = types.ModuleType(name)
    _state["main"], sys.modules["__main__"] = sys.modules["__main__"], module
    sys.modules[name] = module
    error = executed(job["code"], module)
    if standard:
        sys.stdout.flush()
        return int(error is not None)
    if error is not None:
        write_frame(answers, {"raised": described(error)})
        return 1
    functions = [key for key, value in list(module.__dict__.items()) if callable(value)]
    write_frame(answers, {"functions": functions})
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
    while (request := read_frame(requests)) is not None:
        try:
            arguments, named = unpack(request["args"]), unpack(request["kwargs"])
            result = getattr(module, request["name"])(*arguments, **named)
            answer = encoded({"result": pack(result), "args": pack(arguments)})
        except BaseException as error:
            answer = encoded({"raised": described(error)})
        write_all(answers, answer)


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
    first = read_frame(answers)
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
        write_frame(requests, {"name": name, "args": pack(arguments), "kwargs": pack(named)})
        answer = read_frame(answers)
        if answer is None:
            raise Died
        if "raised" in answer:
            kind, text = answer["raised"]
            error = getattr(builtins, kind, None)
            if isinstance(error, type) and issubclass(error, Exception):
                raise error(text)
            raise RuntimeError(f"{kind}: {text}")
        for own, new in zip(arguments, unpack(answer["args"]), strict=True):
            update(own, new)
        return unpack(answer["result"])

    call.__name__ = name
    return call


def update(own: Any, new: Any) -> None:
    """Give a mutable argument the contents that the call left it with."""
    if isinstance(own, list):
        own[:] = new
    elif isinstance(own, (dict, set)) and own != new:
        own.clear()
        own.update(new)


# --- plain data over pipes ------------------------------------------------------------------------


def pack(value: Any) -> Any:
    """A value of built-in types as JSON that tells them apart.

    Raises:
        TypeError: it is of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, dict):
        return {"d": [[pack(key), pack(item)] for key, item in value.items()]}
    for key, kinds in (("l", list), ("t", tuple), ("s", set), ("z", frozenset), ("r", range)):
        if isinstance(value, kinds):
            return {key: [pack(item) for item in value]}
    if isinstance(value, Iterator):
        return {"i": [pack(item) for item in value]}
    raise TypeError(f"a {type(value).__name__} cannot leave the sandbox")


def unpack(value: Any) -> Any:
    """What ``pack`` was given."""
    if not isinstance(value, dict):
        return value
    ((key, items),) = value.items()
    if key == "b":
        return bytes.fromhex(items)
    if key == "c":
        return complex(*items)
    if key == "d":
        return {unpack(name): unpack(item) for name, item in items}
    built = [unpack(item) for item in items]
    made: dict[str, Callable[[list[Any]], Any]] = {
        "l": list, "t": tuple, "s": set, "z": frozenset, "r": list, "i": iter,
    }  # fmt: skip
    return made[key](built)


def encoded(value: Any) -> bytes:
    """One value as a frame: its length, and JSON."""
    body = json.dumps(value).encode()
    return struct.pack(">Q", len(body)) + body


def write_frame(fd: int, value: Any) -> None:
    """Send one value."""
    write_all(fd, encoded(value))


def write_all(fd: int, data: bytes) -> None:
    """Send bytes, however many the pipe takes at a time."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int) -> Any:
    """The next value, or None at the end."""
    head = read_exactly(fd, 8)
    if head is None:
        return None
    (size,) = struct.unpack(">Q", head)
    body = read_exactly(fd, size) if size <= MAX_FRAME else None
    return None if body is None else json.loads(body)


def read_exactly(fd: int, size: int) -> bytes | None:
    """So many bytes, or None if there are fewer."""
    data = bytearray()
    while len(data) < size:
        piece = os.read(fd, min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def say(value: dict[str, Any]) -> None:
    """One line to whoever started the sandbox."""
    write_all(1, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
