"""``kedge sft``: trains the supervised model that RL starts from."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kedge.cli.arguments import Parser
from kedge.cli.data import Splits, name_columns
from kedge.cli.model_arguments import get_peft_config
from kedge.cli.options import read
from kedge.cli.ppo import load_policy, load_tokenizer, resume_point
from kedge.config.declare import check_fields, option
from kedge.ops.products import backend
from kedge.output import check_targets, lock_output_dir, share_weights
from kedge.records.errors import ConfigError, install_command

logger = logging.getLogger(__name__)


@dataclass
class BeforeArguments:
    """Data options of the training steps before RL."""

    dataset_name: str | None = option(None, "Dataset to train on: a file, a folder or a hub name.")
    dataset_config: str | None = option(None, "Configuration of a hub dataset that has several.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on.")
    prompt_column: str | None = option(None, "Column with the prompts, if it is not prompt.")

    def __post_init__(self) -> None:
        check_fields(self)

    def name_columns(self, rows: Any) -> Any:
        """The rows with the columns that training reads."""
        return name_columns(rows, {"prompt": self.prompt_column})

    def load(self, split: str) -> Any:
        """The rows of a split."""
        return self.name_columns(self.splits.load(split))

    @property
    def splits(self) -> Splits:
        """The splits of the dataset."""
        return Splits(str(self.dataset_name), self.dataset_config)


@dataclass
class SFTArguments(BeforeArguments):
    """Data of a supervised model."""

    completion_column: str | None = option(
        None, "Name of the column with the completions, if it is not completion."
    )

    def name_columns(self, rows: Any) -> Any:
        """The rows with the columns that training reads."""
        names = {"prompt": self.prompt_column, "completion": self.completion_column}
        return name_columns(rows, names)


def build_parser(kind: Literal["sft", "reward"], script: Any) -> Parser:
    """The parser of a step: data options, TRL's configuration and model loading."""
    try:
        from trl.trainer.reward_config import RewardConfig
        from trl.trainer.sft_config import SFTConfig
    except ImportError as error:
        raise ConfigError(f"kedge {kind} needs TRL: {install_command('sft')} ({error})") from error
    return Parser(
        (script, SFTConfig if kind == "sft" else RewardConfig),
        prog=f"kedge {kind}",
        usage=f"kedge {kind} --model_name_or_path MODEL --dataset_name DATA --output_dir DIR ...",
        description="Every option of TRL's configuration is a flag; --config FILE.yaml reads them.",
    )


parser = partial(build_parser, "sft", SFTArguments)


def read_step(parser: Parser, argv: Sequence[str], *, scalar: bool = False) -> tuple[Any, Any, Any]:
    """Parse and check the flags of a step before anything is loaded; ``scalar``: a reward model."""
    import torch

    # TRL's configurations use names that transformers has renamed.
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
    defaults: dict[str, Any] = {"report_to": "none", "logging_steps": 10}  # unlike TRL's
    defaults["disable_tqdm"] = not sys.stderr.isatty()  # a bar writes a line of 30 kB into a log
    if not torch.cuda.is_available():
        defaults |= {"bf16": False, "dataloader_pin_memory": False}
        if not torch.backends.mps.is_available():
            defaults["use_cpu"] = True  # otherwise transformers rejects bf16 without an accelerator
    (arguments, config, model), names = read(parser, argv, defaults)
    for name in ("model_name_or_path", "dataset_name", "output_dir"):
        if name not in names:
            raise ConfigError(f"{parser.prog}: --{name} is required")
    if model.lora_dropout and not model.use_peft:
        raise ConfigError("--lora_dropout needs --use_peft; add it")
    if config.bf16 and config.use_cpu and backend().slow_bf16:
        logger.warning(backend().slow_bf16)
    config.resume_from_checkpoint = resume_point(config.resume_from_checkpoint)
    check_targets(config, scalar=scalar)
    return arguments, config, model


def load_rows(script: BeforeArguments, config: Any) -> tuple[Any, Any]:
    """Training rows, and evaluation rows or None."""
    evaluates = str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no"
    test = script.load(script.dataset_test_split) if evaluates else None
    return script.load(script.dataset_train_split), test


def main(argv: Sequence[str]) -> None:
    """Supervised fine-tuning before RL, with TRL's trainer."""
    if (flags := parser()).show_help(argv):
        return
    from kedge.ext.before_rl.trl_trainers import train_supervised

    script, config, model = read_step(flags, argv)
    with lock_output_dir(config):
        train, test = load_rows(script, config)
        policy = load_policy(model.model_name_or_path, model)
        tokenizer = load_tokenizer(model.model_name_or_path, model)
        train_supervised(policy, tokenizer, config, train, test, peft=get_peft_config(model))
    share_weights(Path(config.output_dir))
    print(f"kedge: the supervised model is in {config.output_dir}")
