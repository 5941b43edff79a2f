"""Weights that one rank cannot hand over end all ranks, with the same message."""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kedge.learner.learner_state import WeightCopier
from kedge.models.fingerprint import FingerprintSums, WeightsCopy
from kedge.records.errors import SyncError
from tests.ranks import leave, run_ranks


def policy(*, sharded: bool) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            for name, p in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    return model


def work(mode: str, folder: str) -> None:
    """What each process does: the second weight finds no room on one rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    failing = 1 if mode == "separate" else 0
    broken, live = True, mode == "live"

    def stage(weights):
        staged = WeightsCopy()
        for name, x in weights:
            if broken and mode != "unhashed" and dist.get_rank() == failing and staged:
                raise OSError("no room") if mode == "separate" else SyncError("the store is full")
            staged[name] = x.clone()
        return staged

    def add(sums, name, x):
        if broken and dist.get_rank() == failing and name != "0.weight":
            raise RuntimeError("out of memory")
        add_to(sums, name, x)

    add_to = FingerprintSums.add
    if mode == "unhashed":
        FingerprintSums.add = add
    model = policy(sharded=mode in ("sharded", "unhashed"))
    only_here = None if live and dist.get_rank() != 0 else stage  # as of an engine on rank 0
    copier = WeightCopier(stage=only_here, first_only=mode != "separate", live=live)
    begin, text = time.monotonic(), ""
    try:
        copier(model)
    except SyncError as error:
        text = str(error)
    found = {"text": text, "seconds": time.monotonic() - begin}
    broken = False
    found["later"] = len(copier(model))  # the collectives of the ranks still match
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    leave()


@pytest.mark.parametrize(
    ("mode", "text", "later"),
    [
        ("sharded", "the store is full", [6, 0]),
        ("whole", "the store is full", [6, 0]),
        ("live", "the store is full", [6, 0]),
        ("unhashed", "RuntimeError: out of memory", [6, 0]),
        ("separate", "OSError: no room", [6, 6]),
    ],
)
def test_all_ranks_end_with_the_same_message(mode, text, later, tmp_path):
    run_ranks(2, __file__, mode, tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [f["text"] for f in found] == [text] * 2
    assert max(f["seconds"] for f in found) < 15
    assert [f["later"] for f in found] == later


def test_a_single_process_raises_its_own_error():
    def stage(weights):
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        WeightCopier(stage=stage)(nn.Linear(2, 2))


if __name__ == "__main__":
    torch.manual_seed(0)
    work(*sys.argv[1:])
