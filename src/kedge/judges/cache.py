"""Answers that were paid for once."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.errors import JudgeError


class Cache:
    """Replies by what was asked, in a file that survives kills; several threads may use it.

    Args:
        file: an SQLite database; made if it is not there.  None keeps replies in memory.

    Raises:
        JudgeError: the file is not such a database, or cannot be made.
    """

    def __init__(self, file: str | Path | None) -> None:
        self._turn = threading.Lock()
        self._file = where = ":memory:" if file is None else str(Path(file).expanduser())
        try:
            if file is not None:
                Path(where).parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(where, check_same_thread=False, timeout=30)
            self._base.execute(
                "create table if not exists replies (key text primary key, reply text)"
            )
            self._base.commit()
        except (sqlite3.Error, OSError) as error:
            raise JudgeError(
                f"the cache {where} cannot be opened: {error}; name another file"
            ) from error

    def get(self, asked: Mapping[str, Any]) -> Any:
        """What was answered before, or None."""
        with self._turn:
            found = self._base.execute(
                "select reply from replies where key = ?", (cache_key(asked),)
            ).fetchone()
        return None if found is None else json.loads(found[0])

    def put(self, asked: Mapping[str, Any], reply: Any) -> None:
        """Remember a reply, on disk when this returns.

        Raises:
            JudgeError: the disk refused.
        """
        with self._turn:
            try:
                self._base.execute(
                    "insert or replace into replies values (?, ?)",
                    (cache_key(asked), json.dumps(reply)),
                )
                self._base.commit()
            except sqlite3.Error as error:
                raise JudgeError(f"a reply cannot be written to {self._file}: {error}") from error

    def close(self) -> None:
        """Let go of the file."""
        self._base.close()


def cache_key(asked: Mapping[str, Any]) -> str:
    """A name for everything that an answer depends on."""
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
