"""System calls that the processes inside bubblewrap make to confine themselves further.

Loaded by path, with only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.verifiers.sandbox import seccomp
else:
    seccomp = sys.modules.get("sandbox_seccomp") or sys.modules["kedge.verifiers.sandbox.seccomp"]

NEW_IPC, NEW_PROCESSES = 0x08000000, 0x20000000
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND = 32, 4096
KEPT_FLAGS, RELATIVE_TIMES = 0xC0E, 4096  # of statvfs; mount() wants the second one as 1 << 21
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
CAPABILITIES_VERSION = 0x20080522

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


def hide_memory() -> None:
    """Hide this process's memory and open files from other processes of the same user."""
    prctl(PR_SET_DUMPABLE, 0)


def finish_mounts(devices: Sequence[str], folder: str, megabytes: int, files: int) -> None:
    """Mount what bubblewrap cannot express: devices that stay as they are, and a bounded folder.

    ``--remount-ro`` would make a device unusable, and without it a trainer that is root would lend
    the program its right to change the mode and times of the machine's devices.

    Args:
        devices: device files; they stay usable.
        folder: the working directory, empty.
        megabytes: size of its contents.
        files: number of files and folders in it.
    """
    for path in devices:
        held = os.statvfs(path).f_flag
        flags = held & KEPT_FLAGS | (1 << 21 if held & RELATIVE_TIMES else 0)
        call("mount", None, path.encode(), None, flags | REMOUNT | BIND | READ_ONLY, None)
    options = f"size={megabytes}m,nr_inodes={files},mode=700".encode()
    flags = NO_SETUID | NO_DEVICES | NO_EXEC
    call("mount", b"tmpfs", folder.encode(), b"tmpfs", flags, options)
    os.chdir(folder)


def leave() -> None:
    """Continue in a child process that cannot see the existing processes of the sandbox."""
    call("unshare", NEW_PROCESSES | NEW_IPC)
    child = os.fork()
    if child:
        for fd in (0, 1, 2):
            os.close(fd)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


def confine() -> None:
    """Permanently drop everything that this process does not need.

    Afterwards it has no privileges, can start no process and open no socket.
    """
    header = struct.pack("=Ii", CAPABILITIES_VERSION, 0)
    call("capset", header, bytes(24))  # effective, permitted and inheritable, two words each
    hide_memory()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(prctl, os.getpid())
