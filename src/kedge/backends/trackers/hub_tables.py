"""Tables of completions as a dataset on the Hugging Face Hub, one file per table."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.backends.hub import Hub, explain
from kedge.backends.trackers.base import json_line
from kedge.errors import HubError

_CARD = """\
---
tags:
- kedge
- completions
configs:
{configs}---
# Completions of a Kedge run
{model}
Prompts, completions and scores during training; `step-000012.jsonl` is after iteration 12.
"""


class HubTables:
    """Sends every table to a dataset repository, in the background and in order.

    The repository is created at once, so that a wrong token fails before training; later failures
    only warn, once.

    Args:
        hub: the dataset repository.
        model: repository of the model, for the card.
    """

    def __init__(self, hub: Hub, *, model: str | None = None) -> None:
        self.hub, self._model = hub, model
        self._names: list[str] = []  # kinds of tables that the card lists
        self._sent: list[Any] = []  # futures of uploads
        self._warned = False
        hub.create()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Do nothing: other trackers log metrics."""

    def table(self, name: str, rows: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Send one table, as ``NAME/step-000012.jsonl``."""
        if not rows:
            return
        try:
            if name not in self._names:
                self._names.append(name)
                self._send("README.md", self._card(), "The card")
            text = "".join(json_line({"step": step, **row}) for row in rows)
            self._send(f"{name}/step-{step:06d}.jsonl", text, f"{name} after iteration {step}")
        except HubError as error:
            self._warn(error)
        self._check_uploads(wait=False)

    def close(self) -> None:
        """Wait for all uploads."""
        self._check_uploads(wait=True)

    def _send(self, path: str, text: str, message: str) -> None:
        self._sent.append(self.hub.write(path, text, message=message, blocking=False))

    def _check_uploads(self, *, wait: bool) -> None:
        ready = [upload for upload in self._sent if wait or upload.done()]
        self._sent = [upload for upload in self._sent if upload not in ready]
        for upload in ready:
            error = upload.exception()
            if error is not None:
                self._warn(error)

    def _warn(self, error: BaseException) -> None:
        if not self._warned:
            self._warned = True
            reason = error if isinstance(error, HubError) else explain(error, self.hub.repo_id)
            warnings.warn(
                f"some completions were not uploaded to {self.hub.url}: {reason}", stacklevel=3
            )

    def _card(self) -> str:
        configs = "".join(
            f"- config_name: {json.dumps(name)}\n  data_files: {json.dumps(name + '/*.jsonl')}\n"
            for name in self._names
        )
        model = f"\nThe model: [{self._model}](https://hf.co/{self._model}).\n"
        return _CARD.format(configs=configs, model=model if self._model else "")
