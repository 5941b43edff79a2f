"""Peak resident memory of one rank of PPO: one process, and FSDP over two gloo ranks.

    python -m benchmarks.sharded_memory [--layers 12] [--width 1024] [--iterations 3]

PPO with a value model and a reference, each of the policy's size, float32, AdamW, on random weights
that are loaded from a folder; the reward is a function.  Both runs train on the same prompts with
the same global batch, write a checkpoint and export the models; then their metrics and exported
weights are compared.  Peaks are the kernel's high-water marks (``VmHWM``), reset at each phase.
``import`` is the resident memory after all imports, before anything is built: ratios are given
with and without it.  Resident memory includes what the allocator keeps and shared libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sharded_memory.json"
ROWS, WORDS, RESPONSE, VOCABULARY = 4, 12, 16, 2048
METRICS = ("objective/kl", "objective/scores", "loss/policy_avg", "loss/value_avg", "grad_norm")


def status(name: str) -> float:
    """VmHWM (peak) or VmRSS (now) of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:")) / 1024


def make_models(folder: Path, layers: int, width: int) -> int:
    """Write policy, value model and tokenizer; the number of the policy's weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from kedge.testing import tiny_policy, tiny_reward_model

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "layers": layers,
        "heads": width // 64,
        "intermediate_size": width * 11 // 4,
    }
    policy = tiny_policy(**shape)
    words = ["<eos>", "<pad>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    policy.save_pretrained(folder / "policy")
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder / "policy")
    tiny_reward_model(**shape).save_pretrained(folder / "value")
    return sum(p.numel() for p in policy.parameters())


def work(folder: Path, name: str, iterations: int) -> None:
    """One rank: train, checkpoint, export; rank 0 and its peers write their peaks."""
    from transformers import TrainerCallback

    from kedge import PPOConfig, PPOTrainer
    from kedge.learner.learner import HFLearner

    assert HFLearner  # torch, transformers and accelerate are loaded
    world, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    peaks = {"import": status("VmRSS")}

    def end(phase: str) -> None:
        peaks[phase] = max(peaks.get(phase, 0.0), status("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    class Phases(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            end("iteration 1" if state.global_step == 1 else "later iterations")

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            end("checkpoint")

    out = folder / name
    end("import")
    trainer = PPOTrainer(
        PPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=ROWS // world,
            total_episodes=ROWS * iterations,
            num_mini_batches=1,
            num_ppo_epochs=1,
            response_length=RESPONSE,
            stop_token=None,
            learning_rate=1e-4,
            adam_epsilon=1e-4,  # Adam would blow rounding up to the size of the learning rate
            logging_steps=1,
            save_steps=iterations,
            num_sample_generations=0,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        model=str(folder / "policy"),
        value_model=str(folder / "value"),
        reward_funcs=lambda completions, **_: [c.count("1") / RESPONSE for c in completions],
        train_dataset=[
            {"prompt": " ".join(f"w{(7 * i + j) % 99}" for j in range(WORDS))} for i in range(16)
        ],
        callbacks=[Phases()],
    )
    end("load")
    trainer.train()
    end("end")
    trainer.save_model(str(out / "export"))
    end("export")
    rows = [{k: r[k] for k in METRICS} for r in trainer.state.log_history if "grad_norm" in r]
    (folder / f"{name}-{rank}.json").write_text(json.dumps({"peaks": peaks, "rows": rows}))
    if world > 1:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)


def launch(folder: Path, name: str, world: int, iterations: int, **env: str) -> list[Any]:
    """What each rank of a run wrote."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    ranks = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.sharded_memory"]
        command += ["--work", str(folder), name, "--iterations", str(iterations)]
        ranks.append(subprocess.Popen(command, env=os.environ | own | env, cwd=ROOT))
    if any([process.wait() for process in ranks]):
        raise SystemExit(f"a rank of {name!r} failed")
    return [json.loads((folder / f"{name}-{r}.json").read_text()) for r in range(world)]


def compare(folder: Path) -> float:
    """The largest difference between the exported weights of the two runs."""
    from safetensors.torch import load_file

    worst = 0.0
    for part in ("export/model.safetensors", "export/value_model/model.safetensors"):
        one, two = (load_file(folder / run / part) for run in ("whole", "sharded"))
        assert set(one) == set(two)
        worst = max(worst, *(float((x - two[n]).abs().max()) for n, x in one.items()))
    return worst


def measure(layers: int, width: int, iterations: int) -> dict[str, Any]:
    """Both runs, one after the other."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        weights = make_models(folder, layers, width)
        (whole,) = launch(folder, "whole", 1, iterations)
        sharded = launch(folder, "sharded", 2, iterations, ACCELERATE_USE_FSDP="true")
        difference = compare(folder)
    peak = max(whole["peaks"].values())
    ratios = []
    for rank in sharded:
        most, base = max(rank["peaks"].values()), rank["peaks"]["import"]
        above = (most - base) / (peak - whole["peaks"]["import"])
        ratios.append({"absolute": most / peak, "above_import": above})
    gaps = [
        max(abs(a[k] - b[k]) for k in METRICS)
        for a, b in zip(whole["rows"], sharded[0]["rows"], strict=True)
    ]
    return {
        "command": "python -m benchmarks.sharded_memory "
        f"--layers {layers} --width {width} --iterations {iterations}",
        "processor": _processor(),
        "weights_per_model": weights,
        "model_mib": weights * 4 / 2**20,
        "unit": "MiB of resident memory",
        "whole": whole,
        "sharded": sharded,
        "ratio_of_peaks": ratios,
        "largest_metric_difference": max(gaps),
        "largest_weight_difference": difference,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ")[1] for x in lines if "model name" in x), platform.processor())


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Path(options.work[0]), options.work[1], options.iterations)
        return
    results = measure(options.layers, options.width, options.iterations)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({k: v for k, v in results.items() if k not in {"whole", "sharded"}}, indent=1))


if __name__ == "__main__":
    main()
