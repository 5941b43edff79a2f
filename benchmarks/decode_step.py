"""Sampling on a CPU with the recorded decode step and with the model's own code, in turn.

    python -m benchmarks.decode_step [--shapes stories260k 14m 160m] [--batches 1 16 64]

One thread and process; prompts of 32 tokens, responses of ``--tokens`` tokens of random models.
Tokens per CPU second of ``EmbeddedEngine.generate``, recordings included; the least time of the
rounds counts.  Tokens and log-probabilities of both sides are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from kedge.backends.hf import recorded_step
from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.testing import tiny_policy
from kedge.types import PromptBatch, Rollout, Sampling

RESULTS = Path(__file__).parent / "results" / "decode_step.json"
PROMPT = 32
SHAPES: dict[str, dict[str, Any]] = {
    "stories260k": {
        **{"family": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 172},
        **{"layers": 5, "heads": 8, "num_key_value_heads": 4},
    },
    "14m": {
        **{"family": "gpt_neox", "vocab_size": 50_304, "hidden_size": 128},
        **{"intermediate_size": 512, "layers": 6, "heads": 4},
    },
    "160m": {
        **{"family": "gpt_neox", "vocab_size": 50_304, "hidden_size": 768},
        **{"intermediate_size": 3072, "layers": 12, "heads": 12},
    },
}


def sample(engine: EmbeddedEngine, rows: int, tokens: int) -> tuple[float, Rollout]:
    """CPU seconds, and the samples."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 500, (rows, PROMPT), generator=rng)
    numbers = torch.arange(rows)
    batch = PromptBatch(ids=ids, mask=ids > 0, group=numbers, row=numbers)
    begin = time.process_time()
    rollout = engine.generate(batch, sampling=Sampling(max_new_tokens=tokens), seed=1)
    return time.process_time() - begin, rollout


def compare(shape: str, rows: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Both sides in turn, round after round."""
    engine = EmbeddedEngine(tiny_policy(max_positions=2048, **SHAPES[shape]).eval(), pad_id=0)
    can = recorded_step.can_record
    seconds: dict[str, list[float]] = {"recorded": [], "eager": []}
    samples = {}
    for _ in range(rounds):
        for side, spent in seconds.items():
            recorded_step.can_record = can if side == "recorded" else lambda *_: False
            time_spent, samples[side] = sample(engine, rows, tokens)
            spent.append(time_spent)
    recorded_step.can_record = can
    a, b = samples.values()
    assert a.behavior_logprobs is not None
    assert b.behavior_logprobs is not None
    equal = torch.equal(a.ids, b.ids) and torch.equal(a.behavior_logprobs, b.behavior_logprobs)
    rate = {side: rows * tokens / min(spent) for side, spent in seconds.items()}
    return {
        **{"shape": shape, "batch": rows, "tokens": tokens, "equal": equal},
        **{"tokens_per_cpu_second": rate, "ratio": rate["recorded"] / rate["eager"]},
        "cpu_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    import transformers

    torch.set_num_threads(1)
    about: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    about |= {"processor": platform.processor() or platform.machine()}
    results = []
    for shape in flags.shapes:
        for rows in flags.batches:
            results.append(compare(shape, rows, flags.rounds, flags.tokens))
            print({k: v for k, v in results[-1].items() if k != "cpu_seconds"}, flush=True)
    about |= {"load": os.getloadavg()}
    RESULTS.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
