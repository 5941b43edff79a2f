"""``kedge generate``: samples completions of prompts, or plays episodes on new seeds."""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args, get_type_hints

from transformers.hf_argparser import string_to_bool

from kedge import plugins
from kedge.cli.flags import Flags
from kedge.config.common import EnvironmentArguments
from kedge.config.declare import check_fields, read_mapping
from kedge.output import check_file, write_csv, write_jsonl
from kedge.records.errors import ConfigError, DataError, install_command

logger = logging.getLogger(__name__)
EPILOG = """\
PROMPTS is a file, a folder or a hub name, as for training.  Each line of the output has the prompt,
the completion and the other columns of its row, for `kedge judge OUT.jsonl @reference ...`.
example: kedge generate MODEL prompts.jsonl --output ppo.jsonl --max_new_tokens 53

With --environment, episodes are played as in training on separate seeds, and success is printed
with its 95% interval; each line of the output is an episode.  Give the limits of the training run.
example: kedge generate MODEL --environment game.py:Game --response_length 300 --temperature 1"""
BATCH = 64
ENVIRONMENT = [field.name for field in fields(EnvironmentArguments)]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = Flags("kedge generate", "Sample completions of prompts, or play episodes.", EPILOG)
    add = flags.add_argument
    add("model", help="Folder or hub name of the model.")
    add("prompts", nargs="?", help="Dataset with a column prompt: a file, a folder or a hub name.")
    add("--output", default="completions.jsonl", help=".jsonl or .csv file to write.")
    add("--prompt_column", help="Name of the column with the prompts, if it is not prompt.")
    add("--split", default="test", help="Split to read, if there are several.")
    add("--limit", type=int, help="Number of prompts to use (default: all).")
    add("--num_generations", type=int, default=1, help="Number of completions per prompt.")
    add("--batch_size", type=int, default=BATCH, help="Number of completions sampled at a time.")
    text = (
        "Maximum number of tokens in a completion (default: 53), or in an episode after its prompt."
    )
    add("--max_new_tokens", "--response_length", type=int, help=text)
    add("--temperature", type=float, default=0.01, help="Sampling temperature; 0 is greedy.")
    add("--top_k", type=int, default=0, help="Sample only from this many tokens; 0 is off.")
    text = "Sample only from the most likely tokens with this total probability; 1 is off."
    add("--top_p", type=float, default=1.0, help=text)
    add("--max_prompt_length", type=int, help="Drop prompts with more than this many tokens.")
    text = "Rollout engine that samples."
    add("--engine", choices=("embedded", "vllm"), default="embedded", help=text)
    add("--seed", type=int, default=0, help="Seed for sampling (default: 0).")
    group = flags.add_argument_group("episodes")
    group.add_argument("--episodes", type=int, help="Number of episodes: one per prompt, or 200.")
    group.add_argument(
        "--success_score",
        type=float,
        default=1.0,
        help="Score from which an episode is a success, if there is no metric success.",
    )
    hints = get_type_hints(EnvironmentArguments)
    for field in fields(EnvironmentArguments):  # environments have the same options in training
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        kind = int if int in kinds else float if float in kinds else str
        text = field.metadata["help"].replace("%", "%%")
        boolean = {"type": string_to_bool, "nargs": "?", "const": True}
        flag: dict[str, Any] = boolean if bool in kinds else {"type": kind}
        group.add_argument(f"--{field.name}", default=field.default, help=text, **flag)
    return flags


def main(argv: Sequence[str]) -> None:
    """Sample and write."""
    flags = parser().parse_args(list(argv))
    check_file("--output", flags.output)
    environment = read_environment(flags)
    rows = None
    if flags.prompts is not None:
        from kedge.cli.data import Splits, name_columns

        rows = Splits(flags.prompts).load(flags.split)
        rows = name_columns(rows, {"prompt": flags.prompt_column})
        if flags.limit is not None:
            rows = rows.select(range(min(flags.limit, len(rows))))
    names = inspect.signature(generate_completions).parameters.keys() & vars(flags).keys()
    options = {name: getattr(flags, name) for name in names} | {"environment": environment}
    completions = generate_completions(flags.model, rows, **options)
    write(Path(flags.output), completions)
    kind, summary = "completions", ""
    if environment is not None:
        from kedge.environments.success import describe, measure_success

        kind, summary = "episodes", describe(measure_success(completions, flags.success_score))
    sys.stdout.write(f"kedge: {len(completions)} {kind} are in {flags.output}\n{summary}")


def read_environment(flags: argparse.Namespace) -> EnvironmentArguments | None:
    """The environment that the flags name, or None; checks combinations of flags."""
    if flags.environment is not None:
        environment = EnvironmentArguments(**{name: getattr(flags, name) for name in ENVIRONMENT})
        check_fields(environment)
        if flags.max_new_tokens is None:
            raise ConfigError(
                "--environment needs --response_length, the tokens of an episode after its prompt;"
                " give that of the training run"
            )
        return environment
    if flags.prompts is None:
        raise ConfigError("kedge generate needs PROMPTS or --environment; see --help")
    if flags.max_new_tokens is None:
        flags.max_new_tokens = 53
    defaults = vars(parser().parse_args([flags.model]))
    for name in ("episodes", "success_score", *ENVIRONMENT):
        if getattr(flags, name) != defaults[name]:
            raise ConfigError(f"--{name} has no effect without --environment; leave it out")
    return None


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows as jsonl, or as CSV if the file name ends in .csv."""
    if not rows:
        raise DataError(f"{file}: the dataset has no prompts")
    (write_csv if file.suffix == ".csv" else write_jsonl)(file, rows)


def generate_completions(  # noqa: PLR0913
    name: str,
    dataset: Any,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    num_generations: int = 1,
    batch_size: int = BATCH,
    max_prompt_length: int | None = None,
    engine: str = "embedded",
    seed: int = 0,
    environment: EnvironmentArguments | None = None,
    episodes: int | None = None,
) -> list[dict[str, Any]]:
    """The rows of a dataset, each with a ``completion`` without end tokens, or episodes.

    Prompt and completion concatenated are the full text.  ``finished`` says whether the completion
    ended with an end token.  A column ``completion`` of the dataset becomes ``reference``.

    With an environment, a row is an episode: ``prompt`` is what the policy read first,
    ``completion`` the turns and what the environment said between them, ``rewards`` those of each
    turn; ``score``, ``turns``, ``terminated``, ``error``, ``metrics`` and ``seed`` are numbers and
    texts of the episode.  Seeds come from a separate stream, which no training run draws from.

    Args:
        name: folder or hub name of a causal language model with a tokenizer.
        dataset: with a column of prompts, as for training; None: the environment gives the prompts.
        max_new_tokens: maximum tokens of a completion; it ends at the tokenizer's EOS token or at
            an ``eos_token_id`` of the model's generation_config.  Of an episode after its prompt.
        temperature: 0 takes the most likely tokens.
        top_k: sample among the k most likely tokens; 0: all.
        top_p: sample among the fewest tokens whose probabilities sum to this; 1: all.
        num_generations: completions per prompt, in consecutive rows; episodes per seed.
        batch_size: completions sampled at a time.
        max_prompt_length: tokens; longer prompts are dropped.
        engine: ``embedded`` or ``vllm``.
        seed: seed of sampling.
        environment: the environment, its arguments and the limits of episodes, as in training.
        episodes: seeds; rows of the dataset are repeated.  None: one per row, or 200.
    """
    from kedge.data import DatasetPrompts
    from kedge.data.prompts import pad_id
    from kedge.environments import EnvironmentRollouts
    from kedge.environments.episode import check_turns_end
    from kedge.environments.load import EMPTY_PROMPT, add_prompts, load_environment
    from kedge.models.compatibility import vocabulary
    from kedge.models.load import eos_token_ids, load_policy, load_tokenizer
    from kedge.records.seeds import seed_for
    from kedge.records.types import Sampling
    from kedge.rewards.texts import Texts
    from kedge.trainers.options import episode_limits

    counts = {"num_generations": num_generations, "batch_size": batch_size}
    for name_, value in (counts | ({} if episodes is None else {"episodes": episodes})).items():
        if value < 1:
            raise ConfigError(f"--{name_} {value} must be at least 1")
    tokenizer, model = load_tokenizer(name), load_policy(name).eval()
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=eos_token_ids(model, tokenizer),
    )
    rollouts = _engine(engine, model, tokenizer, batch_size)
    seeds = episodes
    if environment is not None:
        seeds = episodes or (200 if dataset is None else len(dataset))
        check_turns_end(sampling, environment.max_turn_tokens)
        kwargs = read_mapping(environment.environment_kwargs)
        make = load_environment(environment.environment, kwargs)
        dataset = [{"prompt": EMPTY_PROMPT}] if dataset is None else add_prompts(dataset)
        rollouts = EnvironmentRollouts(
            rollouts,
            make,
            tokenizer,
            episode_limits(environment),
            pad_id=pad_id(tokenizer),
            drop_reasoning=environment.drop_reasoning,
            vocabulary=vocabulary(model),
        )
    elif not sampling.stop_ids:
        logger.warning(
            "neither the tokenizer nor the generation_config of %r defines an EOS token: every"
            " completion has %d tokens",
            name,
            max_new_tokens,
        )
    size = min(max(batch_size // num_generations, 1), max(seeds or len(dataset), 1))
    prompts = DatasetPrompts(
        dataset,
        tokenizer,
        prompts_per_step=size,
        num_generations=num_generations,
        seed=seed,
        shuffle=False,
        max_prompt_length=max_prompt_length,
    )
    count, rows = seeds or len(prompts), []
    with nullcontext() if environment is None else closing(rollouts):
        for step in range(-(-count // size)):
            batch = prompts.batch(step)
            batch_seed = seed + step if environment is None else seed_for(seed, "play", step)
            rollout = rollouts.generate(batch, sampling=sampling, seed=batch_seed)
            texts = Texts(rollout, tokenizer, ends=sampling.stop_ids)
            rows += _read_rows(texts, batch_seed)
    return rows[: count * num_generations]  # the last batch is padded with rows from the start


def _read_rows(texts: Any, seed: int) -> list[dict[str, Any]]:
    """The columns of each prompt with its completion, or with its episode."""
    from kedge.environments.episode import environment_seed

    rollout, episodes, rows = texts.rollout, texts.rollout.episodes, []
    for i, ended in enumerate(rollout.terminated.tolist()):
        row = {name: values[i] for name, values in rollout.prompts.columns.items()}
        if episodes is None:
            if "completion" in row:
                row["reference"] = row.pop("completion")
            rows.append(row | {"completion": texts.completion_texts[i], "finished": ended})
            continue
        turn, rewards = episodes.turn[i], episodes.rewards[i]
        each = [float(rewards[turn == k].sum()) for k in range(int(turn.max()) + 1)]
        row |= {"prompt": texts.prompt_texts[i], "completion": texts.completions[i]}
        row |= {"score": float(rewards.sum()), "turns": len(each), "rewards": each}
        row |= {"terminated": ended, "seed": environment_seed(seed, int(rollout.prompts.group[i]))}
        rows.append(row | {name: episodes.columns[name][i] for name in ("error", "metrics")})
    return rows


def _engine(kind: str, model: Any, tokenizer: Any, batch_size: int) -> Any:
    from kedge.data.prompts import pad_id

    pad = pad_id(tokenizer)
    if kind == "embedded":
        import torch

        from kedge.rollout.embedded.engine import EmbeddedEngine

        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        return EmbeddedEngine(model, pad_id=pad, tokenizer=tokenizer, chunk_rows=batch_size)
    from kedge.config.rollout_engines import installed

    if not installed("vllm"):
        raise ConfigError(f"--engine vllm needs vLLM: {install_command('vllm')}; or use embedded")
    spec = plugins.load("kedge.rollout_engines", kind)
    return resolve_name(spec.sampler)(model, pad_id=pad)
