"""vLLM as a rollout engine: in this process, as a server started by Kedge, or a running server.

PolicyTemplate  the policy without its trained weights; can be pickled
Service     one vLLM: InProcess, or the client of a Server
VLLMEngine  the rollout engine over a service: records in and out, and verified weight syncs
"""

from importlib import import_module
from typing import Any

_MODULES = {  # imported on first use: `specs`, which is read with every option, needs none of them
    "GenerationRequest": "requests",
    "GenerationResult": "requests",
    "InProcess": "inprocess",
    "PolicyTemplate": "policy_template",
    "Server": "server",
    "Service": "engine",
    "VLLMEngine": "engine",
}
__all__ = [*_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
