"""What runs inside an actor: one object, and a second thread that says that the process lives."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class Host:
    """Holds one object and calls its methods; becomes an actor by ``ray.remote``."""

    def __init__(self) -> None:
        self._held: Any = None

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def build(self, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Make the object, here rather than in the constructor so that errors keep their type."""
        self._held = factory(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """``method`` of the object."""
        return getattr(self._held, method)(*args, **kwargs)
