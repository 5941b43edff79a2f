"""Output folders: checked before anything is loaded, and locked while a run writes to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list

from kedge.errors import ConfigError
from kedge.output import RunLock, check_folder


def check_targets(args: Any) -> None:
    """Check that output folders can be created and written to."""
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
    """Hold the lock on ``output_dir``; call it on every rank, rank 0 locks."""
    with ExitStack() as stack:
        problem = None
        if args.output_dir and args.process_index == 0:
            try:
                stack.enter_context(RunLock(args.output_dir))
            except ConfigError as error:
                problem = str(error)
        if args.world_size > 1:
            (problem,) = broadcast_object_list([problem])
        if problem is not None:
            raise ConfigError(problem)
        yield
