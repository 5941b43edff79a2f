"""PPO for TL;DR summaries: posts of at most 512 tokens, responses of 53 (arXiv:2403.17031).

    accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml \
        examples/scripts/ppo/ppo_tldr.py \
        --model_name_or_path MODEL --sft_model_path SFT --reward_model_path REWARD \
        --dataset_name PROMPTS --learning_rate 3e-6 --per_device_train_batch_size 16 \
        --gradient_accumulation_steps 4 --total_episodes 1000000 \
        --local_rollout_forward_batch_size 16 --missing_eos_penalty 1.0 --stop_token eos \
        --output_dir models/minimal/ppo_tldr

The flags are those of `kedge ppo`.
"""

import sys

from kedge.cli.arguments import parse
from kedge.cli.main import run_command
from kedge.cli.ppo import train

DEFAULTS = {
    "overwrite_output_dir": True,
    "dummy_reward": True,
    "dataset_name": "trl-lib/tldr",
    "dataset_test_split": "validation",
    "max_prompt_length": 512,  # longer posts are dropped
    "response_length": 53,
}


def main(argv: list[str]) -> None:
    train(parse(argv, prog="ppo_tldr.py", defaults=DEFAULTS))


if __name__ == "__main__":
    if code := run_command(main, sys.argv[1:], name="ppo_tldr.py"):
        sys.exit(code)  # only on failure, so that `python -i` stays interactive
