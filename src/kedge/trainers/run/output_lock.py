"""The folders that a run writes to: checked before anything is loaded, then held by it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list

from kedge.errors import ConfigError
from kedge.output import RunLock, check_folder


def check_targets(args: Any) -> None:
    """Refuse folders that cannot be made or written in.

    Raises:
        ConfigError: names the option, the folder and what is in the way.
    """
    reports = args.report_to if isinstance(args.report_to, list) else [args.report_to]
    targets = {
        "output_dir": args.output_dir,
        "save_rollouts": getattr(args, "save_rollouts", None),
        "logging_dir": (
            getattr(args, "logging_dir", None) if {"tensorboard", "all"} & set(reports) else None
        ),
    }
    for option, folder in targets.items():
        if folder:
            check_folder(option, folder)


@contextmanager
def claimed(args: Any) -> Iterator[None]:
    """Inside, no other run writes to ``output_dir``; rank 0 holds the lock, every rank calls.

    Raises:
        ConfigError: on every rank, if another run holds it.
    """
    with ExitStack() as held:
        problem = None
        if args.output_dir and args.process_index == 0:
            try:
                held.enter_context(RunLock(args.output_dir))
            except ConfigError as error:
                problem = str(error)
        if args.world_size > 1:
            (problem,) = broadcast_object_list([problem])
        if problem is not None:
            raise ConfigError(problem)
        yield
