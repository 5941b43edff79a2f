"""One Ray cluster on this machine for all tests of a process."""

from __future__ import annotations

import importlib.util
import os

import pytest

needs_ray = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed (make test-vllm)"
    ),
    # Ray's own processes and sockets, closed by the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]
CPUS = 8  # places; the machine may have fewer cores
os.environ.setdefault("RAY_worker_niceness", "0")  # else actors wait for whatever else runs here


def local():
    """Start it, unless it runs."""
    from kedge.ext.ray.cluster import connect

    connect(cpus=CPUS)
