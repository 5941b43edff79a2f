"""A seccomp filter in classic BPF: the system calls that the sandbox blocks.

A blocked call fails with EPERM (or ENOSYS, if callers should fall back to an older one), so a
program sees an OSError.  Numbers: asm/unistd_64.h for x86-64, asm-generic/unistd.h for 64-bit ARM.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Callable

# name: number on x86-64, number on 64-bit ARM (None: it does not exist there)
REFUSED: dict[str, tuple[int, int | None]] = {
    # new processes and programs; threads go through clone, see below
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "setsid": (112, 157), "setpgid": (109, 154), "unshare": (272, 97), "setns": (308, 268),
    # other processes
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # sockets, except socket pairs within the process
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    # kernel memory that no limit counts: larger socket buffers, sockets inside sockets, timers
    "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "timer_create": (222, 107), "inotify_init": (253, None), "inotify_init1": (294, 26),
    # what slows down the machine's disks, and locks on its files
    "sync": (162, 81), "syncfs": (306, 267), "flock": (73, 32),
    # memory and queues that outlive a mapping or do not count as address space
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180),
    # mounts, and file access other than by path
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "open_tree": (428, 428), "move_mount": (429, 429), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "mknod": (133, None),
    "mknodat": (259, 33), "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225), "fanotify_init": (300, 262),
    # large kernel subsystems that no Python program needs
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "splice": (275, 76),
    "vmsplice": (278, 75), "tee": (276, 77), "personality": (135, 92), "modify_ldt": (154, None),
    "lookup_dcookie": (212, 18),
    # the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setdomainname": (171, 162), "vhangup": (153, 58), "ioperm": (173, None), "iopl": (172, None),
}  # fmt: skip
CLONE, CLONE3, SOCKETPAIR, TGKILL = (56, 220), (435, 435), (53, 199), (234, 131)
FCNTL, FCNTL_REFUSED = (72, 25), (8, 10, 15, 1024, 1026, 1031)  # owners, leases, large pipes
NEWEST = 450  # later calls and the x32 table appear as not implemented
CLONE_THREAD, AF_UNIX = 0x10000, 1

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # instructions of BPF
# offsets in struct seccomp_data
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def program(machine: str, pid: int) -> bytes:
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


def install(prctl: Callable[..., None], pid: int) -> None:
    """Permanently filter the system calls of this thread and its children."""
    code = program(platform.machine(), pid)
    loaded = _Program(len(code) // 8, code)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(loaded), 0, 0)
