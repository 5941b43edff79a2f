"""What ranks do in the tests: jobs that can be pickled."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests.e2e.small import rows, small

TIMED = ("time/", "eps", "tokens_per_second", "train_", "step_time")
ON_RAY = {"rollout_engine": "ray", "ray_engine": "embedded", "vllm_num_engines": 2}


@dataclass
class Train:
    """Trains the small model; the logged rows without times, and the last weights."""

    options: dict[str, Any] = field(default_factory=dict)
    strike: tuple[int, int, str] | None = None  # rank, step, and what happens there
    engine: str = "embedded"  # or two engines: "ray", "here"

    def __call__(self) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        engine = ON_RAY if self.engine == "ray" else {}
        if self.engine == "here":
            engine = {"rollout_engine": local_engines()}
        made = small(**{"logging_steps": 1, "total_episodes": 32, **engine, **self.options})
        if self.strike is not None:
            made.add_callback(Strike(*self.strike))
        made.train()
        close = getattr(made.engine.rollout_engine, "close", None)
        if close is not None:
            close()
        found = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows(made)]
        return found, dict(made.engine.learner.weights())


@dataclass
class AsDone:
    """Trains on what is done first; rows, prompts trained on, and processes that sampled."""

    options: dict[str, Any]

    def __call__(self) -> tuple[list[dict[str, Any]], list[list[str]], list[list[int]]]:
        from accelerate.utils import gather_object

        made = small(**ON_RAY, rollout_schedule="as_completed", **self.options)
        trained: list[str] = []
        train_on = made.engine.train_on

        def noting(sample: Any, **named: Any) -> Any:
            prompts = sample.rollout.prompts
            trained.extend(
                " ".join(map(str, ids[m].tolist()))
                for ids, m in zip(prompts.ids, prompts.mask, strict=True)
            )
            return train_on(sample, **named)

        type(made.engine).train_on = lambda _, *args, **named: noting(*args, **named)
        made.train()
        pids = [engine.actor.pid for engine in made.engine.rollout_engine.engines]
        return rows(made), gather_object([trained]), gather_object([pids])


@dataclass
class Both:
    """A run in turn and one with sampling ahead."""

    folder: str
    engine: str

    def __call__(self) -> list[Any]:
        return [
            Train(options={"max_lag": n, "output_dir": f"{self.folder}/{n}"}, engine=self.engine)()
            for n in (0, 1)
        ]


class Strike(TrainerCallback):
    """Something bad on one rank at one step."""

    def __init__(self, rank: int, step: int, what: str) -> None:
        self.rank, self.step, self.what = rank, step, what

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.what == "pause" and state.global_step == self.step:
            time.sleep(5)  # a long iteration

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        here = int(os.environ["RANK"]) == self.rank and state.global_step == self.step
        if here and self.what not in ("pause", "held"):
            strike(self.what)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.what == "held":  # by a disk that does not respond
            time.sleep(1000)


def strike(what: str) -> None:
    if what == "raise":
        raise ZeroDivisionError("a bug in a callback")
    if what == "sleep":
        time.sleep(1000)
    os.kill(os.getpid(), {"kill": 9, "stop": 19}[what])


def local_engines() -> Any:
    """What ``ON_RAY`` has, in the process of the first rank."""
    from accelerate import PartialState

    from kedge.rollout.embedded.engine import EmbeddedEngine
    from kedge.rollout.sharded import ShardedEngine
    from kedge.rollout.shared import build_shared_engine
    from kedge.testing import tiny_policy
    from tests.e2e.small import VOCAB

    def make() -> ShardedEngine:
        model = tiny_policy("gpt_neox", vocab_size=VOCAB)
        made = [EmbeddedEngine(model, pad_id=0, shares_weights=False) for _ in range(2)]
        return ShardedEngine(made, pad_id=0)

    ranks = PartialState(cpu=True).num_processes
    return build_shared_engine(make, ranks=ranks, timeout=300, extra_columns=0)


def work(folder: str, out: str) -> None:
    """A process of a run without Ray: what ``accelerate launch`` would start."""
    found = Both(folder, "here")()
    if os.environ["RANK"] == "0":
        torch.save(found, f"{out}.pt")
        Path(out).write_text("[]")
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
