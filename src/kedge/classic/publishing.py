"""Model cards, and uploads to the hub."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import metadata
from typing import Any

from kedge import __version__
from kedge.classic.config import PPOConfig
from kedge.reporting.hub import Hub

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
        **hub_options: of ``kedge.reporting.hub.Hub``: private, token, api.

    Raises:
        HubError: the upload failed; says what to do.
    """
    hub = Hub(repo_id, revision=branch, **hub_options)
    hub.create()
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        return hub.push(folder, message=commit_message)


def model_card(config: PPOConfig, name: str | None, *, loader: str) -> str:
    """The text of a model card: the model, how to load it, and its training options.

    Args:
        config: the options.
        name: of the model, or its repository.
        loader: class of ``kedge.classic`` that loads it.
    """
    return _CARD.format(
        name=name,
        version=__version__,
        transformers=metadata.version("transformers"),
        loader=loader,
        source=name,
        options="\n".join(f"| `{n}` | {getattr(config, n)} |" for n in _OPTIONS),
    )
