"""Weights in files, for the vLLM servers of a machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path

from kedge.rollout.vllm.weight_payload import WeightPayload, shared_memory

_PREFIX = "kedge-weights-"
_NEW = 60.0  # seconds during which a folder counts as new


class WeightFolder:
    """A folder that is deleted with this object, or at the end of the process.

    A process that is killed leaves its folders, perhaps with a policy in shared memory; the next
    one that makes a folder in the same place deletes them.  Its owner holds a lock on each.

    Args:
        parent: parent folder; None: this machine's shared memory, or its temporary folder.
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
        except OSError:  # deleted in the meantime, or owned by another user
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A new folder has no lock yet.
            if about.st_uid == os.getuid() and time.time() - about.st_mtime > _NEW:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, or a file system without locks
            pass
        finally:
            os.close(lock)


class WeightFiles:
    """Weight files for a machine's servers: written for the first, forgotten after the last.

    Args:
        readers: number of servers that load each set of weights.
        parent: parent of the ``WeightFolder``.
    """

    def __init__(self, readers: int = 1, parent: str | None = None) -> None:
        self._readers, self._parent = readers, parent
        self._lock = threading.Lock()
        self._weights: object = None  # the ``WeightPayload.weights`` in the folder
        self._folder: WeightFolder | None = None
        self._left = 0

    def store(self, payload: WeightPayload) -> WeightFolder:
        """Write the weights, unless the folder holds the same ``WeightPayload.weights``."""
        with self._lock:
            if self._folder is None or payload.weights is not self._weights:
                self._folder = None
                folder = WeightFolder(self._parent)
                try:
                    payload.write(folder.path)
                except BaseException:
                    folder.delete()
                    raise
                self._weights, self._folder, self._left = payload.weights, folder, self._readers
            self._left -= 1
            folder = self._folder
            if self._left == 0:
                self._weights = self._folder = None
            return folder
