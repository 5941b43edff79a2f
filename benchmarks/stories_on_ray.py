r"""The stories run with vLLM on Ray, ahead of training, against the synchronous trainer.

    python -m benchmarks.stories_on_ray --updates 40 --seeds 0
    python -m benchmarks.stories_on_ray --seeds 0 1 2 --updates 24 --prompts 32 --engines 1 \
        --sides synchronous "vLLM on Ray, max_lag=0" "vLLM on Ray, max_lag=1, in flight" \
        "vLLM on Ray, max_lag=4, in flight"

stories-head32 against the sentiment reward model; 64 prompts an iteration, 53 tokens, learning
rate 3e-4, 4 epochs, KL coefficient 0.05.  Sides: synchronous with the embedded engine; vLLM engines
in Ray actors at max_lag=0, and at max_lag=1 without and with a correction of stale samples; and
with weights in flight at max_lag 1 and 4, corrected.  Writes the scores of every iteration and the
mean of the last five.  Needs Ray and vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from kedge import PPOConfig, PPOTrainer
from kedge.math.kl import over_vocabulary

SHARED = Path(os.environ.get("KEDGE_SHARED", Path(__file__).parents[2] / "shared"))
RESULTS = Path(__file__).parent / "records"
APART: dict[str, Any] = {
    "rollout_engine": "ray",
    "vllm_num_engines": 2,
    "max_lag": 1,
    "sampler_correction": "off",
}
IN_FLIGHT: dict[str, Any] = APART | {
    "rollout_schedule": "as_completed",
    "in_flight_weight_updates": True,
    "sampler_correction": "truncate",
}
LENGTH = {"max_new_tokens": 53, "min_new_tokens": 53}
SIDES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "vLLM on Ray, max_lag=0": APART | {"max_lag": 0},
    "vLLM on Ray, max_lag=1": APART,
    "vLLM on Ray, max_lag=1, truncated": APART | {"sampler_correction": "truncate"},
    "vLLM on Ray, max_lag=1, in flight": IN_FLIGHT,
    "vLLM on Ray, max_lag=4, in flight": IN_FLIGHT | {"max_lag": 4},
    **{
        f"embedded, max_lag={lag}, in flight": {
            "rollout_schedule": "as_completed",
            "in_flight_weight_updates": True,
            "max_lag": lag,
        }
        for lag in (2, 4)
    },
}


def trainer(side: str, seed: int, updates: int, **changes: Any) -> PPOTrainer:
    """One side's trainer."""
    data = SHARED / "data"
    prompts = (data / "story-prompts" / "train.jsonl").read_text().splitlines()
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 64,
        "max_steps": updates,
        "response_length": 53,
        "stop_token": None,
        "learning_rate": 3e-4,
        "kl_coef": 0.05,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "num_sample_generations": 0,
        "seed": seed,
        "disable_tqdm": True,
    }
    return PPOTrainer(
        PPOConfig(**options | SIDES[side] | changes),
        AutoTokenizer.from_pretrained(data / "stories-head32", padding_side="left"),
        AutoModelForCausalLM.from_pretrained(data / "stories-head32"),
        reward_model=AutoModelForSequenceClassification.from_pretrained(
            data / "stories260k-sentiment"
        ),
        train_dataset=[json.loads(line) for line in prompts],
    )


@torch.no_grad()
def kl_of_own_samples(model: Any) -> float:
    """Exact KL to the reference in nats, along a response of the policy to the last 32 prompts."""
    data, model = SHARED / "data", model.eval()
    read = AutoTokenizer.from_pretrained(data / "stories-head32", padding_side="left")
    lines = (data / "story-prompts" / "train.jsonl").read_text().splitlines()[-32:]
    x = read([json.loads(line)["prompt"] for line in lines], return_tensors="pt", padding=True)
    start, mask = x.input_ids.shape[1], x.attention_mask
    plain = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    ids = model.generate(x.input_ids, attention_mask=mask, **LENGTH, **plain)
    mask = torch.cat([mask, torch.ones_like(ids[:, start:])], 1)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    models = model, AutoModelForCausalLM.from_pretrained(data / "stories-head32").eval()
    of, ref = (m(ids, **given).logits[:, start - 1 : -1].log_softmax(-1) for m in models)
    return float(over_vocabulary(of, ref).sum(1).mean())


def run(side: str, seed: int, updates: int, engines: int, prompts: int) -> dict[str, Any]:
    """One run."""
    apart = {"vllm_num_engines": engines} if "Ray" in side else {}
    made = trainer(side, seed, updates, per_device_train_batch_size=prompts, **apart)
    begin = time.perf_counter()
    made.train()
    seconds = time.perf_counter() - begin
    close = getattr(made.engine.rollout_engine, "close", None)
    if close is not None:
        close()
    rows = [row for row in made.state.log_history if "objective/scores" in row]
    scores = [row["objective/scores"] for row in rows]
    return {
        "side": side,
        "seed": seed,
        "scores": scores,
        "kl": [row["objective/kl"] for row in rows],
        "kl_of_own_samples": kl_of_own_samples(made.model),
        "logprob_gap": max(row.get("rollout/logprob_gap", 0.0) for row in rows),
        "stale_gap": max(row.get("rollout/stale_gap", 0.0) for row in rows),
        "lag_max": max(row.get("rollout/lag_max", 0.0) for row in rows),
        "too_old_tokens": [row.get("rollout/too_old_tokens", 0.0) for row in rows],
        "first": scores[0],
        "last_five": sum(scores[-5:]) / len(scores[-5:]),
        "seconds": seconds,
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0])
    flags.add_argument("--updates", type=int, default=40)
    flags.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    flags.add_argument("--engines", type=int, default=2)
    flags.add_argument("--prompts", type=int, default=64, help="of an iteration")
    flags.add_argument("--append", action="store_true", help="keep the recorded runs")
    flags = flags.parse_args()
    out = RESULTS / "stories_on_ray.json"
    runs = json.loads(out.read_text()) if flags.append and out.exists() else []
    RESULTS.mkdir(exist_ok=True)
    for seed in flags.seeds:
        for side in flags.sides:
            runs.append(run(side, seed, flags.updates, flags.engines, flags.prompts))
            told = {
                k: v for k, v in runs[-1].items() if k not in ("scores", "kl", "too_old_tokens")
            }
            print(json.dumps(told), flush=True)
            out.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
