#!/usr/bin/env bash
# PPO at 1B on TL;DR summaries: one million episodes on eight GPUs.  TRL's command, and its result with TRL:
# 64.7% of 1,000 summaries preferred to the reference by gpt-4o-mini, 33.0% before.  Not run by us: the
# file was tried with tiny models on a CPU only.
#   bash scripts/train/tldr/ppo_1b.sh [more flags of kedge ppo; the last of a kind wins]
#   python examples/scripts/evals/judge_tldr.py --engine vllm --model_name_or_path models/minimal/ppo_tldr
# LAUNCH_CONFIG: another launch file of examples/accelerate_configs.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec accelerate launch --config_file "${LAUNCH_CONFIG:-examples/accelerate_configs/deepspeed_zero2.yaml}" \
    examples/scripts/ppo/ppo_tldr.py \
    --output_dir models/minimal/ppo_tldr \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 4 \
    --total_episodes 1000000 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
    --local_rollout_forward_batch_size 16 \
    --missing_eos_penalty 1.0 \
    --stop_token eos \
    "$@"
