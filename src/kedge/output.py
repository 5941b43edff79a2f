"""Where a command or a run writes: checked before work begins, held by one run at a time."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import logging
import os
import re
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = "_kedge.lock"  # uploads to the hub leave out "_*"
_NO_LOCKS = {
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
}  # this file system has none
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


# -- targets ----------------------------------------------------------------------------------


def check_folder(option: str, folder: str | Path) -> None:
    """Refuse a folder that cannot be made or written in; nothing is left behind.

    Args:
        option: name of the option, for the error.
        folder: may not exist yet.

    Raises:
        ConfigError: names the option, the folder and what is in the way.
    """
    shown = f"{option}={str(folder)!r}"
    if not str(folder).strip():
        raise ConfigError(f"{shown} names no folder; name one, or '.' for the current folder")
    try:
        given = Path(folder).expanduser().absolute()
        if b"\0" in os.fsencode(given):
            raise ValueError("it contains a NUL")
        there = next(path for path in (given, *given.parents) if path.exists())
        if not there.is_dir():
            raise ConfigError(f"{shown}: {there} is a file; name another folder")
        with tempfile.TemporaryFile(dir=there):
            pass
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL; RuntimeError: ~nobody
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{shown} cannot be written to ({error}); name another folder") from error


def check_file(option: str, file: str | Path) -> None:
    """Refuse a file that cannot be made or replaced.

    Raises:
        ConfigError: names the option, the file and what is in the way.
    """
    if not str(file).strip() or Path(file).is_dir():
        raise ConfigError(f"{option}={str(file)!r} must be a file, not a folder")
    check_folder(option, Path(file).parent)
    if Path(file).exists() and not os.access(file, os.W_OK):
        raise ConfigError(f"{option}={str(file)!r} may not be written by this user; name another")


# -- one run for each folder ------------------------------------------------------------------


class RunLock:
    """Keeps other runs out of an output folder, as a context manager.

    The lock is ``flock`` on ``FOLDER/_kedge.lock``, which the kernel releases when the process
    ends, however it ends; the file says which process that is.  Where the file system has no locks,
    a live process of this host that the file names keeps others out.  A thread that holds the lock
    may take it again.

    Args:
        folder: made if it does not exist.

    Raises:
        ConfigError: another run holds it, or the folder cannot be written to.
    """

    _held: dict[Path, RunLock] = {}  # noqa: RUF012

    def __init__(self, folder: str | Path) -> None:
        self.file = Path(folder).expanduser().resolve() / LOCK
        self._handle, self._depth, self._thread = -1, 0, 0

    def __enter__(self) -> RunLock:
        held = self._held.get(self.file)
        if held is not None and held._thread == threading.get_ident():
            held._depth += 1
            return held
        self._acquire()
        self._depth, self._thread = 1, threading.get_ident()
        self._held[self.file] = self
        return self

    def __exit__(self, *_: object) -> None:
        held = self._held.get(self.file)
        if held is None:  # a fork
            return
        held._depth -= 1
        if not held._depth:
            del self._held[self.file]
            with contextlib.suppress(OSError):
                held.file.unlink()
            os.close(held._handle)

    def _acquire(self) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            while True:
                handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    if not _locked(handle):
                        raise ConfigError(self._refusal(_owner(handle)))
                    if _same_file(handle, self.file):  # else its last owner has just removed it
                        _write_owner(handle)
                        self._handle = handle
                        return
                except BaseException:
                    os.close(handle)
                    raise
                os.close(handle)
        except OSError as error:
            raise ConfigError(
                f"output_dir={str(self.file.parent)!r} cannot be written to ({error}); name"
                " another folder"
            ) from error

    def _refusal(self, owner: Mapping[str, Any]) -> str:
        who = "another run"
        if owner:
            who = (
                f"another run: process {owner.get('pid')} on {owner.get('host')}, since"
                f" {owner.get('since')}"
            )
        return (
            f"output_dir={str(self.file.parent)!r} is in use by {who}; wait for it, stop it, or"
            f" name another folder (if that process has ended, delete {self.file})"
        )


def _forget() -> None:
    """A forked process does not hold its parent's locks, nor keep them when the parent dies."""
    for lock in RunLock._held.values():
        with contextlib.suppress(OSError):
            os.close(lock._handle)
    RunLock._held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _locked(handle: int) -> bool:
    """Whether this process has the lock now."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "this system has no flock")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.debug("no file locks here: %s", error)
        return not _alive(_owner(handle))
    return True


def _alive(owner: Mapping[str, Any]) -> bool:
    """Whether the process that a lock file names runs on this host."""
    pid, started = owner.get("pid"), owner.get("started")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    return started is not None and _started(pid) == started


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None if it does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _same_file(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


def _owner(handle: int) -> dict[str, Any]:
    """What a lock file says; empty while it is being written."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write_owner(handle: int) -> None:
    pid = os.getpid()
    about = {
        "pid": pid,
        "host": socket.gethostname(),
        "started": _started(pid),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(about).encode(), 0)


# -- tables -----------------------------------------------------------------------------------


def write_jsonl(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object a line, in UTF-8; half a surrogate pair is written as its escape."""
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows as CSV; text that a spreadsheet would take for a formula begins with ``'``.

    Args:
        file: with ending .csv.
        rows: with the same keys.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8", errors="backslashreplace") as out:
        table = csv.writer(out)
        table.writerow([_cell(name) for name in rows[0]])
        table.writerows([[_cell(row.get(name)) for name in rows[0]] for row in rows])


def _cell(value: Any) -> Any:
    """OWASP, "CSV Injection": cells that begin with = + - @, tab or carriage return."""
    text = value if isinstance(value, str) else ""
    if text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(text):
        return f"'{text}"
    return value
