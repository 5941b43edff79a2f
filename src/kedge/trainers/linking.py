"""Links between a run's trackers, its hub repository and its card."""

from __future__ import annotations

from typing import Any

from kedge.backends.trackers.links import note, run_links
from kedge.trainers.about import add_links
from kedge.trainers.beside import Beside
from kedge.trainers.hf_callbacks import Callbacks
from kedge.trainers.pushing import PushOnSave
from kedge.trainers.services import completions_url, services_of, writer_of


def link(callbacks: Callbacks, args: Any) -> dict[str, str]:
    """Once the trackers are open: tell them of the repository, and ``run.json`` of all addresses.

    Only the first process does; returns the addresses by name.
    """
    if not callbacks.state.is_world_process_zero:
        return {}
    services = services_of(callbacks)
    links = run_links(services)
    pushes = [c for c in callbacks.handler.callbacks if isinstance(c, PushOnSave)]
    if pushes:
        links["hub"] = pushes[0].hub.url
        facts = {"hub_repository": links["hub"]}
        note(services, facts, tensorboard=lambda: writer_of(callbacks))
    completions = completions_url(callbacks)
    if completions is not None:
        links["completions"] = completions
    if links and args.output_dir:
        with Beside().writing("addresses of the run", args.output_dir):
            add_links(args.output_dir, links)
    return links
