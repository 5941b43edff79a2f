"""Cache of replies that were already paid for."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.errors import JudgeError


class Cache:
    """Replies keyed by request, in an SQLite file that survives kills; thread-safe.

    Without a file, replies are kept in memory.
    """

    def __init__(self, file: str | Path | None) -> None:
        self._turn = threading.Lock()
        self._file = where = ":memory:" if file is None else str(Path(file).expanduser())
        try:
            if file is not None:
                Path(where).parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(where, check_same_thread=False, timeout=30)
            weakref.finalize(self, self._base.close)
            self._base.execute(
                "create table if not exists replies (key text primary key, reply text)"
            )
            self._base.commit()
        except (sqlite3.Error, OSError) as error:
            raise JudgeError(
                f"the cache {where} cannot be opened: {error}; choose another file"
            ) from error

    def get(self, request: Mapping[str, Any]) -> Any:
        """The cached reply, or None."""
        with self._turn:
            row = self._base.execute(
                "select reply from replies where key = ?", (cache_key(request),)
            ).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, request: Mapping[str, Any], reply: Any) -> None:
        """Store a reply; it is on disk when this returns."""
        with self._turn:
            try:
                self._base.execute(
                    "insert or replace into replies values (?, ?)",
                    (cache_key(request), json.dumps(reply)),
                )
                self._base.commit()
            except sqlite3.Error as error:
                raise JudgeError(f"a reply cannot be written to {self._file}: {error}") from error


def cache_key(request: Mapping[str, Any]) -> str:
    """A hash of everything that a reply depends on."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
