#!/usr/bin/env bash
# PPO from Llama-3.1-Tulu-3-8B-DPO on verifiable rewards: two machines of eight GPUs, twelve learners and
# one vLLM on four GPUs.  open-instruct's command for Llama-3.1-Tulu-3-8B, with one change of memory and
# none of the objective, so that it fits GPUs of 80 GB by `kedge plan async-ppo`: deepspeed_stage 3 instead
# of 2.  Not run by us: the flags were tried with tiny models in one process.
# Start Ray on both (docs/ray.md): set RAY_AUTH_MODE=token, make a token on the first machine with
# `ray get-auth-token --generate`, copy ~/.ray/auth_token to the second, then
# `ray start --head --port=6379` and `ray start --address=HEAD:6379`.  On the first:
#   bash scripts/train/tulu3/ppo_8b.sh [more flags of kedge async-ppo; the last of a kind wins]
set -euo pipefail
exec kedge async-ppo \
    --exp_name tulu3_8b_ppo \
    --output_dir output/tulu3_8b_ppo \
    --ray_address auto \
    --beta 0.05 \
    --learning_rate 3e-7 \
    --total_episodes 2000000 \
    --local_mini_batch_size 16 \
    --local_rollout_batch_size 16 \
    --local_rollout_forward_batch_size 2 \
    --per_device_train_batch_size 2 \
    --dataset_mixer_list allenai/RLVR-GSM-MATH-IF-Mixed-Constraints 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list allenai/RLVR-GSM-MATH-IF-Mixed-Constraints 16 \
    --dataset_mixer_eval_list_splits train \
    --max_token_length 2048 \
    --max_prompt_token_length 2048 \
    --response_length 2048 \
    --model_name_or_path allenai/Llama-3.1-Tulu-3-8B-DPO \
    --reward_model_path allenai/Llama-3.1-Tulu-3-8B-RM \
    --non_stop_penalty \
    --stop_token eos \
    --temperature 1.0 \
    --ground_truths_key ground_truth \
    --chat_template_name tulu \
    --sft_messages_key messages \
    --penalty_reward_value -10.0 \
    --deepspeed_stage 3 \
    --vllm_sync_backend nccl \
    --actor_num_gpus_per_node 4 8 \
    --vllm_num_engines 1 \
    --vllm_tensor_parallel_size 4 \
    --apply_verifiable_reward true \
    --reward_model_multiplier 0.0 \
    --seed 1 \
    --num_evals 100 \
    --save_freq 80 \
    --gradient_checkpointing \
    --with_tracking \
    "$@"
