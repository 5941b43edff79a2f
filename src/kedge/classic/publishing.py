"""Saves the trained model and its card, and pushes both to the hub."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from kedge import __version__
from kedge.backends.hub import Hub
from kedge.classic.config import PPOConfig

_CARD = """\
---
library_name: transformers
tags:
- kedge
- ppo
- reinforcement-learning
---

# {name}

A language model trained by PPO (Schulman et al. 2017, arXiv:1707.06347) with
[Kedge](https://pypi.org/project/kedge) {version}, transformers {transformers}.

```python
from kedge.classic import {loader}

model = {loader}.from_pretrained({source!r})
```

The model alone, without its value head, loads as any transformers model does.

| option | value |
|---|---|
{options}
"""
_OPTIONS = (
    *("learning_rate", "batch_size", "mini_batch_size", "gradient_accumulation_steps"),
    *("ppo_epochs", "init_kl_coef", "adap_kl_ctrl", "target", "kl_penalty", "gamma", "lam"),
    *("cliprange", "cliprange_value", "vf_coef", "max_grad_norm", "seed", "reward_model"),
)


def push(
    save: Callable[[str], None],
    repo_id: str,
    *,
    commit_message: str = "Upload model",
    branch: str | None = None,
    **hub_options: Any,
) -> Any:
    """Upload the files that ``save`` writes to a repository, created if missing.

    Args:
        save: writes into the given folder.
        repo_id: "name" or "organization/name".
        commit_message: message of the commit.
        branch: None: "main".
        **hub_options: of ``kedge.backends.hub.Hub``: private, token, api.

    Raises:
        HubError: the upload failed; says what to do.
    """
    hub = Hub(repo_id, revision=branch, **hub_options)
    hub.create()
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        return hub.push(folder, message=commit_message)


class Publishing:
    """Saving and publishing of a trainer's model."""

    accelerator: Accelerator
    config: PPOConfig
    model: Any
    tokenizer: Any

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **push_kwargs: Any,
    ) -> None:
        """Write model, value head, tokenizer and model card.

        Only the main process writes; the others return immediately, so all processes or only the
        main one may call it.

        Args:
            save_directory: created if missing.
            repo_id: repository for ``push_to_hub``; None: the folder's name.
            push_to_hub: also upload it.
            **push_kwargs: of ``push_to_hub``.
        """
        if not self.accelerator.is_main_process:
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._save_pretrained(folder)
        if push_to_hub:
            self.push_to_hub(repo_id or folder.name, **push_kwargs)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write model, value head, tokenizer and model card into an existing folder."""
        self.model.save_pretrained(str(save_directory))
        self.tokenizer.save_pretrained(str(save_directory))
        self.create_model_card(str(save_directory), save_directory.name)

    def push_to_hub(self, repo_id: str, **push_kwargs: Any) -> Any:
        """Upload model, value head, tokenizer and card; the arguments are those of ``push``."""
        if not self.accelerator.is_main_process:
            return None

        def write(folder: str) -> None:
            self._save_pretrained(Path(folder))
            self.create_model_card(folder, repo_id)

        return push(write, repo_id, **push_kwargs)

    def create_model_card(self, path: str | Path, model_name: str | None = "TRL Model") -> None:
        """Write ``README.md``: the model, how to load it, and its training options.

        Args:
            path: folder, created if missing.
            model_name: heading of the card.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        options = "\n".join(f"| `{n}` | {getattr(self.config, n)} |" for n in _OPTIONS)
        text = _CARD.format(
            name=model_name,
            version=__version__,
            transformers=metadata.version("transformers"),
            loader=type(self.model).__name__,
            source=model_name,
            options=options,
        )
        (Path(path) / "README.md").write_text(text, encoding="utf-8")
