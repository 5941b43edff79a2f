"""PPO on any prompts, with a reward model or a random one.

    python examples/scripts/ppo/ppo.py \
        --model_name_or_path MODEL --sft_model_path MODEL --reward_model_path REWARD \
        --dataset_name PROMPTS --learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 \
        --per_device_train_batch_size 64 --total_episodes 10000 \
        --missing_eos_penalty 1.0 --output_dir models/minimal/ppo

MODEL, REWARD and PROMPTS are folders, or names on the Hugging Face hub.  Without
--reward_model_path the reward is a head with random weights; without --dataset_name the prompts
are the openings below: enough for a smoke test.  The flags are those of `kedge ppo`.
"""

import sys

from kedge.cli.arguments import parse
from kedge.cli.main import run_command
from kedge.cli.ppo import train

OPENINGS = ("The film was", "I went to", "My friend said", "Once there was", "We never", "In the")
ENDINGS = ("", " very", " so", " not", " almost", " always", " the", " a")


def main(argv: list[str]) -> None:
    options = parse(
        argv, prog="ppo.py", defaults={"overwrite_output_dir": True, "dummy_reward": True}
    )
    prompts = None
    if options.script.dataset_name is None:
        prompts = [{"prompt": opening + ending} for opening in OPENINGS for ending in ENDINGS]
    train(options, train_dataset=prompts)


if __name__ == "__main__":
    if code := run_command(main, sys.argv[1:], name="ppo.py"):
        sys.exit(code)  # only on failure, so that `python -i` stays interactive
