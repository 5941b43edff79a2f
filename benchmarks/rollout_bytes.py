"""Bytes of responses through each learner rank, against the number of rollout engines.

    python -m benchmarks.rollout_bytes --ranks 4 --engines 1 4

Learner ranks share rollout engines in Ray actors.  The engines return random responses at once, so
that only their transport is measured.  Counted on each rank, per batch, are the bytes that it reads
from Ray's object store and those that it sends to or receives from other ranks over gloo; and the
CPU seconds of all threads of its process, Ray's included and counting excluded, as the median of
the batches.  "through
rank 0" is the way of ranks that are not actors of a launch: rank 0 reads and unpacks all responses,
cuts them and sends every rank its own.  "references" is the way in a launch: rank 0 hands out
references, and every rank reads and unpacks its own rows.  Needs Ray.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kedge.ray import LaunchLimits, cluster, launch
from kedge.types import PromptBatch, Rollout, Sampling

RESULTS = Path(__file__).parent / "results"
BATCHES = 20
PROMPT = 64  # tokens


class RandomEngine:
    """Stands in for the hosted engine of an actor: random responses of full length."""

    def __init__(self, *_: Any) -> None: ...

    def generate_packed(
        self, prompts: PromptBatch, sizes: list[int], *, sampling: Sampling, seed: int
    ) -> tuple[Any, ...]:
        """The versions, and the rows of each share."""
        from kedge.ray.rollout_store import pack_shares

        shape = len(prompts), sampling.max_new_tokens
        mask = torch.ones(shape, dtype=torch.bool)
        rollout = Rollout(
            prompts=prompts,
            ids=torch.randint(0, 150_000, shape),
            loss_mask=mask,
            response_mask=mask.clone(),
            terminated=mask[:, 0].clone(),
            version=torch.zeros(len(prompts), dtype=torch.int64),
            behavior_logprobs=-torch.rand(shape),
        )
        return pack_shares(rollout, sizes, extra=0)


class Counter:
    """Counts the bytes of what Ray returns and gloo carries in this process."""

    def __init__(self) -> None:
        import ray

        self.read = self.exchanged = 0
        self.seconds = 0.0  # of CPU time that counting takes
        get, gather, scatter = ray.get, dist.gather_object, dist.scatter_object_list

        def counting_get(references: Any, **options: Any) -> Any:
            value = get(references, **options)
            self.read += self.size(value)
            return value

        def counting_gather(local: Any, gathered: Any, **options: Any) -> None:
            gather(local, gathered, **options)
            others = [local] if gathered is None else gathered[1:]  # rank 0 sends itself nothing
            self.exchanged += sum(map(self.size, others))

        def counting_scatter(received: Any, sent: Any, **options: Any) -> None:
            scatter(received, sent, **options)
            self.exchanged += sum(map(self.size, received if sent is None else sent[1:]))

        ray.get = counting_get
        dist.gather_object, dist.scatter_object_list = counting_gather, counting_scatter

    def size(self, value: Any) -> int:
        """``size``, whose time is not that of the transport."""
        begin = time.thread_time()
        found = size(value)
        self.seconds += time.thread_time() - begin
        return found


def size(value: Any) -> int:
    """Bytes of a pickled object; of a reference, its id and its owner."""
    import ray

    try:
        return len(pickle.dumps(value, protocol=5))
    except TypeError:  # references cannot be pickled outside of Ray
        assert isinstance(value, list)
        return sum(100 if isinstance(x, ray.ObjectRef) else size(x) for x in value)


@dataclass
class Job:
    """What a rank does: share engines with the others, and draw batches."""

    engines: int
    rows: int
    tokens: int

    def __call__(self) -> dict[str, list[dict[str, float]]]:
        """Figures per batch of each rank, by way."""
        dist.init_process_group("gloo")
        counter = Counter()
        ways = {
            "through rank 0": self.measure(counter, references=False),
            "references": self.measure(counter, references=True),
        }
        dist.barrier()
        return ways

    def measure(self, counter: Counter, *, references: bool) -> list[dict[str, float]]:
        """Figures of one way."""
        from kedge.ray.rollout_store import exchange_of_launch
        from kedge.rollout.shared import build_shared_engine

        ranks = dist.get_world_size()
        engine = build_shared_engine(
            self.make,
            ranks=ranks,
            timeout=300,
            extra_slots=0,
            exchange=exchange_of_launch(0) if references else None,
        )
        rows = self.rows // ranks
        prompts = PromptBatch(
            ids=torch.ones(rows, PROMPT, dtype=torch.int64),
            mask=torch.ones(rows, PROMPT, dtype=torch.bool),
            group=torch.arange(rows),
            row=torch.arange(rows),
        )
        sampling = Sampling(max_new_tokens=self.tokens)
        for batch in range(BATCHES + 1):
            if batch == 1:  # the first one is not counted
                dist.barrier()
                counter.read = counter.exchanged = 0
                seconds, begin = list[float](), time.perf_counter()
            cpu = time.process_time() - counter.seconds
            rollout = engine.generate(prompts, sampling=sampling, seed=batch)
            assert rollout.ids.shape == (rows, self.tokens)
            if batch:
                seconds.append(time.process_time() - counter.seconds - cpu)
        figures = {
            "read_bytes": counter.read / BATCHES,
            "gloo_bytes": counter.exchanged / BATCHES,
            "cpu_seconds": statistics.median(seconds),
            "seconds": (time.perf_counter() - begin) / BATCHES,
        }
        of_ranks: list[Any] = [None] * ranks
        dist.all_gather_object(of_ranks, figures)
        engine.close()
        return of_ranks

    def make(self) -> Any:
        """Engines in actors, without a model."""
        from kedge.ray import engine
        from kedge.ray.actor import ActorLimits
        from kedge.ray.resources import SharedArgument
        from kedge.ray.weight_store import SharedWeights
        from kedge.rollout.sharded import ShardedEngine, start_all
        from kedge.rollout.vllm.weight_payload import WeightPayload

        engine.HostedEngine = RandomEngine
        payload = WeightPayload((("w", torch.zeros(1)),))
        shared, nothing = SharedWeights(self.engines), SharedArgument(str, self.engines)

        def start(index: int) -> engine.RayEngine:
            return engine.RayEngine(
                f"engine {index}",
                nothing,
                payload,
                {"pad_id": 0},
                options={"num_cpus": 0},
                limits=ActorLimits(),
                shared_weights=shared,
            )

        starts = [lambda i=i: start(i) for i in range(self.engines)]
        return ShardedEngine(start_all(starts), pad_id=0)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rows", type=int, default=512, help="of a batch, on all ranks")
    parser.add_argument("--tokens", type=int, default=256, help="of a response")
    parser.add_argument("--out", type=Path, default=RESULTS / "rollout_bytes.json")
    options = parser.parse_args()
    cluster.connect(cpus=options.ranks)
    results = []
    print("| engines | way | rank | KiB read from the store | KiB over gloo | CPU seconds |")
    print("|---|---|---|---|---|---|")
    for engines in options.engines:
        job = Job(engines, options.rows, options.tokens)
        ways = launch(job, learners=[options.ranks], limits=LaunchLimits(), say=lambda text: None)
        for way, of_ranks in ways.items():
            for rank in (0, options.ranks - 1):
                row = {"engines": engines, "way": way, "rank": rank, **of_ranks[rank]}
                results.append(row)
                print(
                    f"| {engines} | {way} | {rank} | {row['read_bytes'] / 1024:.0f} |"
                    f" {row['gloo_bytes'] / 1024:.0f} | {row['cpu_seconds']:.3f} |",
                    flush=True,
                )
    cluster.leave()
    report = {
        "processor": platform.processor() or platform.machine(),
        "ranks": options.ranks,
        "rows": options.rows,
        "tokens": options.tokens,
        "prompt_tokens": PROMPT,
        "results": results,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
