"""Runs work that may hang in helper processes, which are killed on timeout.

Signals only work in the main thread, and nothing inside a process can interrupt a regular
expression.  So separate Python processes, which talk in lines of JSON, do the work: this also works
in threads, Ray actors and processes that hold a GPU, none of which can fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kedge.errors import ConfigError
from kedge.verifiers.base import Unanswered

START_SECONDS = 120.0  # for a worker to import its modules
_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    "from kedge.verifiers.worker import serve; serve(*json.loads(sys.argv[2]))"
)


class TaskError(Exception):
    """The task raised in the worker.

    Args:
        kind: name of the exception's class.
        detail: its message.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class WorkerPool:
    """Runs one function in helper processes with a time limit; callable from any thread.

    Workers start on first use and are replaced after a kill.

    Args:
        task: ``module:function``; arguments and result are JSON values.
        timeout: seconds of wall clock for one call.
        size: maximum number of workers.
        memory_mb: address-space limit of a worker, on Linux.
    """

    def __init__(
        self, task: str, *, timeout: float, size: int = 1, memory_mb: int | None = None
    ) -> None:
        if timeout <= 0 or size < 1:
            raise ConfigError(f"timeout={timeout} and workers={size} must be greater than 0")
        self.task, self.timeout, self.size, self.memory_mb = task, timeout, size, memory_mb
        self._reset()
        weakref.finalize(self, _end_all, self._alive)

    def __reduce__(self) -> Any:
        return _make_pool, (self.task, self.timeout, self.size, self.memory_mb)

    def call(self, *arguments: Any) -> Any:
        """``function(*arguments)``.

        Raises:
            Unanswered: the call timed out, or the worker died (memory, a crash).
            TaskError: the function raised.
            ConfigError: the worker cannot start.
        """
        if self._owner != os.getpid():  # after a fork the workers belong to the parent
            self._reset()
        with self._places:
            worker = self._acquire()
            try:
                answer = worker.ask(arguments, self.timeout)
            except BaseException:
                worker.end()
                self._alive.discard(worker)
                raise
            self._idle.put(worker)
        if "raised" in answer:
            raise TaskError(*answer["raised"])
        return answer["result"]

    def _acquire(self) -> _Worker:
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                worker = _Worker(self.task, self.timeout, self.memory_mb)
                self._alive.add(worker)
                return worker
            if worker.process.poll() is None:
                return worker
            worker.end()  # it was killed from outside while idle
            self._alive.discard(worker)

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._places = threading.Semaphore(self.size)
        self._alive: set[_Worker] = getattr(self, "_alive", set())
        self._alive.clear()


def _make_pool(task: str, timeout: float, size: int, memory_mb: int | None) -> WorkerPool:
    return WorkerPool(task, timeout=timeout, size=size, memory_mb=memory_mb)


def _end_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.end()


class _Worker:
    def __init__(self, task: str, timeout: float, memory_mb: int | None) -> None:
        options = json.dumps([task, timeout, memory_mb])
        self._owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(sys.path), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="kedge-worker", daemon=True).start()
        try:
            ready = self._line(START_SECONDS)
        except Unanswered as error:
            self.end()
            raise ConfigError(f"the worker for {task} did not start: {error}") from error
        if "failed" in ready:
            self.end()
            raise ConfigError(f"the worker for {task} cannot start: {ready['failed']}")

    def ask(self, arguments: tuple[Any, ...], timeout: float) -> dict[str, Any]:
        stream = self.process.stdin
        assert stream is not None
        try:
            stream.write(json.dumps(arguments).encode() + b"\n")
            stream.flush()
        except OSError as error:
            raise Unanswered("crashes", "the worker died") from error
        return self._line(timeout)

    def end(self) -> None:
        if self._owner != os.getpid():
            return
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # input buffered for a dead process
                if stream is not None:
                    stream.close()

    def _line(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise Unanswered("timeouts", f"no answer after {timeout} s") from None
        if not line.endswith(b"\n"):
            raise Unanswered("crashes", "the worker died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        while line := _next_line(stream.readline):
            self._lines.put(line)
        self._lines.put(b"")


def _next_line(readline: Callable[[], bytes]) -> bytes:
    try:
        return readline()
    except (OSError, ValueError):  # closed while reading
        return b""


def serve(task: str, timeout: float, memory_mb: int | None) -> None:
    """The main loop of a worker: answer calls of ``task`` from standard input until EOF."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries must not mix with answers
    try:
        module, _, name = task.partition(":")
        function = getattr(importlib.import_module(module), name)
        prepare = getattr(function, "prepare", None)
        if prepare is not None:
            prepare()
    except Exception as error:
        _write(answers, {"failed": f"{type(error).__name__}: {error}"})
        return
    _limit_memory(memory_mb)
    _write(answers, {"ready": True})
    for line in requests:
        _alarm(2 * timeout + 10)  # ends a worker whose parent is gone
        _write(answers, _answer(function, json.loads(line)))
        _alarm(0)


def _answer(function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"result": function(*arguments)}
    except Exception as error:
        return {"raised": [type(error).__name__, str(error)[:500]]}


def _write(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def _limit_memory(memory_mb: int | None) -> None:
    if memory_mb is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))


def _alarm(seconds: float) -> None:
    if hasattr(os, "fork"):
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills even inside C code
        signal.setitimer(signal.ITIMER_REAL, seconds)
