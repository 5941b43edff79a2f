"""Attacks on the sandbox: none reads, writes, scores or outlives."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.ext.sandbox import DEVICES, _find_problem
from kedge.ext.sandbox.kernel import ARCHITECTURES
from kedge.records.errors import ConfigError
from kedge.verifiers import Sandbox, by_column, code_verifier
from tests.unit.sandbox_attacks import (
    ATTACKS,
    BATCH,
    BOMBS,
    ISOLATION,
    NUMBERS,
    ORDINARY,
    SCORES,
    STAYING,
    TESTS,
    WHY_NOT,
    YES,
)  # fmt: skip

isolated = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SECRET = "the user's own words"


class World:
    """Something of the user's that a program could read, write or reach; ``stack`` closes it."""

    def __init__(self, root: Path, attacks: dict[str, str], stack: contextlib.ExitStack) -> None:
        self.root, self.attacks, self.name = root, attacks, f"kx{os.getpid()}x{time.time_ns()}"
        for number, _ in enumerate(attacks):
            folder = root / str(number)
            (folder / "empty").mkdir(parents=True)
            (folder / "mark").write_text(SECRET)
            shutil.copy(self._database(), folder / "user.db")
        self.tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self.tcp.getsockname()[1]
        self.udp = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        self.udp.bind(("127.0.0.1", self.port))
        self.local, self.abstract = (
            stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)
        )
        self.local.bind(f"{root}/s")
        self.abstract.bind(f"\0{self.name}")
        for listener in (self.local, self.abstract):
            listener.listen()
        for listener in (self.tcp, self.udp, self.local, self.abstract):
            listener.setblocking(False)
        self.before = self.files()

    def _database(self) -> Path:
        import sqlite3

        path = self.root / "user.db"
        if not path.exists():
            with sqlite3.connect(path) as made:
                made.execute("create table t (x)")
                made.execute("insert into t values (?)", (SECRET,))
            made.close()
        return path

    def arguments(self) -> str:
        column = ARCHITECTURES[platform.machine()][1]
        attacks = {
            name: (body, str(self.root / str(number)))
            for number, (name, body) in enumerate(self.attacks.items())
        }
        return json.dumps({
            "numbers": {name: both[column] for name, both in NUMBERS.items()},
            "attacks": attacks, "parent": os.getpid(), "port": self.port,
            "local": f"{self.root}/s", "name": self.name,
        })  # fmt: skip

    def files(self) -> dict[str, Any]:
        found = {}
        for path in sorted(self.root.rglob("*")):
            state = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (state.st_mode, state.st_mtime_ns, state.st_nlink, content)
        return found

    def calls(self) -> list[str]:
        """Listeners that somebody reached."""
        reached = []
        for name in ("tcp", "udp", "local", "abstract"):
            listener = getattr(self, name)
            with contextlib.suppress(BlockingIOError):
                listener.recv(9) if name == "udp" else listener.accept()[0].close()
                reached.append(name)
        return reached


@pytest.fixture
def build_world(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], World]]:
    """Builds worlds whose sockets are closed even if the test fails."""
    with contextlib.ExitStack() as stack:
        yield lambda attacks: World(tmp_path, attacks, stack)


def read_results(output: str) -> dict[str, tuple[bool, str]]:
    lines = [json.loads(line) for line in output.splitlines()]
    return {name: (done, why) for name, done, why in lines}


@isolated
def test_attacks_get_nothing(
    build_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(ATTACKS) >= 40
    monkeypatch.setenv("KEDGE_SECRET", SECRET)
    sandbox, world = Sandbox(seconds=20.0), build_world(ATTACKS)
    devices = [Path(path).stat() for path in DEVICES]
    outcome = sandbox.run(BATCH, world.arguments())
    results = read_results(outcome.output)
    assert list(results) == list(ATTACKS), outcome  # none ended the process, none is missing
    assert {name: why for name, (done, why) in results.items() if done} == {}
    assert SECRET not in outcome.output
    assert world.files() == world.before
    assert [Path(path).stat() for path in DEVICES] == devices
    assert world.calls() == []
    assert not list(Path("/dev/shm").glob(f"*kx{os.getpid()}x*"))


def test_the_same_attacks_work_without_a_sandbox(
    tmp_path: Path, build_world: Callable[..., World]
) -> None:
    world = build_world(ORDINARY)
    (tmp_path / "cwd").mkdir()
    command = [sys.executable, "-S", "-W", "ignore", "-c", BATCH]
    done = subprocess.run(
        command, input=world.arguments(), cwd=tmp_path / "cwd", stdout=-1, text=True, check=True
    )
    results = read_results(done.stdout)
    failed = {name: why for name, (worked, why) in results.items() if not worked}
    assert list(results) == list(ORDINARY)
    if sys.version_info[:2] not in {(3, 11), (3, 12)}:  # other arguments, another module
        for name in ("fork_exec by a dotted name", "sub-interpreter"):
            failed.pop(name, None)
    assert failed == {}
    assert world.calls() == ["tcp", "udp", "local", "abstract"]


@isolated
def test_nothing_but_a_solution_scores() -> None:
    sandbox = Sandbox(seconds=2.0)
    passed = {name: sandbox.test(program, TESTS).passed for name, program in SCORES.items()}
    assert {name: got for name, got in passed.items() if any(got)} == {}
    right = YES + "def add(a, b): return a + b"
    assert sandbox.test(right, TESTS).passed == (True, False, False)
    known = sandbox.test(YES, ["assert 4 in Yes() and len(Yes()) == 42 and Yes() != Yes()"])
    assert known.passed == (True,), known


def test_the_prefix_says_what_is_a_function() -> None:
    claims = YES.replace("Yes", "add").replace(":\n", ":\n    __init__ = lambda *a: None\n", 1)
    prefix, sandbox = (
        "def add(a, b):\n    '''A sum.'''\n",
        Sandbox(seconds=2.0, isolation=ISOLATION),
    )
    assert not any(sandbox.test(claims, TESTS, entry_point="add", prefix=prefix).passed)


@isolated
def test_nothing_outlives_the_sandbox() -> None:
    sandbox = Sandbox(seconds=0.3)
    name = f"kx{time.time_ns() % 10**12}"
    head = (
        "import ctypes, os, signal, time\nC = ctypes.CDLL(None)\n"
        f"CLONE = {NUMBERS['clone'][ARCHITECTURES[platform.machine()][1]]}\n"
        f"C.prctl(15, b'{name}', 0, 0, 0)\n"
    )
    for program in STAYING.values():
        assert not any(sandbox.test(head + program, TESTS).passed)
    deadline = time.monotonic() + 5
    while (left := processes_named(name)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def processes_named(name: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it ended just now
            found += [str(path)] if path.read_text().strip() == name else []
    return found


@isolated
def test_bombs_meet_limits() -> None:
    sandbox = Sandbox(seconds=10.0, memory_mb=128)
    for what, (body, error) in BOMBS.items():
        inner = body.replace("\n", "\n    ")
        caught = f"import os\ntry:\n    {inner}\nexcept BaseException as e: print(type(e).__mro__)"
        outcome = sandbox.run(caught)
        assert error in outcome.output or outcome.stopped == "timeouts", what


def test_the_program_is_refused_where_nothing_isolates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("kedge.ext.sandbox._find_problem", _find_problem.__wrapped__)
    verify = code_verifier()
    truth = [{"tests": ["assert add(1, 2) == 3"]}]
    ways = "bwrap is not installed.*apt-get install bubblewrap.*serve-reward.*none"
    with pytest.raises(ConfigError, match=ways):
        verify(["def add(a, b): return a + b"], ground_truth=truth)
    with pytest.raises(ConfigError, match=ways):
        verify.prepare()
    with pytest.raises(ConfigError, match=ways):
        by_column().check(["gsm8k", "code"])
    by_column().check(["gsm8k"])
    weaker = code_verifier(sandbox="none")
    assert weaker(["def add(a, b): return a + b"], ground_truth=truth) == [1.0]
    with pytest.raises(ConfigError, match="isolation='audit' must be bubblewrap, or none"):
        code_verifier(sandbox="audit")


CONFINED = """
def confined():
    import ctypes, os, resource
    C = ctypes.CDLL(None)
    held = ctypes.create_string_buffer(24)
    C.capget(b"\\x22\\x05\\x08\\x20" + bytes(4), held)
    return {
        "dumpable": C.prctl(3), "seccomp": C.prctl(21),
        "no new privileges": C.prctl(39, 0, 0, 0, 0),
        "capabilities": any(held.raw), "user": os.getuid(), "process": os.getpid(),
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[1], "other": os.getppid(),
    }
"""  # fmt: skip


@isolated
def test_both_processes_are_confined() -> None:
    wanted = {
        "dumpable": 0, "seccomp": 2, "no new privileges": 1, "capabilities": False, "user": 65534,
        "process": 1, "processes": 64, "other": 0,
    }  # fmt: skip
    tests = [f"{CONFINED}\nassert confined() == {wanted}", f"assert candidate() == {wanted}"]
    outcome = Sandbox(seconds=20.0).test(CONFINED, tests, entry_point="confined")
    assert outcome.passed == (True, True), outcome


@isolated
def test_tests_share_the_folder_and_nothing_else() -> None:
    program = "open('own.py', 'w').write('x = 3')\ndef add(a, b): return a + b\n"
    tests = ["assert open('own.py').read() == 'x = 3'", "import own", "import os; os.fork()"]
    assert Sandbox(seconds=20.0).test(program, tests).passed == (True, False, False)


def test_a_garbage_line_is_a_failed_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen.communicate

    def garbage(*given: Any, **named: Any) -> tuple[bytes, bytes]:
        real(*given, **named)
        return b'\xff{]\n[1]\n"x"\n{"test": 0, "passed": true}\n', b""

    monkeypatch.setattr("subprocess.Popen.communicate", garbage)
    outcome = Sandbox(isolation="none").test("def add(a, b): return a + b", ["assert add(1, 2)"])
    assert (outcome.passed, outcome.stopped) == ((False,), "crashes")
