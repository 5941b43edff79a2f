"""Runs work that may hang in helper processes, which are killed on timeout.

Signals only work in the main thread, so separate Python processes, which talk in lines of JSON, do
the work: this also works in threads, Ray actors and processes that hold a GPU, none of which can
fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
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
    """The task raised in the worker; the message has the class and the text of the exception."""


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
        self, task: str, timeout: float, size: int = 1, memory_mb: int | None = None
    ) -> None:
        if timeout <= 0 or size < 1:
            raise ConfigError(f"timeout={timeout} and workers={size} must be greater than 0")
        self.task, self.timeout, self.size, self.memory_mb = task, timeout, size, memory_mb
        self._alive: set[_Worker] = set()
        self._reset()
        weakref.finalize(self, _end_all, self._alive)

    def __reduce__(self) -> Any:
        return WorkerPool, (self.task, self.timeout, self.size, self.memory_mb)

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
                answer = worker.ask(json.dumps(arguments), self.timeout)
            except BaseException:
                self._drop(worker)
                raise
            self._idle.append(worker)
        if "raised" in answer:
            raise TaskError(answer["raised"])
        return answer["result"]

    def _acquire(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            self._drop(worker)  # it was killed from outside while idle
        worker = _Worker(self.task, self.timeout, self.memory_mb)
        self._alive.add(worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.end()
        self._alive.discard(worker)

    def _reset(self) -> None:
        self._owner, self._idle = os.getpid(), deque[_Worker]()
        self._places = threading.Semaphore(self.size)
        self._alive.clear()


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
        try:
            problem = self.ask("", START_SECONDS).get("raised")
        except Unanswered as error:
            problem = str(error)
        if problem is not None:
            self.end()
            raise ConfigError(f"the worker for {task} cannot start: {problem}")

    def ask(self, line: str, timeout: float) -> dict[str, Any]:
        """The answer to one line of JSON."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        data = b""
        try:
            with contextlib.suppress(OSError):  # a broken pipe
                stdin.write(line.encode() + b"\n")
                stdin.flush()
                data = stdout.readline()
        finally:
            in_time = timer.is_alive()
            timer.cancel()
        if data.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(data)
            return answer
        if in_time:
            raise Unanswered("crashes", "the worker died")
        raise Unanswered("timeouts", f"no answer after {timeout} s")

    def end(self) -> None:
        if self._owner != os.getpid():
            return
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # input buffered for a dead process
                if stream is not None:
                    stream.close()


def serve(task: str, timeout: float, memory_mb: int | None) -> None:
    """The main loop of a worker: answer one call of ``task`` per line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries must not mix with answers
    function: Callable[..., Any] | None = None
    for line in sys.stdin:
        _alarm(2 * timeout + 10 if function else 0)  # ends a worker whose parent is gone
        try:
            if function is None:  # the first line only asks whether the worker is ready
                function, answer = _load(task, memory_mb), {}
            else:
                answer = {"result": function(*json.loads(line))}
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {str(error)[:500]}"}
        print(json.dumps(answer), file=answers, flush=True)
        _alarm(0)


def _load(task: str, memory_mb: int | None) -> Callable[..., Any]:
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    getattr(function, "prepare", object)()
    if memory_mb is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    return function


def _alarm(seconds: float) -> None:
    if hasattr(os, "fork"):
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills even inside C code
        signal.setitimer(signal.ITIMER_REAL, seconds)
