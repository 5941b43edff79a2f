"""Helper processes with a time limit."""

from __future__ import annotations

import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kedge.errors import ConfigError
from kedge.verifiers.base import Unanswered
from kedge.verifiers.worker import WorkerPool


def test_results_and_errors_in_threads_and_after_a_pickle() -> None:
    pool = pickle.loads(pickle.dumps(WorkerPool("math:isqrt", timeout=30, size=2)))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(pool.call, range(8))) == [0, 1, 1, 1, 2, 2, 2, 2]
    with pytest.raises(Unanswered, match="ValueError"):
        pool.call(-1)
    assert pool.call(16) == 4
    workers = list(pool._alive)
    assert 1 <= len(workers) <= 2
    del pool
    assert all(worker.returncode is not None for worker in workers)


def test_a_task_that_hangs_is_killed_and_the_next_one_answered() -> None:
    pool = WorkerPool("time:sleep", timeout=2.0)
    assert pool.call(0) is None
    began = time.perf_counter()
    with pytest.raises(Unanswered) as caught:
        pool.call(100)
    assert caught.value.kind == "timeouts"
    assert time.perf_counter() - began < 30
    assert pool.call(0) is None


def test_a_worker_that_dies_is_replaced() -> None:
    pool = WorkerPool("os:kill", timeout=30)
    parent = os.getpid()
    pool.call(parent, 0)
    (worker,) = pool._alive
    with pytest.raises(Unanswered) as caught:
        pool.call(worker.pid, int(signal.SIGKILL))
    assert caught.value.kind == "crashes"
    pool.call(parent, 0)
    (worker,) = pool._alive
    worker.kill()  # while idle
    worker.wait()
    assert pool.call(parent, 0) is None


def test_memory_is_limited_and_what_a_task_prints_is_no_answer() -> None:
    with pytest.raises(Unanswered, match="MemoryError"):
        WorkerPool("builtins:bytearray", timeout=30, memory_mb=512).call(1 << 31)
    assert WorkerPool("builtins:print", timeout=30).call('{"result": 1}') is None


@pytest.mark.parametrize("task", ["no_such_module:f", "math:no_such_function"])
def test_a_worker_that_cannot_start_is_an_error(task: str) -> None:
    with pytest.raises(ConfigError, match=task):
        WorkerPool(task, timeout=1).call()
    with pytest.raises(ConfigError, match="timeout=0"):
        WorkerPool("math:isqrt", timeout=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_starts_its_own_workers() -> None:
    pool = WorkerPool("os:getppid", timeout=30)
    assert pool.call() == os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if pool.call() == os.getpid() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.call() == os.getpid()
