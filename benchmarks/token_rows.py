"""What `log_token_rows` costs: seconds of writing against seconds of updates, in the same run.

    python -m benchmarks.token_rows

PPO on stories260k (KEDGE_SHARED), 32 responses of 64 tokens, four passes, every update written;
`share_at_default` is what is left of it at logging_steps=10.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kedge import PPOConfig, PPOTrainer
from kedge.reporting import responses

RESULTS = Path(__file__).parent / "results" / "token_rows.json"
UPDATES = 12


def words(completions: list[str], **_: Any) -> list[float]:
    return [len(set(c.split())) / 10 for c in completions]


def measured(rows: int) -> dict[str, float]:
    """Median seconds of writing and of a whole update, and bytes a response."""
    where = Path(os.environ["KEDGE_SHARED"]) / "data" / "stories260k"
    written: list[float] = []
    usual = responses.TokenLog.write

    def timed(self: Any, report: Any) -> None:
        begin = time.perf_counter()
        usual(self, report)
        written.append(time.perf_counter() - begin)

    responses.TokenLog.write = timed
    try:
        with tempfile.TemporaryDirectory() as folder:
            args = PPOConfig(
                output_dir=folder,
                per_device_train_batch_size=32,
                max_steps=UPDATES,
                response_length=64,
                stop_token=None,
                logging_steps=1,
                log_token_rows=rows,
                save_strategy="no",
                num_sample_generations=0,
                gradient_checkpointing=False,
                disable_tqdm=True,
                use_cpu=True,
            )
            trainer = PPOTrainer(
                args=args,
                processing_class=AutoTokenizer.from_pretrained(where),
                model=AutoModelForCausalLM.from_pretrained(where),
                reward_funcs=words,
                train_dataset=[{"prompt": "Once upon a time"}, {"prompt": "Lily and Tom"}] * 16,
            )
            trainer.train()
            size = sum(f.stat().st_size for f in Path(folder).glob("tokens/*.jsonl"))
    finally:
        responses.TokenLog.write = usual
    steps = [row["time/step"] for row in trainer.state.log_history if "time/step" in row]
    share = median(written) / median(steps)
    return {
        "rows": rows,
        "seconds_write": median(written),
        "seconds_update": median(steps),
        "share_every_update": share,
        "share_at_default": share / 10,
        "bytes_per_response": size / (rows * UPDATES),
    }


def main() -> None:
    found = [measured(rows) for rows in (4, 16)]
    about = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
    }
    RESULTS.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
