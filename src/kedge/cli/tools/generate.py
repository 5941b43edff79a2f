"""``kedge generate``: samples completions of prompts, written as jsonl or CSV."""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.cli.flags import Flags
from kedge.errors import ConfigError, DataError
from kedge.output import check_file, write_csv, write_jsonl

logger = logging.getLogger(__name__)
EPILOG = """\
PROMPTS is a file, a folder or a hub name, as for training.  Each line of the output has the prompt,
the completion and the other columns of its row, for `kedge judge OUT.jsonl @reference ...`.
example: kedge generate MODEL prompts.jsonl --output ppo.jsonl --max_new_tokens 53"""
BATCH = 64


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = Flags("kedge generate", "Sample completions of prompts.", EPILOG)
    flags.add_argument("model", help="folder or hub name")
    flags.add_argument("prompts", help="dataset with a column prompt")
    flags.add_argument("--output", default="completions.jsonl", help=".jsonl or .csv")
    flags.add_argument("--split", default="test", help="split of the dataset")
    flags.add_argument("--limit", type=int, help="use only the first N prompts")
    flags.add_argument("--num_generations", type=int, default=1, help="completions per prompt")
    flags.add_argument("--batch_size", type=int, default=BATCH, help="completions at a time")
    flags.add_argument("--max_new_tokens", type=int, default=53, help="tokens of a completion")
    flags.add_argument("--temperature", type=float, default=0.01, help="0 is greedy")
    flags.add_argument("--top_k", type=int, default=0, help="most likely tokens; 0: all")
    flags.add_argument("--top_p", type=float, default=1.0, help="their probability; 1: all")
    flags.add_argument("--max_prompt_length", type=int, help="tokens; longer prompts are dropped")
    flags.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    flags.add_argument("--seed", type=int, default=0)
    return flags


def main(argv: Sequence[str]) -> None:
    """Sample and write."""
    flags = parser().parse_args(list(argv))
    check_file("--output", flags.output)
    from kedge.cli.data import Splits

    rows = Splits(flags.prompts).load(flags.split)
    if flags.limit is not None:
        rows = rows.select(range(min(flags.limit, len(rows))))
    names = inspect.signature(generate_completions).parameters.keys() & vars(flags)
    completions = generate_completions(
        flags.model, rows, **{name: getattr(flags, name) for name in names}
    )
    write(Path(flags.output), completions)
    sys.stdout.write(f"kedge: {len(completions)} completions are in {flags.output}\n")


def generate_completions(
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
) -> list[dict[str, Any]]:
    """The rows of a dataset, each with a ``completion`` without special tokens.

    Prompt and completion concatenated are the full text.  ``finished`` says whether the completion
    ended with an end token.  A column ``completion`` of the dataset becomes ``reference``.

    Args:
        name: folder or hub name of a causal language model with a tokenizer.
        dataset: with a column of prompts, as for training.
        max_new_tokens: maximum tokens of a completion; it ends at the tokenizer's EOS token or at
            an ``eos_token_id`` of the model's generation_config.
        temperature: 0 takes the most likely tokens.
        top_k: sample among the k most likely tokens; 0: all.
        top_p: sample among the fewest tokens whose probabilities sum to this; 1: all.
        num_generations: completions per prompt, in consecutive rows.
        batch_size: completions sampled at a time.
        max_prompt_length: tokens; longer prompts are dropped.
        engine: ``embedded`` or ``vllm``.
        seed: seed of sampling.

    Raises:
        ConfigError, DataError: an invalid model, engine or dataset.
    """
    from kedge.backends.data import DatasetPrompts
    from kedge.backends.hf.end_tokens import eos_token_ids
    from kedge.backends.rewards.texts import Texts
    from kedge.cli.arguments import ModelArguments
    from kedge.cli.train.ppo import load_policy, load_tokenizer
    from kedge.types import Sampling

    options = ModelArguments()
    tokenizer, model = load_tokenizer(name, options), load_policy(name, options).eval()
    ends = eos_token_ids(model, tokenizer)
    if not ends:
        logger.warning(
            "neither the tokenizer nor the generation_config of %r defines an EOS token: every"
            " completion has %d tokens",
            name,
            max_new_tokens,
        )
    for name_, value in (("num_generations", num_generations), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"--{name_} {value} must be at least 1")
    size = min(max(batch_size // num_generations, 1), max(len(dataset), 1))
    prompts = DatasetPrompts(
        dataset,
        tokenizer,
        prompts_per_step=size,
        num_generations=num_generations,
        seed=seed,
        shuffle=False,
        max_prompt_length=max_prompt_length,
    )
    rollout_engine = _engine(engine, model, tokenizer, batch_size)
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=ends,
    )
    completions: list[dict[str, Any]] = []
    for step in range(-(-len(prompts) // size)):
        batch = prompts.batch(step)
        rollout = rollout_engine.generate(batch, sampling=sampling, seed=seed + step)
        answers = Texts(rollout, tokenizer, skip_special_tokens=True).completion_texts
        for i, (text, ended) in enumerate(zip(answers, rollout.terminated.tolist(), strict=True)):
            columns = {n: values[i] for n, values in batch.columns.items()}
            if "completion" in columns:
                columns["reference"] = columns.pop("completion")
            completions.append({**columns, "completion": text, "finished": ended})
    # The last batch is padded with rows from the start.
    return completions[: len(prompts) * num_generations]


def _engine(kind: str, model: Any, tokenizer: Any, batch_size: int) -> Any:
    from kedge.trainers.build.setup import pad_id

    pad = pad_id(tokenizer)
    if kind == "embedded":
        import torch

        from kedge.backends.hf.rollout import EmbeddedEngine

        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        return EmbeddedEngine(model, pad_id=pad, tokenizer=tokenizer, chunk_rows=batch_size)
    from kedge.config.options import installed

    if not installed("vllm"):
        raise ConfigError("--engine vllm needs vLLM: pip install 'kedge[vllm]'; or use embedded")
    from kedge.backends.vllm import InProcess, PolicySpec, VLLMEngine

    spec = PolicySpec.of(model)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return VLLMEngine(InProcess(spec, weights), spec, pad_id=pad)


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows as jsonl, or as CSV if the file name ends in .csv."""
    if not rows:
        raise DataError(f"{file}: the dataset has no prompts")
    (write_csv if file.suffix == ".csv" else write_jsonl)(file, rows)
