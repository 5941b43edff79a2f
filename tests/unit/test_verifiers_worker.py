"""Helper processes with a time limit."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kedge.errors import ConfigError
from kedge.verifiers.base import Unanswered
from kedge.verifiers.worker import TaskError, WorkerPool


def test_results_errors_and_limits() -> None:
    pool = WorkerPool("math:isqrt", timeout=30)
    assert pool.call(17) == 4
    with pytest.raises(TaskError, match="ValueError"):
        pool.call(-1)
    assert pool.call(16) == 4


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
    (parent,) = {os.getpid()}
    pool.call(parent, 0)
    (worker,) = pool._alive
    with pytest.raises(Unanswered) as caught:
        pool.call(worker.process.pid, int(signal.SIGKILL))
    assert caught.value.kind == "crashes"
    pool.call(parent, 0)
    (worker,) = pool._alive
    worker.process.kill()  # while idle
    worker.process.wait()
    assert pool.call(parent, 0) is None


def test_memory_is_limited() -> None:
    pool = WorkerPool("builtins:bytearray", timeout=30, memory_mb=512)
    with pytest.raises(TaskError, match="MemoryError"):
        pool.call(1 << 31)


def test_what_a_task_prints_is_no_answer() -> None:
    assert WorkerPool("builtins:print", timeout=30).call('{"result": 1}') is None


@pytest.mark.parametrize("task", ["no_such_module:f", "math:no_such_function"])
def test_a_worker_that_cannot_start_is_an_error(task: str) -> None:
    with pytest.raises(ConfigError, match=task):
        WorkerPool(task, timeout=1).call()


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="timeout=0"):
        WorkerPool("math:isqrt", timeout=0)


def test_workers_run_side_by_side_and_no_more_than_size() -> None:
    pool = WorkerPool("time:sleep", timeout=30, size=2)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: pool.call(0.05), range(8)))
    assert 1 <= len(pool._alive) <= 2


def test_works_in_a_thread_and_after_a_pickle() -> None:
    found: list[int] = []
    pool = pickle.loads(pickle.dumps(WorkerPool("math:isqrt", timeout=30)))
    thread = threading.Thread(target=lambda: found.append(pool.call(9)))
    thread.start()
    thread.join()
    assert found == [3]


def test_workers_end_with_their_pool() -> None:
    pool = WorkerPool("math:isqrt", timeout=30)
    pool.call(4)
    (worker,) = pool._alive
    del pool
    assert worker.process.returncode is not None


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
