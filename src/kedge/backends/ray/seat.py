"""Where this process sits, if it is a rank that ``launch`` started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kedge.backends.ray.placement import Placement

_HERE: list[Here] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What a rank knows of its launch."""

    rank: int
    ranks: int
    placement: Placement  # of everyone
    board: Any  # actor handle: news for the driver, and its wishes


def here() -> Here | None:
    """The place of this process in a launch; None outside one."""
    return _HERE[0] if _HERE else None


def sit(place: Here) -> None:
    """This process is that rank from now on."""
    _HERE[:] = [place]
