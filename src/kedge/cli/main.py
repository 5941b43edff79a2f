"""``kedge``: pick a command, and turn errors into one clear line."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "ppo": "train a language model with PPO",
    "rloo": "train one with RLOO: several responses per prompt, no value model",
    "grpo": "train one with GRPO or one of its family",
    "async-ppo": "PPO whose engines sample on Ray with vLLM while the learners train",
    "sft": "train a supervised model, before RL, by TRL's trainer",
    "reward": "train a reward model from preferences, by TRL's trainer",
    "pipeline": "run commands one after another, resumable: sft, reward, ppo, generate, judge",
    "plan": "show the sizes and the memory of a run, before any weight is loaded",
    "compare": "draw runs over one another, with bands over seeds",
    "doctor": "say what is wrong with a run, from its log, and what to try",
    "report": "write one HTML page of a run: curves, completions, tokens",
    "generate": "sample answers of a model to prompts, by any engine",
    "judge": "say which of two sets of answers a judge prefers, with an interval",
    "serve-reward": "serve reward functions over HTTP, for trainers that run elsewhere",
}

_WHERE = {
    "ppo": "kedge.cli.train.ppo",
    "rloo": "kedge.cli.train.rloo",
    "grpo": "kedge.cli.train.grpo",
    "async-ppo": "kedge.cli.train.async_ppo",
    "sft": "kedge.cli.train.sft",
    "reward": "kedge.cli.train.reward",
    "pipeline": "kedge.cli.pipeline.pipeline",
    "plan": "kedge.cli.planning.plan",
    "compare": "kedge.cli.tools.compare",
    "doctor": "kedge.cli.tools.doctor",
    "report": "kedge.cli.tools.report",
    "generate": "kedge.cli.tools.generate",
    "judge": "kedge.cli.tools.judge",
    "serve-reward": "kedge.cli.tools.serve_reward",
}

EXAMPLE = """\
example:
  kedge ppo --model_name_or_path MODEL --dataset_name prompts.jsonl \\
      --reward_funcs rewards.py:length --stop_token eos --total_episodes 10000 --output_dir runs/a
  kedge plan ppo ...         the same flags: every size, and an estimate of the memory

MODEL is a folder or a name on the Hugging Face hub.  `kedge ppo --help` lists every flag;
--config FILE.yaml reads them from a file, and the command line wins.
KEDGE_TRACEBACK=1 shows where an error came from."""


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
    """Run a command.

    Returns:
        The exit code: 0, or 2 for something the user can fix, 130 when interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version"):
        from kedge import __version__

        print(f"kedge {__version__}")
        return 0
    name, *rest = args
    if not sys.stderr.isatty():  # bars are for who watches, and dirt in a log
        for package in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{package}_DISABLE_PROGRESS_BARS", "1")
    if name not in _WHERE:
        near = difflib.get_close_matches(name, _WHERE, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(
            f"kedge: error: there is no command {name!r}{hint} (commands: {', '.join(COMMANDS)})",
            file=sys.stderr,
        )
        return 2
    return guarded(load_command(name), rest, name=f"kedge {name}")


def load_command(name: str) -> Callable[[list[str]], object]:
    """What runs a command of ``COMMANDS``."""
    command: Callable[[list[str]], object] = importlib.import_module(_WHERE[name]).main
    return command


def guarded(command: Callable[[list[str]], object], argv: Sequence[str], *, name: str) -> int:
    """Run ``command(argv)``; an error that the user can fix becomes one line.

    Returns:
        The exit code: what the command returns if that is a number, else 0; 2 for such an error,
        130 when interrupted.
    """
    from kedge.errors import KedgeError

    try:
        code = command(list(argv))
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (KedgeError, OSError) as error:
        if os.environ.get("KEDGE_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"{name}: error: {_one_line(error)}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):  # where the user's code raised
            print(note, file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


def _one_line(error: BaseException) -> str:
    """The message without line breaks and without control codes that a terminal would obey."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


if __name__ == "__main__":
    sys.exit(main())
