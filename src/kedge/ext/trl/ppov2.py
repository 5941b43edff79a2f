"""PPO under the names that it had in TRL 0.10 to 0.12."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kedge.config.declare import option
from kedge.ext.trl.options import PPOConfig
from kedge.trainers.ppo import PPOTrainer
from kedge.trainers.spec import rename_arguments

OLDER_NAMES = {
    **{"config": "args", "tokenizer": "processing_class"},
    **{"policy": "model", "ref_policy": "ref_model"},
}


@dataclass(repr=False)
class PPOv2Config(PPOConfig):
    """PPOConfig with the options that only TRL's first version of it had."""

    SECTION: ClassVar[str] = "command line and scripts"

    sanity_check: bool = option(False, "Use only the first 100 rows of the dataset.")
    base_model: str = option("EleutherAI/pythia-160m", "The folder or hub name of the tokenizer.")


class PPOv2Trainer(PPOTrainer):
    """``PPOTrainer`` under its older name; also accepts the older argument names.

    ``config``, ``tokenizer``, ``policy`` and ``ref_policy`` mean ``args``, ``processing_class``,
    ``model`` and ``ref_model``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **rename_arguments(kwargs, OLDER_NAMES))
