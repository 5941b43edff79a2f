"""``kedge``: runs a command and prints errors on one line."""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

from kedge import plugins
from kedge.trainers import TRAINERS

_TRAIN = "kedge.cli.ppo:main"
# The core's commands: module and function, and the line in ``kedge --help``.
_CORE = {
    **{name: (_TRAIN, text) for name, (_, text) in TRAINERS.items()},
    "generate": ("kedge.cli.generate:main", "sample completions of prompts with a model"),
}

EXAMPLE = """\
example:
  kedge ppo --model_name_or_path MODEL --dataset_name prompts.jsonl \\
      --reward_funcs rewards.py:length --stop_token eos --total_episodes 10000 --output_dir runs/a
  kedge plan ppo ...         the same flags: batch sizes and estimated memory

MODEL is a folder or a name on the Hugging Face hub.  `kedge ppo --help all` lists every flag;
--config FILE.yaml reads them from a file; flags on the command line override it.
KEDGE_TRACEBACK=1 prints the full traceback of an error."""


def commands() -> list[str]:
    """Names of all commands: the core's, and those of entry points."""
    return [*_CORE, *sorted(name for name in plugins.find("kedge.commands") if _exists(name))]


def _exists(name: str) -> bool:
    """Whether the package of an entry point is there; imports its parents alone."""
    module = plugins.find("kedge.commands")[name].module
    try:
        return find_spec(module.rpartition(".")[0] or module) is not None
    except ImportError:
        return False


def usage() -> str:
    """The text of ``kedge --help``."""
    width = max(map(len, commands()))
    lines = "\n".join(f"  {name:<{width}}   {_help_line(name)}" for name in commands())
    return (
        "usage: kedge COMMAND [flags]\n\n"
        "Train language models with the PPO family of reinforcement learning.\n\n"
        f"commands:\n{lines}\n\n  --version   print the version\n  --help      print this\n\n"
        f"{EXAMPLE}"
    )


def _help_line(name: str) -> str:
    """The core's line, or the first line of a function's docstring, read without importing it."""
    if name in _CORE:
        return _CORE[name][1]
    entry = plugins.find("kedge.commands")[name]
    spec = find_spec(entry.module)
    if spec is None or spec.origin is None:
        return f"{entry.value}, which is not there"
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    text = next((ast.get_docstring(f) or "" for f in functions if f.name == entry.attr), "")
    line = text.partition("\n")[0].rstrip(".")
    return line[:1].lower() + line[1:]


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
    if name not in commands():
        near = difflib.get_close_matches(name, commands(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(
            f"kedge: error: unknown command {name!r}{hint} (commands: {', '.join(commands())})",
            file=sys.stderr,
        )
        return 2

    def run(argv: list[str]) -> object:
        return load_command(name)(argv)  # a broken entry point is reported as other errors are

    return run_command(run, rest, name=f"kedge {name}")


def load_command(name: str) -> Callable[[list[str]], object]:
    """The function of a command, called with its flags."""
    from kedge.records.errors import ConfigError

    if name not in _CORE:
        loaded: Callable[[list[str]], object] | None = plugins.load("kedge.commands", name)
        if loaded is None:
            raise ConfigError(f"kedge {name} needs an extension that was deleted; reinstall Kedge")
        return loaded
    place, _ = _CORE[name]
    if place != _TRAIN:
        command: Callable[..., object] = resolve_name(place)
        return command

    def train(argv: list[str]) -> object:
        from kedge.cli import quick

        if quick.answer(name, argv):
            return None
        return resolve_name(place)(argv, command=name)

    return train


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
    except BrokenPipeError:  # `kedge ppo --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
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
