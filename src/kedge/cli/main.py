"""``kedge``: runs a command and prints errors on one line."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

from kedge.trainers import TRAINERS

_RUNS = "kedge.ext.report.command"
# Command -> its module, and its line in ``kedge --help``.
_COMMANDS = {
    "demo": (
        "kedge.demo.demo",
        "train a small model with RLHF from nothing, in about four minutes on a CPU",
    ),
    **{name: ("kedge.cli.train.ppo", text) for name, (_, text) in TRAINERS.items()},
    "async-ppo": ("kedge.ext.open_instruct.command", TRAINERS["async-ppo"][1]),
    "sft": (
        "kedge.ext.before_rl.sft_command",
        "supervised fine-tuning before RL, with TRL's trainer",
    ),
    "reward": (
        "kedge.ext.before_rl.reward_command",
        "train a reward model on preferences, with TRL's trainer",
    ),
    "pipeline": (
        "kedge.cli.tools.pipeline",
        "run several commands in order, resumable: sft, reward, ppo, generate, judge",
    ),
    "plan": (
        "kedge.ext.plan.command",
        "show batch sizes and estimated memory of a run without loading weights",
    ),
    "compare": (_RUNS, "plot several runs in one figure, with bands over seeds"),
    "init": (
        "kedge.ext.before_rl.init_command",
        "write a commented configuration for a task and a model size",
    ),
    "doctor": (_RUNS, "diagnose a run from its log and suggest fixes"),
    "report": (_RUNS, "write an HTML report of a run: curves, completions, tokens"),
    "expert": (
        "kedge.ext.before_rl.expert_command",
        "write episodes of an environment's expert, to train a first policy on",
    ),
    "generate": ("kedge.cli.tools.generate", "sample completions of prompts with a model"),
    "value": (
        "kedge.ext.before_rl.value_command",
        "train a value model on recorded rollouts, and check it before PPO relies on it",
    ),
    "judge": (
        "kedge.ext.judge.command",
        "compare two sets of completions: win rate with a confidence interval",
    ),
    "serve-reward": (
        "kedge.ext.serve.command",
        "serve reward functions over HTTP to trainers on other machines",
    ),
}
# Commands whose module has several.
_SHARED = {"ppo", "rloo", "grpo", "compare", "doctor", "report"}
COMMANDS = {name: text for name, (_, text) in _COMMANDS.items()}

EXAMPLE = """\
example:
  kedge ppo --model_name_or_path MODEL --dataset_name prompts.jsonl \\
      --reward_funcs rewards.py:length --stop_token eos --total_episodes 10000 --output_dir runs/a
  kedge plan ppo ...         the same flags: batch sizes and estimated memory

MODEL is a folder or a name on the Hugging Face hub.  `kedge ppo --help` lists every flag;
--config FILE.yaml reads them from a file; flags on the command line override it.
KEDGE_TRACEBACK=1 prints the full traceback of an error."""


def usage() -> str:
    """The text of ``kedge --help``."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}   {text}" for name, text in COMMANDS.items())
    return (
        "usage: kedge COMMAND [flags]\n\n"
        "Train language models with the PPO family of reinforcement learning.\n\n"
        f"commands:\n{commands}\n\n  --version   print the version\n  --help      print this\n\n"
        f"{EXAMPLE}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code, as ``run_command``."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version"):
        from kedge import __version__

        print(f"kedge {__version__}")
        return 0
    name, *rest = args
    name = {"recipes": "init"}.get(name, name)
    if not sys.stderr.isatty():  # no progress bars in log files
        for package in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{package}_DISABLE_PROGRESS_BARS", "1")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(
            f"kedge: error: unknown command {name!r}{hint} (commands: {', '.join(COMMANDS)})",
            file=sys.stderr,
        )
        return 2
    return run_command(load_command(name), rest, name=f"kedge {name}")


def find_module(name: str) -> ModuleType:
    """The module of a command in ``COMMANDS``."""
    return importlib.import_module(_COMMANDS[name][0])


def load_command(name: str) -> Callable[[list[str]], object]:
    """The ``main`` function of a command in ``COMMANDS``."""
    command: Callable[..., object] = find_module(name).main
    return partial(command, command=name) if name in _SHARED else command


def run_command(command: Callable[[list[str]], object], argv: Sequence[str], *, name: str) -> int:
    """Run ``command(argv)``; print an error that the user can fix on one line.

    Returns the exit code: the command's if it returns an integer, else 0; 2 for such an error, 130
    when interrupted.
    """
    from kedge.loop.shutdown import exit_on_signals
    from kedge.records.errors import KedgeError
    from kedge.redaction import redact_words

    redact_words(argv)  # registers secrets, to blank them in errors
    try:
        with exit_on_signals():
            code = command(list(argv))
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (KedgeError, OSError) as error:
        if os.environ.get("KEDGE_TRACEBACK", "0") not in ("", "0"):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)  # no control codes
        print(f"{name}: error: {text}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):  # notes hold the traceback of the user's code
            print(note, file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
