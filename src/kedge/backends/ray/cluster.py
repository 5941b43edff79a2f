"""The Ray cluster: one that runs, or one on this machine."""

from __future__ import annotations

import logging
import math
import os
import re
from typing import Any

from kedge.errors import ConfigError

logger = logging.getLogger(__name__)


def connect(address: str | None = None, *, cpus: float = 0) -> bool:
    """Join a cluster unless this process has; whether this call did.

    Args:
        address: of a running cluster, e.g. ``auto`` or ``ray://host:10001``.  None: the one in the
            environment (``RAY_ADDRESS``), or one of its own on this machine.
        cpus: places that a cluster of its own shall have, though the machine have fewer cores.

    Raises:
        ConfigError: Ray is missing, or no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: pip install 'kedge[ray]' ({error})") from error
    if ray.is_initialized():
        return False
    where = address or os.environ.get("RAY_ADDRESS") or "local"  # else Ray joins any it finds here
    own: dict[str, Any] = {}
    if where == "local":
        own = {"num_cpus": max(os.cpu_count() or 1, math.ceil(cpus)), "include_dashboard": False}
    try:
        ray.init(address=where, configure_logging=False, log_to_driver=False, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {where!r}: {error}; start one with 'ray start --head', or"
            " leave the address out"
        ) from error
    return True


def has_gpus() -> bool:
    """Whether the cluster has any GPU."""
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))


def leave() -> None:
    """Leave the cluster; one of this process's own ends."""
    import ray

    ray.shutdown()


def cause(error: Exception) -> str:
    """Why Ray lost an actor, without its general advice."""
    text = " ".join(str(error).split())
    found = re.search(r"([Tt]he actor is dead because .*?)(?: Some common|$)", text)
    return found[1].rstrip(" .") if found else text
