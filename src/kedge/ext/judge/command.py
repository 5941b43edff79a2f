"""``kedge judge``: win rate of one set of answers over another, with an interval."""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.cli.flags import Flags, print_table
from kedge.ext.judge.judges import TEMPLATE, Endpoint, FunctionJudge, Judge, ScoreJudge, match
from kedge.output import check_folder, write_csv, write_jsonl
from kedge.records.errors import ConfigError, DataError
from kedge.reporting.log import read_objects

EPILOG = """\
OURS and THEIRS are jsonl files with one prompt and answer per line.  Rows are matched by prompt;
rows with the same prompt are matched in order.  Texts may be chat messages.
THEIRS may be @COLUMN, which is another column of OURS, such as a reference.
judges:
  --endpoint URL --model NAME    an OpenAI-compatible endpoint; its key is in the environment
  --reward_model PATH            a reward model, which prefers the answer with the higher score
  --function file.py:f           f(prompts, firsts, seconds): 1 first, 0 second, 0.5 tie, None
  --score file.py:f              f(prompts, answers): one score per answer
example: kedge judge ppo.jsonl @reference --endpoint http://127.0.0.1:8000/v1 --model qwen"""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = Flags("kedge judge", "Compare two sets of answers.", EPILOG)
    add = flags.add_argument
    add("ours", help="jsonl file with the answers whose win rate is computed")
    add("theirs", help="jsonl file with the answers to compare with, or @COLUMN of OURS")
    add("--prompt_column", default="prompt", help="name of the column with the prompts")
    add("--answer_column", default="completion", help="name of the column with the answers")
    judge = flags.add_mutually_exclusive_group(required=True).add_argument
    judge("--endpoint", metavar="URL", help="OpenAI-compatible endpoint that judges the answers")
    judge("--reward_model", metavar="PATH", help="reward model that scores each answer")
    judge("--function", metavar="FILE:NAME", help="Python function that judges pairs of answers")
    judge("--score", metavar="FILE:NAME", help="Python function that scores each answer")
    add("--model", help="name of the model at the endpoint, with --endpoint")
    add("--key_env", default="OPENAI_API_KEY", help="environment variable with the API key")
    add("--template", help="file with the judge's prompt, with {prompt}, {first} and {second}")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: 0)")
    add("--max_tokens", type=int, default=256, help="maximum number of tokens in a reply")
    add("--concurrency", type=int, default=8, help="maximum number of requests at the same time")
    add("--timeout", type=float, default=60.0, help="time limit for a request, in seconds")
    add("--retries", type=int, default=5, help="how many times a failed request is repeated")
    add("--cache", help="file that stores replies (default: OUTPUT_DIR/replies.sqlite)")
    add("--price_in", type=float, help="price of a million input tokens")
    add("--price_out", type=float, help="price of a million output tokens")
    add("--margin", type=float, default=0.0, help="scores closer than this are a tie (default: 0)")
    add("--seed", type=int, default=0, help="seed for the order within each pair (default: 0)")
    add("--limit", type=int, help="number of prompts to judge, from the first (default: all)")
    add("--output_dir", default="judged", help="folder for the results")
    return flags


def main(argv: Sequence[str]) -> None:
    """Compare two sets of completions: win rate with a confidence interval."""
    flags = parser().parse_args(list(argv))
    check_folder("--output_dir", flags.output_dir)
    prompts, ours, theirs = read(flags)
    folder = Path(flags.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    result = match(prompts, ours, theirs, build_judge(flags), seed=flags.seed)
    summary = {"ours": flags.ours, "theirs": flags.theirs, **result.summary()}
    prices = {"prompt_tokens": flags.price_in, "completion_tokens": flags.price_out}
    if any(price is not None for price in prices.values()):
        summary["cost"] = sum(summary[n] * (price or 0.0) for n, price in prices.items()) / 1e6
    names = ("prompt", "ours", "theirs", "outcome", "swapped")
    rows = [{n: getattr(r, n) for n in names} | {"reply": r.answer.reply} for r in result.rows]
    write_jsonl(folder / "judgments.jsonl", rows)
    write_csv(folder / "judgments.csv", rows)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    show(summary)
    print(f"kedge: the judgments are in {folder}")


def build_judge(flags: argparse.Namespace) -> Judge:
    """Build the judge that the flags name."""
    from kedge.rewards.build import load_function

    if flags.endpoint is not None:
        if flags.model is None:
            raise ConfigError("--endpoint needs --model, the model name at the endpoint")
        return Endpoint(
            flags.endpoint,
            flags.model,
            key_env=flags.key_env,
            temperature=flags.temperature,
            max_tokens=flags.max_tokens,
            concurrency=flags.concurrency,
            timeout=flags.timeout,
            retries=flags.retries,
            cache=flags.cache or Path(flags.output_dir) / "replies.sqlite",
            template=_existing(flags.template).read_text("utf-8") if flags.template else TEMPLATE,
        )
    if flags.reward_model is not None:
        return ScoreJudge(load_scores(flags.reward_model), flags.reward_model, margin=flags.margin)
    if flags.score is not None:
        return ScoreJudge(load_function(flags.score), flags.score, margin=flags.margin)
    return FunctionJudge(load_function(flags.function), flags.function)


def load_scores(name: str) -> Any:
    """A function that scores complete answers with a reward model."""
    from kedge.models.load import tokenizer_beside
    from kedge.rewards.build import load_model
    from kedge.rewards.model import RewardModel

    model, tokenizer = RewardModel(load_model(name)), tokenizer_beside(name)
    if tokenizer is None:
        raise ConfigError(f"--reward_model {name} must include a tokenizer")

    def score(prompts: list[str], answers: list[str]) -> list[float]:
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        return model.score_texts(texts, tokenizer).tolist()

    return score


def read(flags: argparse.Namespace) -> tuple[list[str], list[str], list[str]]:
    """Prompts and both answers, in the order of the first file."""
    rows = _rows(flags.ours)[: flags.limit]
    prompts = _column(rows, flags.prompt_column, flags.ours)
    ours = _column(rows, flags.answer_column, flags.ours)
    if flags.theirs.startswith("@"):
        return prompts, ours, _column(rows, flags.theirs[1:], flags.ours)
    other = _rows(flags.theirs)
    columns = (_column(other, n, flags.theirs) for n in (flags.prompt_column, flags.answer_column))
    answers: dict[str, deque[str]] = defaultdict(deque)
    for prompt, answer in zip(*columns, strict=True):
        answers[prompt].append(answer)
    missing = [prompt for prompt, n in Counter(prompts).items() if n > len(answers[prompt])]
    if missing:
        raise DataError(
            f"{flags.theirs} has too few answers to {len(missing)} of the prompts of {flags.ours},"
            f" the first {missing[0][:80]!r}"
        )
    return prompts, ours, [answers[prompt].popleft() for prompt in prompts]


def _rows(file: str) -> list[dict[str, Any]]:
    if not (rows := read_objects(_existing(file))):
        raise DataError(f"{file} has no rows")
    return rows


def _existing(file: str) -> Path:
    path = Path(file).expanduser()
    if not path.is_file():
        raise DataError(f"the file {file} does not exist")
    return path


def _column(rows: list[dict[str, Any]], name: str, file: str) -> list[str]:
    """A column as texts; chats of several messages include their roles."""
    texts = []
    for number, row in enumerate(rows, 1):
        text = row.get(name)
        if isinstance(text, list):
            try:
                turns = [(str(turn["role"]), str(turn["content"])) for turn in text]
            except (TypeError, KeyError):
                turns = []
            several = "\n\n".join(f"{role}: {content}" for role, content in turns)
            text = turns[0][1] if len(turns) == 1 else several or None
        if not isinstance(text, str):
            raise DataError(
                f"{file}, row {number} has no text in column {name!r}; columns: {', '.join(row)}"
            )
        texts.append(text)
    return texts


def show(summary: dict[str, Any]) -> None:
    """Print the table."""
    low, high = summary["win_rate_low"], summary["win_rate_high"]
    controlled = summary["length_controlled_win_rate"]
    counts = ("wins", "losses", "ties", "invalid")
    rows = [
        ("win rate", f"{summary['win_rate']:.1%}  ({low:.1%} .. {high:.1%})"),
        ("at equal length", "-" if controlled is None else f"{controlled:.1%}"),
        (" / ".join(counts), " / ".join(str(summary[n]) for n in counts)),
        ("first answer preferred", f"{summary['first_preferred']:.1%}"),
    ]
    if summary["prompt_tokens"] or summary["cached"]:  # only such judges report their usage
        tokens = f"{summary['prompt_tokens']:,} / {summary['completion_tokens']:,}"
        cached = f"{summary['cached']} answers from the cache"
        rows.append(("tokens read / written", f"{tokens}; {cached}"))
    if "cost" in summary:
        rows.append(("cost", f"{summary['cost']:.4f}"))
    print_table(f"judged by {summary['judge']}", rows)
