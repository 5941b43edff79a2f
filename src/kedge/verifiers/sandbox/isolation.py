"""Isolation of model-written programs: what they see, and how this machine enforces it.

One plan, enforced either by bubblewrap or by namespaces that the sandbox creates itself.  Without
either, programs run only with the weaker level "audit", on explicit request.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kedge.errors import ConfigError

logger = logging.getLogger(__name__)

LEVELS = ("bubblewrap", "namespaces", "audit")
FOLDER = Path(__file__).parent
CHILD = "child.py"
CODE, WORK = "/kedge-code", "/kedge-sandbox"  # paths in the sandbox that no machine uses
FLAGS = ("-s", "-S", "-B")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = (
    "/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", "/nix/store",
    "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The complete file-system view of the processes in a sandbox.

    Attributes:
        python: the interpreter.
        shown: files and folders, read-only, at their usual paths.
        hidden: folders inside ``shown`` that appear empty.
        devices: device files.
        packages: folders of installed packages that the program may import.
        folder: the working directory, initially empty.
    """

    python: str
    shown: tuple[str, ...]
    hidden: tuple[str, ...]
    devices: tuple[str, ...]
    packages: tuple[str, ...]
    folder: str = WORK


def make_plan(*, packages: bool) -> Plan:
    """The plan for this interpreter, with or without installed packages."""
    python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    runtime = [python, *(f"{sys.base_prefix}/{name}" for name in ("lib", "lib64"))]
    names = ("site-packages", "dist-packages")
    installed = [path for path in sys.path if Path(path).name in names and Path(path).is_dir()]
    within = Path(os.__file__).parent
    return Plan(
        python=python,
        shown=_outermost([*SYSTEM, *runtime, *(installed if packages else [])]),
        hidden=() if packages else tuple(str(within / n) for n in names if (within / n).is_dir()),
        devices=tuple(path for path in DEVICES if os.path.exists(path)),
        packages=tuple(installed) if packages else (),
    )


def _outermost(paths: list[str]) -> tuple[str, ...]:
    """The existing paths that are not inside another one."""
    existing = sorted({os.path.normpath(path) for path in paths if os.path.exists(path)})
    kept: list[str] = []
    for path in existing:
        if not any(path.startswith(f"{folder}/") for folder in kept):
            kept.append(path)
    return tuple(kept)


def command(level: str, plan: Plan) -> list[str]:
    """The command line of the sandbox's first process."""
    if level != "bubblewrap":
        return [plan.python, *FLAGS, str(FOLDER / CHILD)]
    line = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user"]
    line += ["--die-with-parent", "--new-session", "--as-pid-1", "--uid", "65534", "--gid", "65534"]
    line += ["--cap-add", "CAP_SYS_ADMIN"]  # to mount the working folder; dropped afterwards
    for path in plan.shown:
        line += ["--ro-bind", path, path]
    for path in plan.hidden:
        line += ["--tmpfs", path, "--remount-ro", path]
    for path in plan.devices:
        line += ["--dev-bind", path, path]
    line += ["--ro-bind", str(FOLDER), CODE, "--dir", WORK, "--remount-ro", "/"]
    return [*line, "--chdir", "/", plan.python, *FLAGS, f"{CODE}/{CHILD}"]


_chosen: dict[str, str] = {}  # requested level -> level that works here


def choose(level: str, attempt: Callable[[str], str]) -> str:
    """The isolation level for this machine, determined once per process.

    Args:
        level: one of ``LEVELS``, or ``auto``: the first kernel-enforced one that works.
        attempt: runs a program at a level; returns the error, or "".
    """
    if level == "audit":
        _warn_audit()
        return level
    if level not in _chosen:
        problems = []
        for candidate in LEVELS[:2] if level == "auto" else [level]:
            problem = _missing(candidate) or attempt(candidate)
            if not problem:
                _chosen[level] = candidate
                break
            problems.append(f"{candidate}: {problem}")
        else:
            raise ConfigError(_refusal(problems))
    return _chosen[level]


@functools.cache
def _warn_audit() -> None:
    logger.warning(
        'sandbox="audit": model-written programs run as your user, restricted only by a Python'
        " audit hook; a program that attacks the interpreter can read, write and delete your files,"
        " leave processes running, and use the network"
    )


def _missing(level: str) -> str:
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    return ""


def _refusal(problems: list[str]) -> str:
    return (
        "model-written programs cannot be isolated on this machine, so they are not run"
        f" ({'; '.join(problems)}). Install bubblewrap (apt-get install bubblewrap), allow user"
        " namespaces (sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000"
        " kernel.apparmor_restrict_unprivileged_userns=0; for Docker --security-opt"
        ' seccomp=unconfined), or pass code_verifier(sandbox="audit"), which stops accidents but'
        " not a program that attacks the interpreter to read and write your files"
    )
