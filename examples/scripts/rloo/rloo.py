"""RLOO on any prompts, with a reward model or a random one.

    python examples/scripts/rloo/rloo.py \
        --model_name_or_path MODEL --reward_model_path REWARD --dataset_name PROMPTS \
        --dataset_train_split descriptiveness --learning_rate 3e-6 \
        --per_device_train_batch_size 64 --gradient_accumulation_steps 1 --total_episodes 10000 \
        --missing_eos_penalty 1.0 --output_dir models/minimal/rloo

MODEL, REWARD and PROMPTS are folders, or names on the Hugging Face hub.  Without
--reward_model_path the reward is a head with random weights.  The flags are those of `kedge rloo`.
"""

import sys

from kedge import RLOOConfig
from kedge.cli.arguments import parse
from kedge.cli.main import run_command
from kedge.cli.ppo import train


def main(argv: list[str]) -> None:
    defaults = {"overwrite_output_dir": True, "dummy_reward": True}
    train(parse(argv, prog="rloo.py", defaults=defaults, config=RLOOConfig))


if __name__ == "__main__":
    if code := run_command(main, sys.argv[1:], name="rloo.py"):
        sys.exit(code)  # only on failure, so that `python -i` stays interactive
