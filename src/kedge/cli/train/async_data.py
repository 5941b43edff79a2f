"""Prompts of ``kedge async-ppo``: dataset mixtures, chats, and renamed columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.cli.arguments import Options
from kedge.cli.data import Splits, load_prompts
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.data.mixer import mix, parse_mixer
from kedge.errors import ConfigError, DataError


def _joined(turn: str, separator: str) -> str:
    """A template that joins turns; without a generation prompt, the EOS token ends the last."""
    return (
        "{% for message in messages %}{{ " + turn + " }}"
        "{% if not loop.last %}{{ '" + separator + "' }}"
        "{% elif not add_generation_prompt %}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    )


# The Tulu chat format: a role tag before each turn, the EOS token after each answer.
TULU = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>\n{{ message['content'] + eos_token }}"
    "{% else %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}"
    "{% endif %}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt and message['role'] != 'assistant' %}"
    "{{ '\n<|assistant|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
)
TEMPLATES = {
    "tulu": TULU,
    "zephyr": (
        "{% for message in messages %}"
        "<|{{ message['role'] }}|>\n{{ message['content'] + eos_token }}\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "simple_chat": _joined("message['role'].capitalize() + ': ' + message['content']", r"\n\n"),
    "simple_concat_with_space": _joined("message['content']", " "),
    "simple_concat_with_new_line": _joined("message['content']", r"\n"),
}


def load_mixed(options: Options) -> tuple[Any, Any]:
    """Training prompts, and evaluation prompts or None.

    Raises:
        DataError: no dataset is given, or it cannot be read.
    """
    config, script = options.config, options.script
    assert isinstance(config, AsyncPPOConfig)
    if script.dataset_mixer_list:
        if script.eval_dataset_name is not None:
            raise DataError(
                "--eval_dataset_name needs --dataset_name; with --dataset_mixer_list, set"
                f" --dataset_mixer_eval_list {script.eval_dataset_name} 1.0"
            )
        train = _mixture(
            script.dataset_mixer_list,
            config.dataset_mixer_list_splits or [script.dataset_train_split],
            "dataset_mixer_list_splits",
            options,
        )
        test = None
    else:
        train, test = load_prompts(options)
    if config.dataset_mixer_eval_list:
        test = _mixture(
            config.dataset_mixer_eval_list,
            config.dataset_mixer_eval_list_splits or [script.dataset_test_split],
            "dataset_mixer_eval_list_splits",
            options,
        )
    return _columns(train, config), None if test is None else _columns(test, config)


def _mixture(mixer: Sequence[str], splits: Sequence[str], flag: str, options: Options) -> Any:
    names = [part.name for part in parse_mixer(mixer)]
    if len(splits) not in (1, len(names)):
        raise DataError(
            f"--{flag} must name one split for all datasets or one for each, got {len(splits)}"
            f" splits for {len(names)} datasets"
        )
    # A dataset may be named twice with different splits; `mix` loads in order.
    remaining = iter(splits if len(splits) > 1 else list(splits) * len(names))

    def load(name: str) -> Any:
        return Splits(name, options.script.dataset_config).load(next(remaining))

    return mix(mixer, load, seed=options.config.seed)


def _columns(rows: Any, config: AsyncPPOConfig) -> Any:
    """Rename columns to what Kedge reads: prompt, ground_truth, dataset."""
    columns = rows.column_names
    for theirs, ours in (
        (config.ground_truths_key, "ground_truth"),
        (config.dataset_source_key, "dataset"),
    ):
        if theirs != ours and theirs in columns:
            if ours in columns:
                rows = rows.remove_columns(ours)
            rows = rows.rename_column(theirs, ours)
    chats = config.sft_messages_key
    if chats in columns and not {"prompt", "query", "input_ids"} & set(columns):
        rows = rows.map(lambda row: {"prompt": asked(row[chats])}, remove_columns=[chats])
    return rows


def asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat without its final assistant turn."""
    last = messages[-1] if messages else {}
    return messages[:-1] if last.get("role") == "assistant" else messages


def check_template(config: AsyncPPOConfig) -> None:
    """Check that ``chat_template_name`` is known or a file, before anything is loaded.

    Raises:
        ConfigError: it is neither.
    """
    name = config.chat_template_name
    if name is not None and name not in TEMPLATES and not Path(name).is_file():
        raise ConfigError(
            f"chat_template_name={name!r} must be {', '.join(TEMPLATES)} or a file with a Jinja"
            " template; leave it unset to use the tokenizer's template"
        )


def dressed(tokenizer: Any, config: AsyncPPOConfig) -> Any:
    """Set the tokenizer's chat template as the options say.

    Raises:
        ConfigError: the template is unknown, or ``add_bos`` cannot be applied.
    """
    check_template(config)
    name = config.chat_template_name
    if name is not None:
        template = TEMPLATES.get(name)
        tokenizer.chat_template = template or Path(name).read_text(encoding="utf-8")
    if config.add_bos:
        if tokenizer.bos_token is None or tokenizer.chat_template is None:
            raise ConfigError(
                "add_bos=True needs a tokenizer with a BOS token and a chat template; leave add_bos"
                " unset"
            )
        if "bos_token" not in tokenizer.chat_template:
            tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return tokenizer
