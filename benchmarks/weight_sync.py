"""Bytes, copies and seconds of a weight sync, against the number of rollout engines.

    python -m benchmarks.weight_sync --megabytes 1024 --engines 1 4 16

The weights of a model of the given size (float32 on the learner) are sent to pretend engines, each
in a thread, which copy every tensor into a model in their dtype.  Ways: "bucket by bucket" into
Ray's object store, which all engines read, as learners send weights; "whole copy" in the dtype of
the engines, then into the store, as they did before; "files", which all vLLM servers read.
Counted are the bytes of tensors that the sender allocates besides its weights and the store, at
their peak, the bytes in the store or in files, and CPU and wall seconds.  Needs Ray.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tests.storages import PrivateBytes
from torch import Tensor

from kedge.ext.ray import cluster
from kedge.ext.ray.engine import StoredWeights, stage_weights
from kedge.ext.vllm.weights import WeightFolder, WeightPayload

RESULTS = Path(__file__).parent / "results"
TENSORS = 64


def weights(megabytes: int, version: int) -> dict[str, Tensor]:
    """Float32 weights of a size."""
    rows = megabytes * (1 << 20) // 4 // TENSORS // 1024
    return {f"layer{i}": torch.full((rows, 1024), float(version)) for i in range(TENSORS)}


Read = Callable[[dict[str, Tensor]], None]  # what an engine does: copies into its model


def from_store(stored: StoredWeights, model: dict[str, Tensor]) -> None:
    """Copy every tensor of the store."""
    for name, x in stored.tensors():
        model[name].copy_(x)


def from_files(folder: Path, model: dict[str, Tensor]) -> None:
    """Copy every tensor of the files."""
    for file in sorted(folder.iterdir()):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                model[name].copy_(tensors.get_tensor(name))


def send(way: str, current: dict[str, Tensor], engines: int) -> list[Read]:
    """Make the weights available; returns how each engine reads them."""
    payload = WeightPayload(tuple(current.items()), dtype=torch.bfloat16, weights=current)
    if way == "files":
        written = WeightFolder()
        payload.write(written.path)  # once for all servers
        return [lambda model: from_files(written.path, model)] * engines
    if way == "whole copy":
        current = {name: x.bfloat16() for name, x in current.items()}
    staged = stage_weights(current.items(), torch.bfloat16)
    return [lambda model: from_store(staged.stored, model)] * engines


def measure(way: str, engines: int, megabytes: int) -> dict[str, Any]:
    """One weight sync to all engines."""
    current = weights(megabytes, 1)
    model = {name: torch.empty_like(x, dtype=torch.bfloat16) for name, x in current.items()}
    cpu, begin = time.process_time(), time.perf_counter()
    with PrivateBytes() as private:
        reads = send(way, current, engines)
    with ThreadPoolExecutor(engines) as threads:
        list(threads.map(lambda read: read(model), reads))
    seconds = time.perf_counter() - begin
    cpu = time.process_time() - cpu
    size = sum(x.numel() * 2 for x in current.values())
    return {
        "engines": engines,
        "way": way,
        "private_megabytes": round(private.most / (1 << 20)),
        "stored_megabytes": round(size / (1 << 20)),
        "cpu_seconds": round(cpu, 3),
        "seconds": round(seconds, 3),
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the weights in float32")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_sync.json")
    options = parser.parse_args()
    cluster.connect(cpus=1)
    ways = ("bucket by bucket", "whole copy", "files")
    measure(ways[0], 1, options.megabytes)  # the store maps its memory
    results = [measure(way, count, options.megabytes) for count in options.engines for way in ways]
    cluster.leave()
    print("| engines | way | private MiB | MiB in store or files | CPU seconds | seconds |")
    print("|---|---|---|---|---|---|")
    for row in results:
        print("|", *(f"{x} |" for x in row.values()))
    report = {
        "processor": platform.processor() or platform.machine(),
        "float32_megabytes": options.megabytes,
        "results": results,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
