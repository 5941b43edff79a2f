"""Output folders and files: checks before work begins, run locks, tables."""

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
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kedge.records.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = "_kedge.lock"  # hub uploads skip "_*"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # no locks there
PICTURES = (".png", ".svg", ".pdf")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


# -- targets ----------------------------------------------------------------------------------


def check_folder(option: str, folder: str | Path) -> None:
    """Check that the folder of an option can be created and written to; nothing is left behind."""
    shown = f"{option}={str(folder)!r}"
    if not str(folder).strip():
        raise ConfigError(f"{shown} must name a folder; use '.' for the current one")
    try:
        path = Path(folder).expanduser().absolute()
        path.resolve()  # a loop of links
        if b"\0" in os.fsencode(path):
            raise ValueError("it contains a NUL")
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        if not existing.is_dir():
            raise ConfigError(f"{shown}: {existing} is a file; name another folder")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, or an unknown ~user
        raise ConfigError(f"{shown} cannot be written to ({error}); name another folder") from error


def check_file(option: str, file: str | Path) -> None:
    """Check that the file of an option can be created or replaced."""
    if not str(file).strip() or Path(file).is_dir():
        raise ConfigError(f"{option}={str(file)!r} must be a file, not a folder")
    check_folder(option, Path(file).parent)
    if Path(file).exists() and not os.access(file, os.W_OK):
        raise ConfigError(
            f"{option}={str(file)!r} is not writable for this user; name another file"
        )


def check_picture(option: str, file: str | Path) -> None:
    """Check that the file of an option can be written as a picture."""
    check_file(option, file)
    if Path(file).suffix not in PICTURES:
        raise ConfigError(f"{option}={str(file)!r} must end in {', '.join(PICTURES)}")


def check_model_folder(option: str, folder: str | Path, *, scalar: bool = False) -> None:
    """Check a folder of a model to be saved: it must not hold a model of another kind.

    ``scalar``: a reward or value model is saved, otherwise a language model.
    """
    check_folder(option, folder)
    try:
        config = json.loads((Path(folder).expanduser() / "config.json").read_text("utf-8"))
        (held,) = config["architectures"]
        other = ("Classification" in held) != scalar
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return  # nothing that could be loaded
    if other:
        raise ConfigError(
            f"{option}={str(folder)!r} holds another model ({held}), which would be overwritten;"
            " name another folder"
        )


def check_targets(args: Any, *, scalar: bool = False) -> None:
    """Check that the output folders of a trainer's arguments can be created and written to.

    ``scalar``: the trained model is a reward model.
    """
    if args.output_dir:
        check_model_folder("output_dir", args.output_dir, scalar=scalar)
    reports = args.report_to if isinstance(args.report_to, list) else [args.report_to]
    targets = {
        "save_rollouts": getattr(args, "save_rollouts", None),
        "logging_dir": (
            getattr(args, "logging_dir", None) if {"tensorboard", "all"} & set(reports) else None
        ),
    }
    for option, folder in targets.items():
        if folder:
            check_folder(option, folder)


# -- one run per folder -----------------------------------------------------------------------


@contextlib.contextmanager
def lock_output_dir(args: Any) -> Iterator[None]:
    """Context that locks ``output_dir``; every rank calls it, rank 0 locks."""
    from accelerate.utils import broadcast_object_list

    with contextlib.ExitStack() as stack:
        problem = None
        if args.output_dir and args.process_index == 0:
            try:
                stack.enter_context(RunLock(args.output_dir))
            except ConfigError as error:
                problem = str(error)
        if args.world_size > 1:
            (problem,) = broadcast_object_list([problem])
        if problem is not None:
            raise ConfigError(problem)
        yield


class RunLock:
    """Context manager that locks an output folder for one run.

    The lock is ``flock`` on ``FOLDER/_kedge.lock``, which the kernel releases when the process
    ends; the file names the process.  It is reentrant within a thread, and creates the folder.
    """

    _held: dict[Path, RunLock] = {}  # noqa: RUF012

    def __init__(self, folder: str | Path) -> None:
        self.file = Path(folder).expanduser().resolve() / LOCK
        self._handle, self._depth, self._thread = -1, 0, 0

    def __enter__(self) -> RunLock:
        lock = self._held.get(self.file)
        if lock is not None and lock._thread == threading.get_ident():
            lock._depth += 1
            return lock
        self._acquire()
        self._depth, self._thread = 1, threading.get_ident()
        self._held[self.file] = self
        return self

    def __exit__(self, *_: object) -> None:
        lock = self._held.get(self.file)
        if lock is None:  # after a fork
            return
        lock._depth -= 1
        if not lock._depth:
            del self._held[self.file]
            with contextlib.suppress(OSError):
                here = lock.file.stat() if lock.file.exists() else None
                if here is not None and os.path.samestat(os.fstat(lock._handle), here):
                    lock.file.unlink()
                else:
                    logger.warning(
                        "%s was moved or deleted while the run wrote to it: its contents began"
                        " after that",
                        lock.file.parent,
                    )
            os.close(lock._handle)

    def _acquire(self) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            while True:
                # Not through a link, which another user may have put into a shared folder.
                flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
                handle = os.open(self.file, flags, 0o666)
                try:
                    if not _try_lock(handle):
                        owner = os.pread(handle, 4096, 0).decode(errors="replace")
                        raise ConfigError(
                            f"output_dir={str(self.file.parent)!r} is in use by another run:"
                            f" {owner}; wait for it, stop it, or name another folder (if that"
                            f" process no longer runs, delete {self.file})"
                        )
                    with contextlib.suppress(FileNotFoundError):  # the previous owner removed it
                        if os.path.samestat(os.fstat(handle), self.file.stat()):
                            self._write_owner(handle)
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

    def _write_owner(self, handle: int) -> None:
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        os.ftruncate(handle, 0)
        os.pwrite(handle, owner.encode(), 0)
        self._handle = handle


def _close_after_fork() -> None:
    """Close the locks of the parent in a forked process, so that they end with the parent."""
    for lock in RunLock._held.values():
        with contextlib.suppress(OSError):
            os.close(lock._handle)
    RunLock._held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)


def _try_lock(handle: int) -> bool:
    """Try to lock the file; True also if the file system has no locks."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "this system has no flock")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("no locks here (%s): a second run in the folder is not noticed", error)
    return True


def share_weights(folder: Path) -> None:
    """Give weights the mode of other files: safetensors writes them for this user alone."""
    for other in [*folder.glob("*.json")][:1]:
        for file in folder.glob("*.safetensors"):
            with contextlib.suppress(OSError):  # not every file system has modes
                file.chmod(other.stat().st_mode & 0o777)


# -- tables -----------------------------------------------------------------------------------


def write_jsonl(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object per line in UTF-8; lone surrogates are escaped."""
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of the same keys; text that a spreadsheet would run as a formula gets a ``'``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8", errors="backslashreplace") as out:
        table = csv.writer(out)
        table.writerow([_cell(name) for name in rows[0]])
        table.writerows([[_cell(row.get(name)) for name in rows[0]] for row in rows])


def _cell(value: Any) -> Any:
    """Escape cells that start with = + - @, tab or carriage return (OWASP, "CSV Injection")."""
    text = value if isinstance(value, str) else ""
    if text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(text):
        return f"'{text}"
    return value
