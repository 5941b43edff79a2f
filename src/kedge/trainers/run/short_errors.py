"""Shows errors of a user's reward function without Kedge's stack frames."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from kedge.errors import RewardError

P = ParamSpec("P")
R = TypeVar("R")
_PACKAGE = Path(__file__).parents[2]
_RUNNERS = (os.path.join("concurrent", "futures"), os.sep + "asyncio" + os.sep)
_MAX_FRAMES = 4  # frames of the user's code that are shown


def short_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method: its RewardError shows the message and the user's frames only.

    ``KEDGE_TRACEBACK=1`` shows every frame instead.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except RewardError as error:
            if os.environ.get("KEDGE_TRACEBACK", "0") not in ("", "0"):
                raise
            raise _shortened(error) from None

    return call


def _shortened(error: RewardError) -> RewardError:
    cause = error.__cause__
    if cause is not None and sys.version_info >= (3, 11):  # notes exist since Python 3.11
        error.add_note("".join([*_frames(cause), *traceback.format_exception_only(cause)]).rstrip())
        error.__cause__ = None
    return error.with_traceback(None)


def _frames(cause: BaseException) -> list[str]:
    """The stack frames of the user's code."""
    stack = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if not Path(frame.filename).is_relative_to(_PACKAGE)
        and not any(part in frame.filename for part in _RUNNERS)
    ]
    if len(stack) > _MAX_FRAMES:
        stack = [stack[0], *stack[1 - _MAX_FRAMES :]]
    return traceback.format_list(stack)
