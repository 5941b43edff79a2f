#!/usr/bin/env bash
# Asynchronous PPO on one GPU, to see that everything works: 32 episodes of grade-school mathematics.
#   bash scripts/train/debug/ppo.sh [more flags of kedge async-ppo; the last of a kind wins]
# Without a GPU, vLLM or the hub, the same run in this process on models and prompts of yours:
#   bash scripts/train/debug/ppo.sh --rollout_engine embedded --model_name_or_path MODEL \
#       --reward_model_path MODEL --dataset_mixer_list PROMPTS 1.0 --dataset_mixer_eval_list PROMPTS 16
set -euo pipefail
exec kedge async-ppo \
    --exp_name ppo_debug \
    --output_dir output/ppo_debug \
    --overwrite_output_dir \
    --dataset_mixer_list ai2-adapt-dev/rlvr_gsm8k_zs 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list ai2-adapt-dev/rlvr_gsm8k_zs 16 \
    --dataset_mixer_eval_list_splits train \
    --max_token_length 512 \
    --max_prompt_token_length 512 \
    --response_length 512 \
    --model_name_or_path Qwen/Qwen3-1.7B \
    --reward_model_path Qwen/Qwen3-1.7B \
    --non_stop_penalty \
    --stop_token eos \
    --temperature 1.0 \
    --ground_truths_key ground_truth \
    --chat_template_name tulu \
    --sft_messages_key messages \
    --learning_rate 3e-7 \
    --total_episodes 32 \
    --penalty_reward_value -10.0 \
    --deepspeed_stage 3 \
    --per_device_train_batch_size 1 \
    --local_rollout_forward_batch_size 1 \
    --local_mini_batch_size 4 \
    --local_rollout_batch_size 4 \
    --num_epochs 1 \
    --actor_num_gpus_per_node 1 \
    --vllm_tensor_parallel_size 1 \
    --beta 0.05 \
    --apply_verifiable_reward true \
    --seed 3 \
    --num_evals 3 \
    --save_freq 100 \
    --reward_model_multiplier 0.0 \
    --gradient_checkpointing \
    --single_gpu_mode \
    --vllm_sync_backend gloo \
    --vllm_gpu_memory_utilization 0.3 \
    --vllm_enforce_eager \
    "$@"
