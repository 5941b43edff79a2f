"""What a prompt costs per completion when k completions share its prefill.

    python -m benchmarks.prefix_sharing

A GPT-NeoX of pythia-14m's shape, 8 prompts of 448 tokens, k completions each, one new token: nearly
all of the time is prefill.  Seconds are the fastest of five.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from benchmarks.ppo_vs_trl.cases import CASES, models
from kedge.records.types import PromptBatch, Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine

RESULTS = Path(__file__).parent / "results" / "prefix_sharing.json"
PROMPTS, LENGTH = 8, 448


def seconds(engine: EmbeddedEngine, k: int) -> float:
    """To prefill every prompt and sample one token for each of its k completions."""
    group = torch.arange(PROMPTS).repeat_interleave(k)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 50_000, (PROMPTS, LENGTH), generator=rng)[group]
    batch = PromptBatch(
        ids=ids,
        mask=torch.ones_like(ids, dtype=torch.bool),
        group=group,
        row=torch.arange(len(ids)),
    )
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        engine.generate(batch, sampling=Sampling(max_new_tokens=1), seed=0)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    policy, *_ = models(CASES["pythia-14m"])
    engine = EmbeddedEngine(policy, pad_id=1, chunk_rows=1024)
    rows = []
    for k in (1, 2, 4, 8, 16):
        took = seconds(engine, k)
        per = took / (PROMPTS * k)
        rows.append({"k": k, "seconds": took, "seconds_per_completion": per})
        rows[-1]["of_k_1"] = per / rows[0]["seconds_per_completion"]
        print(json.dumps(rows[-1]), flush=True)
    RESULTS.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
