"""The dialects of TRL: its names and defaults, for each generation of its API.

    from kedge.trl import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer

has those of TRL 0.22 and later; ``kedge.trl.v0_17`` those of 0.12 to 0.21, and ``kedge.trl.v0_11``
those of 0.4 to 0.11.
"""

from __future__ import annotations

import importlib
from typing import Any

_SCRIPTS = "kedge.ext.trl.scripts"
_OPTIONS, _TRAINERS = "kedge.ext.trl.options", "kedge.ext.trl.compat.trl_trainers"
_MODULES = {
    **dict.fromkeys(("PPOConfig", "RLOOConfig", "GRPOConfig"), _OPTIONS),
    **dict.fromkeys(("PPOTrainer", "RLOOTrainer", "GRPOTrainer"), _TRAINERS),
    **dict.fromkeys(("ModelConfig", "ScriptArguments", "TrlParser"), _SCRIPTS),
    **dict.fromkeys(("get_kbit_device_map", "get_peft_config"), _SCRIPTS),
    "get_quantization_config": _SCRIPTS,
}
__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kedge.trl' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
