"""Tokens per second that the embedded engine and vLLM sample on a GPU, in bf16.

    python -m benchmarks.gpu.sampling [--shapes qwen2.5-0.5b] [--batches 64 512] [--output X.json]

Random weights, prompts of 32 to 128 tokens, responses of exactly 256.  Each engine runs in a
process; the first batch of a size is warm-up, and the best of two others counts.  Both hold a
float32 learner on the same GPU, and record log-probabilities.  vLLM is measured with and without
CUDA graphs; a weight sync is timed as the best of two, with its verification.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import PROMPT, build_models, build_prompts

ROOT = Path(__file__).parents[2]
ENGINES = ("embedded", "vllm", "vllm-eager")
CUDA = torch.cuda.is_available()


def build_engine(name: str, policy: Any) -> Any:
    from kedge.ext.vllm import InProcess, PolicyTemplate, VLLMEngine
    from kedge.models.fingerprint import policy_weights
    from kedge.rollout.embedded.engine import EmbeddedEngine

    dtype = torch.bfloat16 if CUDA else torch.float32
    if name == "embedded":
        return EmbeddedEngine(policy, pad_id=1, chunk_rows=64, autocast=dtype if CUDA else None)
    spec = PolicyTemplate.of(policy, dtype=dtype)
    arguments = {"dtype": str(dtype).removeprefix("torch."), "max_model_len": 1024}
    arguments |= {"enforce_eager": name == "vllm-eager"} if CUDA else {}
    return VLLMEngine(InProcess(spec, policy_weights(policy), arguments), spec, pad_id=1)


def prompt_batch(shape: str, rows: int) -> Any:
    from kedge.records.types import PromptBatch

    prompts = build_prompts(shape, rows)
    ids = torch.ones(rows, PROMPT, dtype=torch.int64)
    mask = torch.zeros(rows, PROMPT, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, PROMPT - len(prompt) :] = torch.tensor(prompt)
        mask[row, PROMPT - len(prompt) :] = True
    number = torch.arange(rows)
    device = "cuda" if CUDA else "cpu"
    return PromptBatch(ids=ids, mask=mask, group=number, row=number).to(device)


def seconds(work: Any) -> float:
    """Wall time of ``work()``, the device idle at both ends."""
    if CUDA:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def side(name: str, shape: str, batches: list[int], response: int) -> dict[str, Any]:
    from kedge.models.fingerprint import policy_weights
    from kedge.records.types import Sampling

    policy = build_models(shape, all_four=False)["policy"]
    engines: list[Any] = []
    start = seconds(lambda: engines.append(build_engine(name, policy)))
    report: dict[str, Any] = {"engine": name, "shape": shape, "start_seconds": round(start, 1)}
    sampling = Sampling(max_new_tokens=response)
    for rows in batches:
        prompts = prompt_batch(shape, rows)
        times = [
            seconds(lambda p=prompts, i=i: engines[0].generate(p, sampling=sampling, seed=i))
            for i in range(3)
        ]
        report[f"seconds_{rows}"] = [round(x, 3) for x in times]
        report[f"tokens_per_second_{rows}"] = round(rows * response / min(times[1:]))
    if name != "embedded":
        weights = policy_weights(policy)
        times = [seconds(lambda v=v: engines[0].load_weights(weights, v)) for v in (1, 2, 3)]
        report["sync_seconds"] = [round(x, 3) for x in times]
        report["sync_gap"] = engines[0].load_weights(weights, 4).gap
        engines[0].close()
    if CUDA:
        report["device"] = torch.cuda.get_device_name()
        report["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return report


def measure(name: str, shape: str, flags: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.sampling", "--side", name]
    command += ["--shapes", shape, "--response", str(flags.response)]
    command += ["--batches", *map(str, flags.batches)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=flags.seconds
        )
    except subprocess.TimeoutExpired:
        return {"engine": name, "shape": shape, "error": f"stopped after {flags.seconds:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            return json.loads(line.removeprefix("REPORT "))  # type: ignore[no-any-return]
    return {"engine": name, "shape": shape, "error": done.stderr[-1500:]}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--shapes", nargs="+", default=["qwen2.5-0.5b", "qwen2.5-1.5b"])
    flags.add_argument("--batches", nargs="+", type=int, default=[64, 512])
    flags.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    flags.add_argument("--response", type=int, default=256)
    flags.add_argument("--seconds", type=float, default=150, help="most seconds of one process")
    flags.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "records" / "gpu_sampling.json"
    )
    flags.add_argument("--side", choices=ENGINES, help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.side is not None:
        with contextlib.redirect_stdout(sys.stderr):
            report = side(args.side, args.shapes[0], args.batches, args.response)
        print("REPORT " + json.dumps(report))
        return
    reports = []
    for shape in args.shapes:
        for name in args.engines:
            reports.append(measure(name, shape, args))
            args.output.write_text(json.dumps(reports, indent=1) + "\n")
            print(json.dumps(reports[-1]), flush=True)


if __name__ == "__main__":
    main()
