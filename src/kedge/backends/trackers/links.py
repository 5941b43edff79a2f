"""Links between a run in a tracker, its model repository and other trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def run_links(services: Sequence[str]) -> dict[str, str]:
    """URLs of the run in the trackers that have one; local and offline runs have none.

    Args:
        services: names in ``report_to`` with open runs.
    """
    finders: dict[str, Callable[[], str | None]] = {
        "wandb": _wandb,
        "trackio": _trackio,
        "mlflow": _mlflow,
    }
    urls = {name: finders[name]() for name in services if name in finders}
    return {name: url for name, url in urls.items() if url}


def note(
    services: Sequence[str],
    facts: Mapping[str, str],
    *,
    tensorboard: Callable[[], Any] = lambda: None,
) -> None:
    """Write facts, such as the hub repository, into the run's configuration.

    Args:
        services: names in ``report_to`` with open runs.
        facts: name -> text.
        tensorboard: returns the open ``SummaryWriter``, or None.
    """
    if "wandb" in services:
        import wandb

        if wandb.run is not None:
            wandb.config.update(dict(facts), allow_val_change=True)
    if "trackio" in services:
        import trackio

        trackio.config.update(dict(facts), allow_val_change=True)
    if "mlflow" in services:
        import mlflow

        mlflow.set_tags(dict(facts))
    writer = tensorboard()
    for name, text in facts.items() if writer is not None else ():
        writer.add_text(name, text)


def _wandb() -> str | None:
    import wandb

    return getattr(wandb.run, "url", None) or None


def _trackio() -> str | None:
    import trackio

    space = trackio.context_vars.current_space_id.get()
    return f"https://huggingface.co/spaces/{space}" if space else None


def _mlflow() -> str | None:
    import mlflow

    run, server = mlflow.active_run(), mlflow.get_tracking_uri()
    if run is None or not server.startswith("http"):
        return None
    return f"{server.rstrip('/')}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
