"""Runs work that may hang in helper processes, which are killed on timeout.

Signals only work in the main thread, so separate Python processes, which exchange JSON lines, do
the work: this also works in threads, Ray actors and processes that hold a GPU, none of which can
fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kedge.records.errors import ConfigError
from kedge.verifiers.base import Unanswered

START_SECONDS = 120.0  # seconds for a worker to import its modules
_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    "from kedge.verifiers.worker import serve; serve(*json.loads(sys.argv[2]))"
)
Worker = subprocess.Popen  # with binary pipes


class WorkerPool:
    """Runs ``task``, a ``module:function``, in up to ``size`` helper processes; from any thread.

    Arguments and result are JSON values.  A call may take ``timeout`` seconds of wall clock, and a
    worker ``memory_mb`` of address space, on Linux.  Workers start on first use and are replaced
    after a kill.
    """

    def __init__(
        self, task: str, timeout: float, size: int = 1, memory_mb: int | None = None
    ) -> None:
        if timeout <= 0 or size < 1:
            raise ConfigError(f"timeout={timeout} and workers={size} must be greater than 0")
        self.task, self.timeout, self.size, self.memory_mb = task, timeout, size, memory_mb
        self._reset()

    def __reduce__(self) -> Any:
        return WorkerPool, (self.task, self.timeout, self.size, self.memory_mb)

    def _reset(self) -> None:
        self._owner, self._idle = os.getpid(), deque[Worker[bytes]]()
        self._places = threading.Semaphore(self.size)
        self._alive: set[Worker[bytes]] = set()
        weakref.finalize(self, _end_all, self._alive, self._owner)

    def call(self, *arguments: Any) -> Any:
        """Call ``function(*arguments)`` in a worker; raises Unanswered if it fails or dies."""
        if self._owner != os.getpid():  # forked processes must not use the parent's workers
            self._reset()
        with self._places:
            worker = self._idle.pop() if self._idle else self._start()
            if worker.poll() is not None:  # killed from outside while idle
                self._end(worker)
                worker = self._start()
            try:
                answer = _ask(worker, json.dumps(arguments), self.timeout)
            except BaseException:
                self._end(worker)
                raise
            self._idle.append(worker)
        if "raised" in answer:
            raise Unanswered("crashes", answer["raised"])
        return answer["result"]

    def _start(self) -> Worker[bytes]:
        options = json.dumps([self.task, self.timeout, self.memory_mb])
        worker = subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(sys.path), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._alive.add(worker)
        try:
            problem = _ask(worker, "", START_SECONDS).get("raised")
        except Unanswered as error:
            problem = str(error)
        if problem is not None:
            self._end(worker)
            raise ConfigError(f"the worker for {self.task} cannot start: {problem}")
        return worker

    def _end(self, worker: Worker[bytes]) -> None:
        self._alive.discard(worker)
        _end_all([worker], self._owner)


def _ask(worker: Worker[bytes], line: str, timeout: float) -> dict[str, Any]:
    """Send one line of JSON and return the answer."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    timer = threading.Timer(timeout, worker.kill)
    timer.start()
    data = b""
    try:
        with contextlib.suppress(OSError):  # the pipe may be broken
            worker.stdin.write(line.encode() + b"\n")
            worker.stdin.flush()
            data = worker.stdout.readline()
    finally:
        in_time = timer.is_alive()
        timer.cancel()
    if data.endswith(b"\n"):
        answer: dict[str, Any] = json.loads(data)
        return answer
    if in_time:
        raise Unanswered("crashes", "the worker died")
    raise Unanswered("timeouts", f"no answer after {timeout} s")


def _end_all(workers: Iterable[Worker[bytes]], owner: int) -> None:
    for worker in list(workers) if owner == os.getpid() else ():
        worker.kill()
        with contextlib.suppress(OSError):  # a dead process leaves input in the buffer
            worker.communicate()


def serve(task: str, timeout: float, memory_mb: int | None) -> None:
    """The main loop of a worker: answer one call of ``task`` per line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # keeps libraries' output out of the answers
    function: Callable[..., Any] | None = None
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        try:
            if function is None:  # the first line only checks that the worker is ready
                function = _load(task, memory_mb)
            else:  # ends a worker whose parent is gone, even inside C code
                faulthandler.dump_traceback_later(2 * timeout + 10, exit=True)
                answer["result"] = function(*json.loads(line))
        except Exception as error:
            answer["raised"] = f"{type(error).__name__}: {str(error)[:500]}"
        print(json.dumps(answer), file=answers, flush=True)
        faulthandler.cancel_dump_traceback_later()


def _load(task: str, memory_mb: int | None) -> Callable[..., Any]:
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    getattr(function, "prepare", object)()
    if memory_mb is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    return function
