"""Linux kernel isolation for the processes of the sandbox: system calls through ctypes.

``enter`` creates the namespaces if bubblewrap has not; the rest is the same at both levels.  Loaded
by path, with only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.verifiers.sandbox import seccomp
else:
    seccomp = sys.modules.get("sandbox_seccomp") or sys.modules["kedge.verifiers.sandbox.seccomp"]

NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CAPABILITIES_VERSION = 0x20080522
SYS_MOUNT_SETATTR, SYS_LANDLOCK = 442, 444  # and the next two; the same on all architectures
NOBODY = 65534
ROOT = "/proc"  # the new root is built here; no visible file is below it

_library = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library; raises OSError if it returns -1."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result: int = getattr(_library, name)(*words)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(*arguments: int) -> None:
    """Set an attribute of this process."""
    call("prctl", *arguments, *[0] * (5 - len(arguments)))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Hide this process's memory and open files from other processes of the same user."""
    prctl(PR_SET_DUMPABLE, 0)


# --- namespaces -----------------------------------------------------------------------------------


def enter(shown: Sequence[str], devices: Sequence[str], hidden: Sequence[str], folder: str) -> None:
    """Continue in a child process with separate namespaces, as an unprivileged user.

    Args:
        shown: files and folders of the new, read-only root.
        devices: its device files.
        hidden: folders below ``shown`` that appear empty.
        folder: the empty working directory.
    """
    user, group = os.geteuid(), os.getegid()
    spaces = NEW_USER | NEW_MOUNTS | NEW_PROCESSES | NEW_NETWORK | NEW_IPC | NEW_NAMES
    call("unshare", spaces)
    die_with_parent()  # after unshare, which resets it
    for name, text in (
        ("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")
    ):  # fmt: skip
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    _build_root(shown, devices, hidden, folder)
    exit_with_child()
    die_with_parent()


def make_folder(folder: str, megabytes: int, files: int) -> None:
    """Change to an empty, temporary folder with limits on size and number of files."""
    options = f"size={megabytes}m,nr_inodes={files},mode=700"
    _mount("tmpfs", folder, "tmpfs", NO_SETUID | NO_DEVICES | NO_EXEC, options)
    os.chdir(folder)
    call("sethostname", b"sandbox", 7)


def leave() -> None:
    """Continue in a child process that cannot see the existing processes of the sandbox."""
    call("unshare", NEW_PROCESSES | NEW_IPC)
    exit_with_child()


def exit_with_child() -> None:
    """Fork; the parent waits and exits with the child's status."""
    child = os.fork()
    if child:
        for fd in (0, 1, 2):
            os.close(fd)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


def _build_root(
    shown: Sequence[str], devices: Sequence[str], hidden: Sequence[str], folder: str
) -> None:
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", ROOT, "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,mode=755")
    for path in (*shown, *devices):
        target = ROOT + path
        if os.path.isdir(path):
            os.makedirs(target)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(path, target, None, BIND | RECURSIVE)
        flags = READ_ONLY | NO_SETUID | (NO_EXEC if path in devices else NO_DEVICES)
        _restrict(target, flags, AT_RECURSIVE)
    for path in hidden:
        _mount("tmpfs", ROOT + path, "tmpfs", READ_ONLY | NO_SETUID | NO_DEVICES, "size=4k")
    os.makedirs(ROOT + folder)
    _restrict(ROOT, READ_ONLY, 0)
    os.chdir(ROOT)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    try:
        call("mount", *texts, flags, options.encode())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({source or kind} on {target})") from None


def _restrict(path: str, flags: int, how: int) -> None:
    attributes = struct.pack("=4Q", flags, 0, 0, 0)
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), how, attributes, len(attributes))


# --- limits of a process --------------------------------------------------------------------------


def confine(folder: str) -> None:
    """Permanently drop everything that this process does not need.

    Afterwards it has no privileges, can start no process and open no socket, and can write only to
    ``folder``.
    """
    header = struct.pack("=Ii", CAPABILITIES_VERSION, 0)
    call("capset", header, bytes(24))  # effective, permitted and inheritable, two words each
    hide_memory()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _landlock(folder)
    seccomp.install(prctl, os.getpid())


WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
REMOVE, MAKE_FILE, MAKE_LINK = 1 << 4 | 1 << 5, 1 << 7 | 1 << 8, 1 << 12
TRUNCATE = 1 << 14
# Number of rights in versions 1 to 6 of Landlock: files, TCP ports, scopes.
FILES, PORTS, SCOPES = (13, 14, 15, 15, 16, 16), (0, 0, 0, 2, 2, 2), (0, 0, 0, 0, 0, 2)


def _landlock(folder: str) -> None:
    """Enforce the file rules by path as well, in case a mount is wrong."""
    version = _library.syscall(ctypes.c_long(SYS_LANDLOCK), None, ctypes.c_long(0), 1)
    if version < 1:
        return  # the kernel does not support Landlock
    version_index = min(version, len(FILES)) - 1
    handled = [(1 << kinds[version_index]) - 1 for kinds in (FILES, PORTS, SCOPES)]
    rules = struct.pack("=3Q", *handled)[: 8 * (1 + bool(handled[1]) + bool(handled[2]))]
    ruleset = call("syscall", SYS_LANDLOCK, rules, len(rules), 0)
    work_rights = WRITE_FILE | READ_FILE | READ_DIR | REMOVE | MAKE_FILE | MAKE_LINK | TRUNCATE
    for path, rights in (("/", READ_FILE | READ_DIR), ("/dev", WRITE_FILE), (folder, work_rights)):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights & handled[0], opened)
        call("syscall", SYS_LANDLOCK + 1, ruleset, 1, rule, 0)
        os.close(opened)
    call("syscall", SYS_LANDLOCK + 2, ruleset, 0)
    os.close(ruleset)
