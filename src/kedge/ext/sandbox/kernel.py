"""System calls that confine the processes inside bubblewrap, and their filter.

The filter is in classic BPF.  A blocked call fails with EPERM (or ENOSYS, if callers should fall
back to an older one), so a program sees an OSError.  Numbers: asm/unistd_64.h for x86-64,
asm-generic/unistd.h for 64-bit ARM.  Loaded by path, with only the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from typing import Any

# name: number on x86-64, number on 64-bit ARM (None: not available)
REFUSED: dict[str, tuple[int, int | None]] = {
    # new processes and programs; threads go through clone, see below
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "setsid": (112, 157), "setpgid": (109, 154), "unshare": (272, 97), "setns": (308, 268),
    # access to other processes
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # sockets, except socket pairs within the process
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    # kernel memory without limits: larger socket buffers, sockets inside sockets, timers
    "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "timer_create": (222, 107), "inotify_init": (253, None), "inotify_init1": (294, 26),
    # calls that slow down disks or lock files
    "sync": (162, 81), "syncfs": (306, 267), "flock": (73, 32),
    # memory and queues that outlive a mapping or are not address space
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180),
    # mounts, and file access by other means than paths
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "open_tree": (428, 428), "move_mount": (429, 429), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "mknod": (133, None),
    "mknodat": (259, 33), "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225), "fanotify_init": (300, 262),
    # large kernel subsystems not needed by Python programs
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "splice": (275, 76),
    "vmsplice": (278, 75), "tee": (276, 77), "personality": (135, 92), "modify_ldt": (154, None),
    "lookup_dcookie": (212, 18),
    # control of the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setdomainname": (171, 162), "vhangup": (153, 58), "ioperm": (173, None), "iopl": (172, None),
}  # fmt: skip
CLONE, CLONE3, SOCKETPAIR, TGKILL = (56, 220), (435, 435), (53, 199), (234, 131)
FCNTL, FCNTL_REFUSED = (72, 25), (8, 10, 15, 1024, 1026, 1031)  # owners, leases, large pipes
NEWEST = 450  # newer calls and the x32 table appear unimplemented
CLONE_THREAD, AF_UNIX = 0x10000, 1

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF instructions
# offsets in struct seccomp_data
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def filter_program(machine: str, pid: int) -> bytes:
    """The filter for the process ``pid``, as an array of ``struct sock_filter``.

    The process may only signal its own threads.
    """
    if machine not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise OSError(f"the system-call filter supports {known}, got {machine}")
    audit, column = ARCHITECTURES[machine]
    refuse, missing = FAIL | errno.EPERM, FAIL | errno.ENOSYS
    code = [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER), (GREATER, 0, 1, NEWEST), (RETURN, 0, 0, missing),
        (EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, missing),
    ]  # fmt: skip
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, refuse)]
    for numbers, test, value in (
        (CLONE, ANY_BIT, CLONE_THREAD), (SOCKETPAIR, EQUAL, AF_UNIX), (TGKILL, EQUAL, pid),
    ):  # fmt: skip
        code += [
            (EQUAL, 0, 4, numbers[column]), (LOAD, 0, 0, FIRST_ARGUMENT),
            (test, 0, 1, value), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, refuse),
        ]  # fmt: skip
    refused = [(EQUAL, 0, 1, command) for command in FCNTL_REFUSED]
    body = [step for each in refused for step in (each, (RETURN, 0, 0, refuse))]
    code += [(EQUAL, 0, len(body) + 1, FCNTL[column]), (LOAD, 0, 0, SECOND_ARGUMENT), *body]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


NEW_IPC, NEW_PROCESSES = 0x08000000, 0x20000000
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND = 32, 4096
KEPT_FLAGS, RELATIVE_TIMES = 0xC0E, 4096  # flags of statvfs; mount() expects the second as 1 << 21
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
    """Mount devices that stay unchanged and a bounded folder, which bubblewrap cannot do.

    ``--remount-ro`` would make a device unusable, and without it a trainer that is root would lend
    the program its right to change the mode and times of the machine's devices.
    The folder, at first empty, holds up to ``megabytes`` in up to ``files`` files and folders.
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
    """Permanently drop all rights that this process does not need.

    Afterwards it has no privileges, can start no process and open no socket.
    """
    header = struct.pack("=Ii", CAPABILITIES_VERSION, 0)
    call("capset", header, bytes(24))  # effective, permitted and inheritable, two words each
    hide_memory()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    code = filter_program(platform.machine(), os.getpid())
    loaded = _Program(len(code) // 8, code)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(loaded))
