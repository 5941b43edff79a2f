"""The text world with what the study of critics found: no value warm-up, and fewer iterations.

python benchmarks/speedrun/fast_agent.py --output_dir D --seed 0
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "agent"))
from agent import BY_TOKENS, METHODS, TASKS, VALUE, Sizes, evaluate, supervise, train

from kedge import PPOConfig, PPOTrainer

flags = argparse.ArgumentParser()
flags.add_argument("--output_dir", type=Path, required=True)
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--iterations", type=int, default=40)
args = flags.parse_args()
task, sizes = TASKS["text world"], Sizes(iterations=args.iterations)
options = VALUE | BY_TOKENS | {"value_source": "copy", "value_warmup_steps": 0}
METHODS["fast"] = (PPOTrainer, PPOConfig, options)
supervise(task, args.output_dir, sizes, args.seed)
train(task, args.output_dir / "sft", args.output_dir / "ppo", sizes, args.seed, "fast")
found = evaluate(task, args.output_dir / "ppo", sizes.evaluated, args.seed)
(args.output_dir / "summary.json").write_text(json.dumps({"ppo": found}) + "\n")
print(f"{found['success']:.1%} of {sizes.evaluated} new worlds")
