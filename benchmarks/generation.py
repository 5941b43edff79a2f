"""Sampling: the embedded engine, vLLM in the same process, and ``transformers.generate``.

    python -m benchmarks.generation [--shapes 14m 160m] [--batches 1 16 64 256] [--rounds 2]

Needs an environment with vLLM.  Each engine runs in a process of its own, in turn; every row gets
32 prompt tokens and exactly 32 new ones, so that all do the same work.  Tokens per second are of
CPU time, which other programs on the machine disturb less than wall time, on one thread unless
``--threads`` says otherwise; the least of the rounds counts, and the first batch is warm-up.
Kedge's engines record log-probabilities, ``generate`` does not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "records" / "generation.json"
ENGINES = ("embedded", "vllm", "generate")
PROMPT = NEW = 32
SHAPES = {
    "14m": {"hidden_size": 128, "intermediate_size": 512, "layers": 6, "heads": 4},
    "160m": {"hidden_size": 768, "intermediate_size": 3072, "layers": 12, "heads": 12},
}
VOCABULARY = 50_304


def policy(shape: str, family: str) -> Any:
    """A random model of pythia's shape, or a Llama of the same width and depth."""
    from kedge.testing import tiny_policy

    about = dict(SHAPES[shape])
    inner = about.pop("intermediate_size")
    return tiny_policy(
        family, vocab_size=VOCABULARY, max_positions=512, intermediate_size=inner, **about
    ).eval()


def sampler(engine: str, model: Any) -> Any:
    """A function of a batch of prompts int64 [rows, PROMPT] and a seed that samples NEW tokens."""
    from kedge.records.types import PromptBatch, Sampling

    if engine == "generate":

        def generate(ids: torch.Tensor, seed: int) -> Any:
            torch.manual_seed(seed)
            about = {"do_sample": True, "top_k": 0, "temperature": 0.7, "pad_token_id": 1}
            about |= {"min_new_tokens": NEW, "max_new_tokens": NEW}
            return model.generate(ids, attention_mask=torch.ones_like(ids), **about)

        return generate
    rollouts = made(engine, model)
    sampling = Sampling(max_new_tokens=NEW, temperature=0.7)

    def sample(ids: torch.Tensor, seed: int) -> Any:
        rows = torch.arange(len(ids))
        batch = PromptBatch(ids=ids, mask=torch.ones_like(ids).bool(), group=rows, row=rows)
        return rollouts.generate(batch, sampling=sampling, seed=seed)

    return sample


def made(engine: str, model: Any) -> Any:
    """One of Kedge's engines."""
    from kedge.models.fingerprint import policy_weights
    from kedge.rollout.embedded.engine import EmbeddedEngine

    if engine == "embedded":
        return EmbeddedEngine(model, pad_id=1, chunk_rows=256)
    from kedge.ext.vllm import InProcess, PolicyTemplate, VLLMEngine

    spec = PolicyTemplate.of(model)
    arguments = {"max_num_seqs": 256, "max_num_batched_tokens": 256 * PROMPT}
    return VLLMEngine(InProcess(spec, policy_weights(model), arguments), spec, pad_id=1)


def side(engine: str, shape: str, family: str, batches: list[int]) -> None:
    """Time one engine; prints a report."""
    run = sampler(engine, policy(shape, family))
    rng = torch.Generator().manual_seed(0)
    seconds = {}
    for rows in [min(batches), *batches]:
        ids = torch.randint(2, VOCABULARY, (rows, PROMPT), generator=rng)
        begin, worked = time.perf_counter(), time.process_time()
        run(ids, rows)
        seconds[rows] = time.perf_counter() - begin, time.process_time() - worked
    print("REPORT " + json.dumps(seconds))


def one(engine: str, shape: str, family: str, flags: Any) -> dict[int, list[float]]:
    """One process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.generation", "--side", engine]
    command += ["--shapes", shape, "--family", family, "--batches", *map(str, flags.batches)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {"OMP_NUM_THREADS": str(flags.threads), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            return {int(k): x for k, x in json.loads(line[len("REPORT ") :]).items()}
    raise RuntimeError(f"{engine} on {shape} failed:\n{done.stderr[-3000:]}")


def compare(shape: str, family: str, flags: Any) -> list[dict[str, Any]]:
    """All engines in turn, round after round."""
    raw: dict[str, list[dict[int, list[float]]]] = {engine: [] for engine in ENGINES}
    for _ in range(flags.rounds):
        for engine in ENGINES:
            raw[engine].append(one(engine, shape, family, flags))
    rows = []
    for batch in flags.batches:
        best = {e: min(r[batch][1] for r in found) for e, found in raw.items()}
        wall = {e: min(r[batch][0] for r in found) for e, found in raw.items()}
        rate = {f"{e}_tokens_per_second": batch * NEW / s for e, s in best.items()}
        rows.append({"family": family, "shape": shape, "batch": batch, "cpu_seconds": best, **rate})
        rows[-1]["wall_seconds"] = wall
        rows[-1]["all_seconds"] = {e: [r[batch] for r in found] for e, found in raw.items()}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--families", nargs="+", default=["gpt_neox", "llama"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--family", default="gpt_neox", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.side:
        side(flags.side, flags.shapes[0], flags.family, flags.batches)
        return
    import transformers
    import vllm

    about = {"torch": torch.__version__, "transformers": transformers.__version__}
    about |= {"vllm": vllm.__version__, "threads": flags.threads}
    about |= {"processor": platform.processor() or platform.machine()}
    about |= {"load_before": os.getloadavg()}
    results: list[dict[str, Any]] = []
    for shape in flags.shapes:
        for family in flags.families:
            results += compare(shape, family, flags)
            for row in results[-len(flags.batches) :]:
                print(json.dumps({k: v for k, v in row.items() if k != "all_seconds"}), flush=True)
            RESULTS.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
