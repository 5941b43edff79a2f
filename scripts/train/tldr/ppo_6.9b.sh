#!/usr/bin/env bash
# PPO at 6.9B on TL;DR summaries: 100,000 episodes on eight GPUs, weights sharded (ZeRO 3).  TRL's command,
# for which TRL published no result.  Not run by us: the file was tried with tiny models on a CPU only.
#   bash scripts/train/tldr/ppo_6.9b.sh [more flags of kedge ppo; the last of a kind wins]
# LAUNCH_CONFIG: another launch file of examples/accelerate_configs.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec accelerate launch --config_file "${LAUNCH_CONFIG:-examples/accelerate_configs/deepspeed_zero3.yaml}" \
    examples/scripts/ppo/ppo_tldr.py \
    --output_dir models/minimal/ppo_tldr_6.9b \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 64 \
    --total_episodes 100000 \
    --model_name_or_path EleutherAI/pythia-6.9b-deduped \
    --sft_model_path cleanrl/EleutherAI_pythia-6.9b-deduped__sft__tldr \
    --reward_model_path cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr \
    --local_rollout_forward_batch_size 2 \
    --non_eos_penalty \
    --stop_token eos \
    "$@"
