"""URLs of a run in the trackers that it reports to."""

from __future__ import annotations

from collections.abc import Callable, Sequence


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
