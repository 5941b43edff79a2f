"""Asynchronous PPO at open-instruct's path; the flags are those of `kedge async-ppo`."""

import sys

from kedge.cli.main import run_command
from kedge.ext.open_instruct.command import main

if __name__ == "__main__":
    if code := run_command(main, sys.argv[1:], name="ppo_vllm_thread_ray_gtrl.py"):
        sys.exit(code)
