"""Episodes of scripted experts, as conversations for ``kedge sft``.

    python -m kedge.environments.experts kedge.environments.games:TextWorld --output episodes.jsonl

An environment has an expert if it has a static method ``expert(messages) -> str``.  Episodes with
``noise`` also need its method ``random_action(rng) -> str``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def expert_episodes(
    make_environment: Callable[[], Any],
    seeds: Sequence[int],
    *,
    noise: float = 0.0,
    max_turns: int = 16,
) -> Iterator[Row]:
    """One conversation per seed, each a row with ``messages`` and ``reward``.

    Args:
        make_environment: makes an environment with an expert.
        seeds: of the episodes.
        noise: probability that a turn of the expert is replaced by an arbitrary action.
        max_turns: longer episodes are cut off after this many turns.

    Raises:
        ValueError: the environment has no expert, or ``noise`` is not a probability.
    """
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be from 0 to 1, got {noise}")
    environment = make_environment()
    if not callable(getattr(environment, "expert", None)):
        raise ValueError(
            f"{type(environment).__name__} has no expert; add a static method"
            " expert(messages) that returns the next response"
        )
    for seed in seeds:
        rng = random.Random(f"noise {seed}")
        observation, _ = environment.reset(seed=seed, options={})
        messages, total = [{"role": "user", "content": observation}], 0.0
        for _ in range(max_turns):
            careless = rng.random() < noise
            response = environment.random_action(rng) if careless else environment.expert(messages)
            observation, reward, terminated, truncated, _ = environment.step(response)
            total += reward
            messages.append({"role": "assistant", "content": response})
            if terminated or truncated:
                break
            messages.append({"role": "user", "content": observation})
        if messages[-1]["role"] == "user":
            messages.pop()  # drop an observation that has no response
        yield {"messages": messages, "reward": total}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the episodes of an expert to a file, one row per line."""
    flags = argparse.ArgumentParser(prog="python -m kedge.environments.experts")
    flags.add_argument("environment", help="module:Class, e.g. kedge.environments.games:TextWorld")
    flags.add_argument("--environment_kwargs", type=json.loads, default={}, metavar="JSON")
    flags.add_argument("--episodes", type=int, default=1000)
    flags.add_argument("--first_seed", type=int, default=0, help="of this many seeds in a row")
    flags.add_argument("--noise", type=float, default=0.0, help="share of arbitrary actions")
    flags.add_argument("--max_turns", type=int, default=16)
    flags.add_argument("--output", required=True, type=Path, help="a .jsonl file")
    args = flags.parse_args(argv)
    module, _, name = args.environment.partition(":")
    environment = getattr(importlib.import_module(module), name)
    rows = expert_episodes(
        lambda: environment(**args.environment_kwargs),
        range(args.first_seed, args.first_seed + args.episodes),
        noise=args.noise,
        max_turns=args.max_turns,
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
