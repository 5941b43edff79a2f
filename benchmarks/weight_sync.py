"""Bytes, copies and seconds of a weight sync, against the number of rollout engines.

    python -m benchmarks.weight_sync --megabytes 256 --engines 1 4 16 64

The weights of a model of the given size (float32 on the learner) are put into Ray's object store
and read by pretend engines, each in a thread, which copy every tensor into a model in their dtype.
Counted are the bytes that the learner stores, the sets of weights that exist besides the models (in
the store, and private to engines), and the seconds until the last engine has them.  "one by one" is
the way without sharing: weights are stored and read separately for each engine.  Needs Ray.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.backends.ray import cluster
from kedge.backends.ray.weight_store import SharedWeights, StoredWeights
from kedge.backends.vllm.weight_payload import WeightPayload

RESULTS = Path(__file__).parent / "results"
TENSORS = 64


def weights(megabytes: int, version: int) -> dict[str, Tensor]:
    """Float32 weights of a size."""
    rows = megabytes * (1 << 20) // 4 // TENSORS // 1024
    return {f"layer{i}": torch.full((rows, 1024), float(version)) for i in range(TENSORS)}


def read(stored: StoredWeights, model: dict[str, Tensor]) -> None:
    """What an engine does: copy every tensor into its model."""
    for name, x in stored.tensors():
        model[name].copy_(x)


def measure(engines: int, megabytes: int, *, shared: bool) -> dict[str, Any]:
    """One weight sync to all engines."""
    current = weights(megabytes, 1)
    model = {name: torch.empty_like(x, dtype=torch.bfloat16) for name, x in current.items()}
    payload = WeightPayload(tuple(current.items()), dtype=torch.bfloat16)
    store = SharedWeights(engines)
    found: list[StoredWeights] = []

    def load(_: int) -> None:
        stored = store.store(payload) if shared else SharedWeights(1).store(payload)
        found.append(stored)
        read(stored, model)

    begin = time.perf_counter()
    with ThreadPoolExecutor(engines) as threads:
        list(threads.map(load, range(engines)))
    seconds = time.perf_counter() - begin
    size = sum(x.numel() * 2 for x in current.values())
    copies = len({id(stored) for stored in found})
    return {
        "engines": engines,
        "way": "stored once" if shared else "one by one",
        "megabytes_stored": round(copies * size / (1 << 20)),
        "copies": copies,
        "seconds": round(seconds, 3),
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="of the weights in float32")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_sync.json")
    options = parser.parse_args()
    cluster.connect(cpus=1)
    measure(1, options.megabytes, shared=True)  # the store maps its memory
    results = [
        measure(count, options.megabytes, shared=shared)
        for count in options.engines
        for shared in (True, False)
    ]
    cluster.leave()
    print("| engines | way | MiB stored | copies besides the models | seconds |")
    print("|---|---|---|---|---|")
    for row in results:
        print(
            f"| {row['engines']} | {row['way']} | {row['megabytes_stored']} | {row['copies']} |"
            f" {row['seconds']} |"
        )
    report = {
        "processor": platform.processor() or platform.machine(),
        "float32_megabytes": options.megabytes,
        "results": results,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
