"""The audit hook that restricts a solution in its process; it cannot be removed."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

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


def guard(folder: str, readable: list[str]) -> None:
    """Install the audit hook, permanently.

    The rules are closures over built-in functions and exact built-in types, so the solution cannot
    change them by patching modules or classes.
    """
    work_folder = os.path.realpath(folder)
    is_inside = path_rule()
    roots = (work_folder, *(os.path.realpath(path) for path in readable))
    rules = path_rules(is_inside, (work_folder,), roots) | other_rules(is_inside, work_folder)
    forbidden, denied, missing = FORBIDDEN, PermissionError, ImportError

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        rule = rules.get(event)
        refused = event.startswith(forbidden) if rule is None else rule(arguments)
        if refused:
            error = missing if event == "import" else denied  # packages handle ImportError
            raise error(f"the sandbox does not allow {event}")

    remove_ways_out()
    sys.addaudithook(hook)


Rule = Callable[[tuple[Any, ...]], bool]  # arguments of an event -> whether it is refused


def path_rule() -> Callable[[Any, tuple[str, ...]], bool]:
    """Whether a path is inside one of the given folders.

    Paths are normalized without file-system access, which is exact in the solution's folder: it
    cannot create links there.
    """
    here, kind, text, raw, whole = os.getcwd, type, str, bytes, int

    def inside(path: Any, roots: tuple[str, ...]) -> bool:
        if path is None or kind(path) is whole:  # the working directory or an open file
            return True
        if kind(path) is raw:
            path = path.decode("utf-8", "surrogateescape")
        if kind(path) is not text:
            return False
        parts: list[str] = []
        for part in (path if path.startswith("/") else here() + "/" + path).split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                parts.append(part)
        where = "/" + "/".join(parts)
        for root in roots:  # noqa: SIM110 - any() can be replaced by the solution
            if where == root or where.startswith(root + "/"):
                return True
        return False

    return inside


def path_rules(
    inside: Callable[[Any, tuple[str, ...]], bool],
    writable: tuple[str, ...],
    roots: tuple[str, ...],
) -> dict[str, Rule]:
    """Rules for events about files."""
    writes, max_files, created_files = WRITES, MAX_FILES, [0]

    def created(arguments: tuple[Any, ...]) -> bool:
        created_files[0] += 1
        return created_files[0] > max_files or not inside(arguments[0], writable)

    def opened(arguments: tuple[Any, ...]) -> bool:
        if (arguments[2] or 0) & writes:
            return created(arguments)
        return not inside(arguments[0], roots)

    changes = ("os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.utime", "os.chdir")
    rules: dict[str, Rule] = dict.fromkeys(changes, lambda a: not inside(a[0], writable))
    rules |= dict.fromkeys(("os.listdir", "os.scandir"), lambda a: not inside(a[0], roots))
    rules["os.rename"] = lambda a: not (inside(a[0], writable) and inside(a[1], writable))
    return rules | {"open": opened, "os.mkdir": created}


def other_rules(
    inside: Callable[[Any, tuple[str, ...]], bool], work_folder: str
) -> dict[str, Rule]:
    """Rules for imports, sockets, databases, and access to the frames of these rules."""
    import _socket

    hidden, local, folders = frozenset(NO_IMPORT), getattr(_socket, "AF_UNIX", None), (work_folder,)
    return {
        "import": lambda a: a[0] in hidden or (a[1] is not None and inside(a[1], folders)),
        "socket.__new__": lambda a: a[1] != local,  # asyncio needs socket pairs within the process
        "object.__getattr__": lambda a: a[1] == "tb_frame",
        "sqlite3.connect": lambda a: a[0] != ":memory:",
    }


def remove_ways_out() -> None:
    """Remove functions that no audit event covers."""
    for name in NO_IMPORT - {"posix", "_posixsubprocess"}:
        sys.modules.pop(name, None)
    stub = types.ModuleType("_posixsubprocess")
    stub.fork_exec = None  # type: ignore[attr-defined]
    sys.modules["_posixsubprocess"] = stub  # so that modules that import subprocess still load
    for module in (os, sys.modules["posix"]):
        for name in ("setsid", "setpgid", "setpgrp", "mkfifo", "mknod"):
            if hasattr(module, name):
                delattr(module, name)
