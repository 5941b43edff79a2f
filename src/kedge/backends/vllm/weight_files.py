"""Weights that are stored once for several engines: files for the servers of a machine."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from kedge.backends.vllm.weight_payload import WeightPayload, shared_memory

T = TypeVar("T")


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
    """A folder with weights, which is deleted with this object, or at the end of the process.

    Args:
        parent: folder of the folder; None: this machine's shared memory, or its temporary folder.
    """

    def __init__(self, parent: str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="kedge-weights-", dir=parent or shared_memory()))
        self.delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


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
