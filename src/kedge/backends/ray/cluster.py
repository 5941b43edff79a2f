"""Connection to a Ray cluster: a running one, or a new local one."""

from __future__ import annotations

import logging
import math
import os
import re
from typing import Any

from kedge.errors import ConfigError

logger = logging.getLogger(__name__)


def connect(address: str | None = None, *, cpus: float = 0) -> bool:
    """Connect to a cluster unless this process is connected; whether this call did.

    ``address`` is that of a running cluster, e.g. ``auto`` or ``ray://host:10001``; None: that of
    ``RAY_ADDRESS``, or a new local cluster with at least ``cpus`` CPU slots.

    Raises:
        ConfigError: Ray is not installed, or no cluster responds.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: pip install 'kedge[ray]' ({error})") from error
    if ray.is_initialized():
        return False
    # "local": otherwise Ray joins any cluster that it finds on this machine.
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    resources: dict[str, Any] = {}
    if address == "local":
        resources = {
            "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus)),
            "include_dashboard": False,
        }
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=False, **resources)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster responds at {address!r}: {error}; start one with 'ray start --head',"
            " or leave the address out"
        ) from error
    return True


def has_gpus() -> bool:
    """Whether the cluster has any GPU."""
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))


def leave() -> None:
    """Disconnect from the cluster; a local one of this process is stopped."""
    import ray

    ray.shutdown()


def cause(error: Exception) -> str:
    """Why Ray lost an actor, without the generic part of its message."""
    text = " ".join(str(error).split())
    match = re.search(r"([Tt]he actor is dead because .*?)(?: Some common|$)", text)
    return match[1].rstrip(" .") if match else text
