"""What the sandbox's audit hook refuses, and what every level allows."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kedge.verifiers import Sandbox

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the sandbox needs fork")

TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
AUDIT = Sandbox(seconds=1.0, isolation="audit")


# What the audit hook alone refuses; see test_sandbox_attacks.py for what the kernel refuses.
REFUSED = {
    "read a file": "open('/etc/passwd').read()",
    "read memory": "open('/proc/self/mem', 'rb')",
    "read by descriptor": "import os; os.open('/etc/hostname', os.O_RDONLY)",
    "read by link": "import os; os.symlink('/etc/passwd', 'x'); open('x').read()",
    "list a folder": "import os; os.listdir('/')",
    "write outside": "open('/tmp/kedge-escape', 'w').write('x')",
    "write by path": "import pathlib; pathlib.Path('../kedge-escape').write_text('x')",
    "delete": "import os; os.remove(MARK)",
    "delete a tree": "import shutil; shutil.rmtree(os.path.dirname(MARK))",
    "rename": "import os; os.rename(MARK, 'x')",
    "make a folder": "import os; os.mkdir('/tmp/kedge-escape-folder')",
    "change folder": "import os; os.chdir('/')",
    "run a program": "import subprocess; subprocess.run(['true'], check=True)",
    "run a shell": "import os; assert os.system('true') == 0",
    "fork": "import os; os.fork()",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "spawn": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "a process": "import multiprocessing as m; p = m.Process(target=print); p.start()",
    "kill": "import os; os.kill(PARENT, 0)",
    "kill all": "import os; os.kill(-1, 9)",
    "a socket": "import socket; socket.socket()",
    "connect": "import socket; socket.create_connection(('127.0.0.1', PORT), timeout=5)",
    "resolve": "import socket; socket.getaddrinfo('localhost', 80)",
    "ctypes": "import ctypes",
    "ctypes again": "import sys; import _ctypes",
    "lift the limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "leave the group": "import os; os.setsid()",
    "big file": "open('x', 'wb').write(bytes(100 << 20))",
    "many files": "[open(f'f{i}', 'w').close() for i in range(1000)]",
    "many folders": "import os\nfor i in range(1000):\n    os.mkdir('d'); os.chdir('d')",
    "reach the guard": "try:\n    open('/etc/passwd')\nexcept PermissionError as e:\n"
    "    e.__traceback__.tb_next.tb_frame.f_locals",
    "replace the guard's tools": "import os, builtins, posixpath\n"
    "builtins.any = builtins.all = lambda *a: True\n"
    "posixpath.realpath = os.path.realpath = lambda p, **k: '.'\nos.fsdecode = lambda p: '.'\n"
    "import sys; sys._getframe(2).f_globals.clear()\nopen('/etc/passwd')",
    "a path of one's own": "class P(str):\n    def startswith(self, *a): return True\n"
    "    split = lambda self, x: []\nimport os; os.open(P('/etc/passwd'), 0)",
    "a database": "import sqlite3; sqlite3.connect('/tmp/kedge-escape')",
    "an extension": "import importlib.machinery as m, importlib.util as u, shutil, _struct\n"
    "shutil.copy(getattr(_struct, '__file__', '') or 'missing', 'own.so')\n"
    "u.module_from_spec(u.spec_from_file_location('own', 'own.so'))",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory as M; M(size=9)",
    "fresh posix": "import sys; del sys.modules['posix']; import posix; posix.setsid()",
    "frames": "import gc; gc.get_objects()",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("still here")
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        port = listener.getsockname()[1]
        head = f"import os\nMARK, PARENT, PORT = {str(mark)!r}, {os.getpid()}, {port}\n"
        body = REFUSED[what].replace("\n", "\n    ")
        program = f"{head}def add(a, b):\n    {body}\n    return a + b\n"
        outcome = AUDIT.test(program, TESTS)
    assert not any(outcome.passed), what
    assert outcome.error
    assert mark.read_text() == "still here"
    assert not Path("/tmp/kedge-escape").exists()
    assert not Path("/tmp/kedge-escape-folder").exists()


@pytest.mark.parametrize(
    "body",
    [
        "import math, collections, itertools, functools, re, heapq, bisect, string, random",
        "import hashlib; hashlib.md5(b'x').hexdigest()",
        "import datetime, decimal, fractions, statistics, json, typing, dataclasses, enum",
        "open('x', 'w').write('1'); assert open('x').read() == '1'",
        "import tempfile; tempfile.TemporaryFile().write(b'x')",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "import threading; t = threading.Thread(target=len, args=('',)); t.start(); t.join()",
        "import sys; sys.setrecursionlimit(5000)",
        "from dataclasses import dataclass\n    @dataclass\n    class P: x: int\n    P(1)",
        "from collections import namedtuple; namedtuple('P', 'x')(1)",
        "print('x' * 10_000_000)",
        "import numbers, code; assert numbers.Number and code.interact",
        "import zoneinfo, calendar, unicodedata, copy, operator",
    ],
)
def test_allowed(body: str) -> None:
    outcome = Sandbox().test(f"def add(a, b):\n    {body}\n    return a + b\n", TESTS)
    assert outcome.passed == (True, True), outcome.error
