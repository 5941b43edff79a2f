"""What a run sets for its whole process: seeds, determinism, how much is said."""

from __future__ import annotations

import logging

from transformers import TrainingArguments, enable_full_determinism, set_seed
from transformers.utils import logging as transformers_logging


def settle_process(args: TrainingArguments) -> None:
    """Seed everything and set the verbosity that ``log_level`` and its kin ask for.

    ``log_level="passive"`` leaves verbosity as it is.
    """
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)
    wanted = args.log_level if args.should_log else args.log_level_replica
    if wanted != "passive":
        level = args.get_process_log_level()
        transformers_logging.set_verbosity(level)
        logging.getLogger("kedge").setLevel(level)
