"""Two processes give the numbers of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kedge.algorithms import ppo
from kedge.backends.hf.value_head import ScalarHead
from kedge.engine.stages import cut
from tests.learners import arguments, experience, learner, rollout

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(world: int, mode: str, folder: Path) -> dict:
    """Run this file in ``world`` processes; what rank 0 wrote."""
    out = folder / f"{mode}-{world}.json"
    port = str(free_port())
    running = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }
        command = [sys.executable, __file__, mode, str(out)]
        running.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return json.loads(out.read_text())


def run(mode: str, out: str) -> None:
    """What each process does: three optimiser steps on its rows of one batch of six."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(rank)  # a head made from other random numbers on each rank
    value = ScalarHead(32, init="normal") if mode == "shared" else "model"
    if mode == "shared" and rank == 0:
        torch.nn.init.constant_(value.summary.weight, 0.05)
    # A large epsilon: Adam's first steps would blow rounding up to the size of the rate.
    found = learner(value=value, max_grad_norm=1.0, args=arguments(adam_epsilon=1e-2))
    if mode == "averaged":
        # Broken: gradients are averaged over ranks although the weights already sum to 1.
        summed = found._sum_gradients

        def averaged():
            summed()
            for p in found.module.parameters():
                if p.grad is not None:
                    p.grad /= world

        found._sum_gradients = averaged
    batch = experience(rollout(6))
    # The ranks hold different numbers of rows, and so of micro-batches.
    mine = {1: [range(6)], 2: [range(4), range(4, 6)]}[world][rank]
    batch, algo = batch.rows(torch.tensor(list(mine))), ppo(vf_coef=0.5)
    note = []
    for i in range(3):
        step = cut(batch, torch.arange(len(batch)), algo, 1, found.total)
        note.append(found.update(step, algo.loss, only_value=i == 0))
    weights = [p.detach().flatten() for p in found.module.parameters()]
    if rank == 0:
        Path(out).write_text(
            json.dumps({"metrics": note, "weights": torch.cat(weights).double().tolist()})
        )
    if world > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["separate", "shared"])
def test_two_ranks_give_the_numbers_of_one(mode, tmp_path):
    one, two = (launch(world, mode, tmp_path) for world in (1, 2))
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(
        torch.tensor(one["weights"]), torch.tensor(two["weights"]), atol=2e-5, rtol=1e-4
    )


@pytest.mark.slow
def test_gradients_averaged_over_ranks_are_seen(tmp_path):
    one, two = (launch(world, "averaged", tmp_path) for world in (1, 2))
    assert two["metrics"][0]["grad_norm"] == pytest.approx(one["metrics"][0]["grad_norm"] / 2)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
