"""kedge async-ppo on one machine of Modal: vLLM samples on some GPUs, learners train on the others.

    modal run examples/cloud/modal_app.py --model Qwen/Qwen2.5-0.5B-Instruct

From a checkout of Kedge with prompts.jsonl and reward.py in it.  The volume ``kedge-runs`` keeps
the checkpoints: run the command again to go on.  Modal's own package accepts this file; it was
never run, since no account was at hand.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import modal

CHECKOUT, RUNS = "/kedge", "/runs"
GPUS, ENGINES = 8, 4

image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("git", "bubblewrap")
    .env({"SETUPTOOLS_SCM_PRETEND_VERSION": "0.1.0"})
    .add_local_dir(".", CHECKOUT, copy=True, ignore=[".git", ".venv", "runs"])
    .run_commands(f"pip install -e '{CHECKOUT}[vllm,ray,peft]'")
)
app = modal.App("kedge-async-ppo", image=image)
runs = modal.Volume.from_name("kedge-runs", create_if_missing=True)


def command(model: str, prompts: str, reward: str, name: str) -> list[str]:
    """The arguments of ``kedge``."""
    return [
        *("async-ppo", "--model_name_or_path", model, "--reward_funcs", reward),
        *("--dataset_mixer_list", prompts, "1.0", "--local_rollout_batch_size", "16", "--bf16"),
        *("--vllm_num_engines", str(ENGINES), "--actor_num_gpus_per_node", str(GPUS - ENGINES)),
        *("--output_dir", f"{RUNS}/{name}"),
    ]


@app.function(gpu=f"H100:{GPUS}", volumes={RUNS: runs}, timeout=24 * 3600)
def train(model: str, prompts: str, reward: str, name: str) -> None:
    """Train; a run that has a checkpoint goes on from it."""
    resume = ["--resume_from_checkpoint"] if [*Path(RUNS, name).glob("checkpoint-*")] else []
    arguments = [*command(model, prompts, reward, name), *resume]
    try:
        subprocess.run(["kedge", *arguments], cwd=CHECKOUT, check=True)
    finally:
        runs.commit()


@app.local_entrypoint()
def main(
    model: str = "Qwen/Qwen2.5-0.5B-Instruct",
    prompts: str = "prompts.jsonl",
    reward: str = "reward.py:short",
    name: str = "async-ppo",
) -> None:
    """Start ``train`` on Modal and show what it prints."""
    train.remote(model, prompts, reward, name)
