"""What ranks do in the tests: jobs that can be pickled."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import TrainerCallback

from kedge.records.errors import RewardError
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
    """Trains on what is done first, with three engines.

    The rows; by rank and iteration the prompts, their texts and rows, the number of tokens and the
    age of the newest token of each response; and by rank how often it had weights to send, how many
    responses it scored, and the processes that sampled.
    """

    options: dict[str, Any]
    engine: str = "ray"  # or "here"
    end: str = ""  # "stop" after four iterations, or a "reward" that fails on the second rank
    resume: bool = False

    def __call__(self) -> tuple[list[dict[str, Any]], list[list[Any]], list[dict[str, Any]]]:
        from accelerate.utils import gather_object

        scored: list[int] = []

        def reward(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
            scored.append(len(completions))
            ahead = threading.current_thread() is not threading.main_thread()  # not to evaluate
            late = sum(scored) > 20 and any(Path(self.options["output_dir"]).glob("checkpoint-*"))
            if self.end == "reward" and os.environ["RANK"] == "1" and ahead and late:
                raise ZeroDivisionError("no score")
            time.sleep(0.01)
            return [float(len(text.split())) for text in completions]

        engine = ON_RAY | {"vllm_num_engines": 3}
        if self.engine == "here":
            engine = {"rollout_engine": local_engines(3)}
        made = small(
            **engine,
            **{"rollout_schedule": "as_completed", "reward_model": None, **self.options},
            reward_funcs=[reward],
        )
        trained: list[Any] = []
        train_on, weights, copies = made.engine.train_on, made.engine.weights, []

        def noting(_: Any, sample: Any, **named: Any) -> Any:
            x, valid = sample.rollout, sample.rollout.response_mask
            prompts = [
                " ".join(map(str, ids[m].tolist()))
                for ids, m in zip(x.prompts.ids, x.prompts.mask, strict=True)
            ]
            tokens = int(valid.sum() + x.prompts.mask.sum())
            newest = x.token_versions.where(x.loss_mask, -1).amax(1)
            ages = (made.engine.step - newest).tolist()
            texts, row = x.prompts.columns["prompt"], x.prompts.row.tolist()
            trained.append((prompts, texts, row, tokens, ages))
            return train_on(sample, **named)

        def copying(_: Any) -> Any:
            found = weights()
            copies.append(len(found) > 0)
            return found

        if self.end == "stop":
            made.add_callback(Strike(int(os.environ["RANK"]), 4, "stop here"))
        expected = contextlib.suppress(*[RewardError] * (self.end == "reward"))
        with patch.multiple(type(made.engine), train_on=noting, weights=copying), expected:
            made.train(resume_from_checkpoint=self.resume or None)
            assert self.end != "reward"
        actors = [getattr(x, "actor", None) for x in made.engine.rollout_engine.engines]
        about = {
            "copies": sum(copies),
            "scored": sum(scored),
            "pids": [actor and actor.process.pid for actor in actors],
        }
        close = getattr(made.engine.rollout_engine, "close", None)
        if close is not None:
            close()
        return rows(made), gather_object([trained]), gather_object([about])


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
        if self.what in ("pause", "held") and state.global_step == self.step:
            time.sleep(5)  # a long iteration

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        here = int(os.environ["RANK"]) == self.rank and state.global_step == self.step
        if here and self.what == "stop here":
            control.should_training_stop = True
        elif here and self.what not in ("pause", "held"):
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


def local_engines(count: int = 2) -> Any:
    """What ``ON_RAY`` has, in the process of the first rank."""
    from accelerate import PartialState

    from kedge.rollout.embedded.engine import EmbeddedEngine
    from kedge.rollout.engines import RankGroups, RankSharedEngine, ShardedEngine
    from kedge.testing import tiny_policy
    from tests.e2e.small import VOCAB

    def make() -> ShardedEngine:
        model = tiny_policy("gpt_neox", vocab_size=VOCAB)
        made = [EmbeddedEngine(model, pad_id=0, shares_weights=False) for _ in range(count)]
        return ShardedEngine(made, pad_id=0)

    if PartialState(cpu=True).num_processes == 1:
        return make()
    return RankSharedEngine(make, RankGroups(300), extra_columns=0)


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
