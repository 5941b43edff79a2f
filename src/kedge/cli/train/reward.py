"""``kedge reward``: a reward model from preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kedge.cli.train.ppo import load_tokenizer, loading, lora
from kedge.cli.train.sft import BeforeArguments, build_parser, load_rows, read_step
from kedge.config.declare import option
from kedge.errors import ConfigError, DataError


@dataclass
class RewardArguments(BeforeArguments):
    """The same for preferences."""

    fresh_head: bool = option(
        True, "Draw the score head anew, with deviation 1 / sqrt(hidden + 1)."
    )
    reference_column: str | None = option(
        "chosen", "After training, shift scores so that these answers score 0 on average; none: no."
    )
    num_references: int = option(1000, "Most rows of it that are scored.", ge=1)


def main(argv: Sequence[str]) -> None:
    """Train as the flags say."""
    if {"-h", "--help"} & set(argv):
        build_parser("reward", RewardArguments).print_help()
        return
    from kedge.backends.trl import train_reward
    from kedge.trainers.run.output_lock import claimed

    given, config, model = read_step("reward", RewardArguments, argv)
    with claimed(config):
        train, test = load_rows(given, config)
        train_reward(
            load_scorer(model.model_name_or_path, model),
            load_tokenizer(model.model_name_or_path, model),
            config,
            train,
            test,
            references=load_references(train, given),
            fresh_head=given.fresh_head,
            peft=lora(model) if model.use_peft else None,
        )
    print(f"kedge: the reward model is in {config.output_dir}")


def load_scorer(name: str, options: Any) -> Any:
    """A sequence-classification model with one label.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoModelForSequenceClassification

    try:
        return AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, **loading(options)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {name!r} cannot be loaded: {error}") from error


def load_references(rows: Any, given: RewardArguments) -> list[str] | None:
    """Prompt and reference of the first rows, in one text each.

    Raises:
        DataError: there is no such column, or it holds no text.
    """
    name = given.reference_column
    if name in (None, "none"):
        return None
    if name not in rows.column_names:
        raise DataError(
            f"--reference_column {name} is no column; there are {', '.join(rows.column_names)}"
        )
    first = rows.select(range(min(given.num_references, len(rows))))
    texts = []
    for row in first:
        prompt, answer = row.get("prompt", ""), row[name]
        if not isinstance(answer, str) or not isinstance(prompt, str):
            raise DataError(
                f"--reference_column {name} holds chats; name a column of text, or none"
            )
        texts.append(prompt + answer)
    return texts
