"""Weights that are stored once for several engines: files for the servers of a machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from kedge.rollout.vllm.weight_payload import WeightPayload, shared_memory

T = TypeVar("T")
_PREFIX = "kedge-weights-"
_NEW = 60.0  # seconds


class StoredOnce(Generic[T]):
    """Stores weights for the first of several readers; forgets them after the last.

    Args:
        readers: number of engines that load each set of weights.
        put: stores weights, which stay stored as long as its result exists.
    """

    def __init__(self, readers: int, put: Callable[[WeightPayload], T]) -> None:
        self._readers, self._put = readers, put
        self._lock = threading.Lock()
        self._payload = WeightPayload(())
        self._stored: Future[T] | None = None
        self._left = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight store")

    def store(self, payload: WeightPayload) -> T:
        """The stored weights; the same for the same ``WeightPayload.weights``."""
        return self.begin(payload).result()

    def begin(self, payload: WeightPayload) -> Future[T]:
        """``store`` in the background, during which the weights must not change."""
        with self._lock:
            if self._stored is None or payload.weights is not self._payload.weights:
                self._stored = self._thread.submit(self._put, payload)
                self._payload, self._left = payload, self._readers
            self._left -= 1
            stored = self._stored
            if self._left == 0:
                self._payload, self._stored = WeightPayload(()), None
            return stored


class WeightFolder:
    """A folder that is deleted with this object, or at the end of the process.

    A process that is killed leaves its folders, perhaps with a policy in shared memory; the next
    one that makes a folder in the same place deletes them.  Its owner holds a lock on each.

    Args:
        parent: folder of the folder; None: this machine's shared memory, or its temporary folder.
    """

    def __init__(self, parent: str | None = None) -> None:
        parent = parent or shared_memory() or tempfile.gettempdir()
        _delete_abandoned(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.delete = weakref.finalize(self, _delete, self.path, self._lock)


def _delete(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _delete_abandoned(parent: Path) -> None:
    """Delete folders of this user on which no process holds a lock."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            about = folder.stat()
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # deleted meanwhile, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A new folder is not locked yet.
            if about.st_uid == os.getuid() and time.time() - about.st_mtime > _NEW:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, or on a file system without locks
            pass
        finally:
            os.close(lock)


class WeightFiles(StoredOnce[WeightFolder]):
    """Weights of the servers of a machine; see ``StoredOnce`` and ``WeightFolder``."""

    def __init__(self, readers: int = 1, parent: str | None = None) -> None:
        def put(payload: WeightPayload) -> WeightFolder:
            folder = WeightFolder(parent)
            try:
                payload.write(folder.path)
            except BaseException:
                folder.delete()
                raise
            return folder

        super().__init__(readers, put)
