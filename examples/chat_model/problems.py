"""Word problems and a calculator: an environment, solved episodes, and a comparison.

python examples/chat_model/problems.py                            solved episodes for kedge sft
python examples/chat_model/problems.py --methods "PPO, tokens"    supervised start, PPO, success

``WordProblems`` is for ``--environment examples/chat_model/problems.py:WordProblems``.  Methods of
a seed start from the same supervised model and train on the same number of episodes; finished
stages are not repeated.  The model is that of ``convert.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.environments import Response, ToolEnvironment
from kedge.environments.success import measure_success

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Henry", "Jack", "Lena", "Nora", "Paul", "Tom"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "flowers", "shells", "stamps", "tickets"]
PROBLEMS = {  # the result is negative in none
    "{name} has {a} {things}, buys {b} more and gives away {c}. How many are left?": "{a}+{b}-{c}",
    "{name} has {a} {things}, sells {c} and finds {b}. How many are there now?": "{a}-{c}+{b}",
    "{name} has {b} boxes with {c} {things} each, and {a} more. How many in all?": "{b}*{c}+{a}",
    "{b} children get {c} {things} each. There were {d}. How many are left?": "{d}-{b}*{c}",
    "{name} finds {c} {things} a day for {b} days, loses {e}. How many are left?": "{b}*{c}-{e}",
    "{name} has {a} {things}, Sam has {b} and Kim has {c}. How many in all?": "{a}+{b}+{c}",
}


def calculator(expression: str) -> int:
    """Compute.

    Args:
        expression: Numbers with +, - and *.
    """
    if not re.fullmatch(r"\d+( *[-+*] *\d+)*", expression):
        raise ValueError("write numbers with +, - and * between them")
    return int(eval(expression, {"__builtins__": {}}))  # digits and operators alone


def draw_problem(seed: int) -> tuple[str, str]:
    """A problem, and the expression that solves it."""
    rng = random.Random(f"problem {seed}")
    text, expression = rng.choice(list(PROBLEMS.items()))
    b, c = rng.randint(11, 99), rng.randint(11, 99)
    numbers = {"a": rng.randint(100, 999), "b": b, "c": c, "d": b * c + rng.randint(11, 999)}
    numbers["e"] = rng.randint(11, b * c - 1)
    words = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    return text.format(**words, **numbers), expression.format(**numbers)


class WordProblems(ToolEnvironment):
    """One problem per episode; reward 1 if the final answer has the result as its only number."""

    def __init__(self, tool: bool = True) -> None:
        super().__init__([calculator] if tool else [])

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        """Ask a question."""
        super().reset(seed=seed, options=options)
        question, expression = draw_problem(seed)
        self._result = str(calculator(expression))
        return question, {}

    def step(self, response: Response) -> Any:
        """Make calls, or read the answer."""
        if response.tool_calls:
            return super().step(response)
        right = float(re.findall(r"-?\d+", response.text) == [self._result])
        return None, right, True, False, {"metrics": {"success": right}}


def solve(seed: int, tool: bool) -> dict[str, Any]:
    """A solved episode, with the tool or without."""
    question, expression = draw_problem(seed)
    result = str(calculator(expression))
    function = {"name": "calculator", "arguments": {"expression": expression}}
    calls = [{"type": "function", "function": function}]
    between = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "calculator", "content": result},
    ]
    messages = [
        {"role": "user", "content": question},
        *(between if tool else []),
        {"role": "assistant", "content": result},
    ]
    return {"messages": messages} | ({"tools": WordProblems().tools} if tool else {})


LIMITS = "--response_length 120 --max_turn_tokens 48 --max_turns 3 --temperature 1.0"
TRAIN = "--gradient_checkpointing False --save_strategy no --disable_tqdm True"
SFT = (
    f"sft {TRAIN} --assistant_only_loss True --per_device_train_batch_size 8 --num_train_epochs 1"
    " --learning_rate 1e-4 --lr_scheduler_type constant"
)
RL = (
    f"{TRAIN} {LIMITS} --per_device_train_batch_size 32 --train_layers 8 --learning_rate 1e-4"
    " --lr_scheduler_type linear --num_sample_generations 0 --logging_steps 1"
)
PPO = (  # 32 problems an iteration: with few, the most frequent operator takes over
    f"ppo {RL} --num_ppo_epochs 1 --num_mini_batches 2 --kl_coef 0.05 --lam 1.0"
    " --value_learning_rate 3e-4 --vf_coef 0.01"
)
METHODS = {
    "PPO, turns": f"{PPO} --credit turn",
    "PPO, tokens": PPO,
    "GRPO": f"grpo {RL} --num_mini_batches 2 --num_generations 4 --beta 0.05",
}


def run(command: str, made: Path, **options: Any) -> None:
    """Run a command of kedge, unless what it makes is there."""
    if not made.exists():
        words = [word for name, x in options.items() for word in (f"--{name}", str(x))]
        subprocess.run([sys.executable, "-m", "kedge", *command.split(), *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("runs/chat/model"))
    parser.add_argument("--output_dir", type=Path, default=Path("runs/chat/problems"))
    parser.add_argument("--episodes", type=int, default=64, help="solved ones, for kedge sft")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), help="none: episodes alone")
    parser.add_argument("--iterations", type=int, default=20, help="of 32 episodes")
    parser.add_argument("--evaluated", type=int, default=200, help="episodes on new seeds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no_tool", action="store_true", help="answers without a calculator")
    parser.add_argument("--bf16", action="store_true", help="where the processor has it")
    args = parser.parse_args()
    folder, tool = args.output_dir / f"{'no_tool_' * args.no_tool}{args.seed}", not args.no_tool
    folder.mkdir(parents=True, exist_ok=True)
    solved = folder / "solved.jsonl"
    first = 10**6 * args.seed
    rows = (json.dumps(solve(n, tool)) + "\n" for n in range(first, first + args.episodes))
    solved.write_text("".join(rows))
    if args.methods is None:
        return
    game = {
        "environment": f"{Path(__file__)}:WordProblems",
        "environment_kwargs": json.dumps({"tool": tool}),
        "seed": args.seed,
    }
    train = {"seed": args.seed, "bf16": args.bf16}
    start = {"model_name_or_path": args.model, "dataset_name": solved, "output_dir": folder / "sft"}
    run(SFT, folder / "sft" / "config.json", **train, **start)
    for name in ("model", "sft", *args.methods):
        place = args.model if name == "model" else folder / name.lower().replace(", ", "-")
        if name in METHODS:
            start = {"model_name_or_path": folder / "sft", "output_dir": place}
            more = {"max_steps": args.iterations}
            run(METHODS[name], place / "config.json", **train | game | start | more)
        output = folder / f"{place.name}.jsonl"
        sizes = {"episodes": args.evaluated, "output": output}
        run(f"generate {place} {LIMITS}", output, **game, **sizes)
        found = measure_success([json.loads(line) for line in output.read_text().splitlines()])
        print(f"{name}: {found['success']:.1%} ({found['low']:.1%} to {found['high']:.1%})")


if __name__ == "__main__":
    main()
