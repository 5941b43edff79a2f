"""``kedge expert``: writes the episodes of an environment's expert, to train a first policy on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kedge.cli.flags import Flags
from kedge.config.declare import read_mapping
from kedge.output import check_file, write_jsonl
from kedge.records.errors import ConfigError

EPILOG = """\
ENVIRONMENT is named as for training.  Its method expert(messages) returns the next turn: a text, or
an assistant message with tool_calls.
example: kedge expert game.py:Game --episodes 2000 --output episodes.jsonl
         kedge sft --dataset_name episodes.jsonl --assistant_only_loss True ..."""


def main(argv: Sequence[str]) -> None:
    """Write episodes of an environment's expert, to train a first policy on."""
    flags = Flags("kedge expert", "Write an expert's episodes as conversations.", EPILOG)
    add = flags.add_argument
    add("environment", help="environment with the expert, as module:Class or file.py:Class")
    add("--environment_kwargs", metavar="JSON", help="keyword arguments of the environment's class")
    add("--episodes", type=int, default=1000, help="number of episodes to write")
    add("--first_seed", type=int, default=0, help="seed of the first episode (default: 0)")
    add("--noise", type=float, default=0.0, help="share of turns with a random action (default: 0)")
    add("--max_turns", type=int, default=16, help="turns after which an episode is cut off")
    add("--output", required=True, type=Path, help=".jsonl file to write")
    args = flags.parse_args(list(argv))
    for name in ("episodes", "max_turns"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    check_file("--output", args.output)
    from kedge.environments.load import load_environment
    from kedge.ext.before_rl.experts import expert_episodes

    make = load_environment(args.environment, read_mapping(args.environment_kwargs))
    assert not isinstance(make, Mapping)  # a name is that of one environment
    seeds = range(args.first_seed, args.first_seed + args.episodes)
    rows = list(expert_episodes(make, seeds, noise=args.noise, max_turns=args.max_turns))
    write_jsonl(args.output, rows)
    mean = sum(row["reward"] for row in rows) / len(rows)
    print(f"kedge: {len(rows)} episodes of mean reward {mean:.4g} are in {args.output}")
