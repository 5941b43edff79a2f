"""``kedge reward``: trains a reward model on preferences."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kedge.cli.data import read_winners
from kedge.cli.model_arguments import get_peft_config
from kedge.cli.ppo import load_options, load_tokenizer
from kedge.config.declare import Count, Natural, option
from kedge.ext.before_rl.sft_command import BeforeArguments, build_parser, load_rows, read_step
from kedge.output import lock_output_dir, share_weights
from kedge.records.errors import ConfigError, DataError


@dataclass
class RewardArguments(BeforeArguments):
    """Data and head of a reward model."""

    fresh_head: bool = option(
        True, "Begin with a random score head with standard deviation 1 / sqrt(hidden size + 1)."
    )
    reference_column: str | None = option(
        "chosen",
        "After training, shift scores so that their mean on this column is 0. none skips this.",
    )
    num_references: Count = option(
        1000, "Number of rows of reference_column that are scored to find that shift."
    )
    num_held_out: Natural = option(
        500,
        "Number of pairs with which to check the trained model, from dataset_test_split, or else "
        "the last of the training split (at most a tenth, which is then not trained on). 0 skips "
        "the check.",
    )
    winner_column: str | None = option(
        None,
        "Name of the column that says which of two answers is better (a, b, 1, 2 or its text), "
        "instead of the columns chosen and rejected. Ties are dropped.",
    )
    a_column: str = option("a", "Column with the first answer, with winner_column.")
    b_column: str = option("b", "Column with the second answer, with winner_column.")

    def name_columns(self, rows: Any) -> Any:
        """The rows with the columns that training reads."""
        if self.winner_column is not None:
            rows = read_winners(rows, self.a_column, self.b_column, self.winner_column)
        elif (self.a_column, self.b_column) != ("a", "b"):
            raise ConfigError("--a_column and --b_column need --winner_column; add it")
        return super().name_columns(rows)


parser = partial(build_parser, "reward", RewardArguments)


def main(argv: Sequence[str]) -> None:
    """Train a reward model on preferences, with TRL's trainer."""
    if (flags := parser()).show_help(argv):
        return
    from kedge.ext.before_rl.trl_trainers import train_reward

    script, config, model = read_step(flags, argv, scalar=True)
    peft = get_peft_config(model)
    if peft is not None:
        peft.task_type = "SEQ_CLS"  # trains and saves the score head, too
    with lock_output_dir(config):
        train, test = load_pairs(script, config)
        train_reward(
            load_scorer(model.model_name_or_path, model),
            load_tokenizer(model.model_name_or_path, model),
            config,
            train,
            test,
            references=load_references(train, script),
            fresh_head=script.fresh_head,
            peft=peft,
        )
    share_weights(Path(config.output_dir))
    print(f"kedge: the reward model is in {config.output_dir}")


def load_pairs(script: RewardArguments, config: Any) -> tuple[Any, Any]:
    """Training pairs, and held-out pairs or None."""
    train, test = load_rows(script, config)
    if test is not None or not script.num_held_out:
        return train, test
    splits = script.splits
    if splits.local and splits.has(script.dataset_test_split):
        test = script.load(script.dataset_test_split)
        return train, test.select(range(min(script.num_held_out, len(test))))
    end = len(train) - min(script.num_held_out, len(train) // 10)
    if end == len(train):
        return train, None
    return train.select(range(end)), train.select(range(end, len(train)))


def load_scorer(name: str, options: Any) -> Any:
    """A sequence-classification model with one label."""
    from transformers import AutoModelForSequenceClassification

    from kedge.models.load import check_source, without_loading_report

    check_source(name, "the model")
    try:
        with without_loading_report():  # the score head is expected to be missing
            return AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=1, use_safetensors=True, **load_options(options)
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the model {name!r}: {error}") from error


def load_references(rows: Any, script: RewardArguments) -> list[str] | None:
    """Prompt and reference answer of the first rows, joined into one text per row."""
    name = script.reference_column
    if name in (None, "none") or {"chosen", "rejected"} - {*rows.column_names}:
        return None  # what is missing is said for both
    if name not in rows.column_names:
        raise DataError(
            f"--reference_column {name} does not exist; columns: {', '.join(rows.column_names)}"
        )
    first = rows.select(range(min(script.num_references, len(rows))))
    prompts = first["prompt"] if "prompt" in rows.column_names else [""] * len(first)
    pairs = [*zip(prompts, first[name], strict=True)]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise DataError(
            f"--reference_column {name} must hold text, got chat messages; name another column, or"
            " none"
        )
    return [prompt + answer for prompt, answer in pairs]
