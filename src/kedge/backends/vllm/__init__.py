"""vLLM as a rollout engine: in this process, as a server of our own, or as one that runs already.

PolicySpec   what an engine has to know of a policy; can be pickled
Service     one vLLM: InProcess, Server (a process of ours) or Remote (one that runs already)
VLLMEngine  the rollout engine over a service: records in and out, and the receipts
"""

from kedge.backends.vllm.engine import VLLMEngine
from kedge.backends.vllm.inprocess import InProcess
from kedge.backends.vllm.policy_spec import PolicySpec
from kedge.backends.vllm.remote import Remote
from kedge.backends.vllm.server import Server
from kedge.backends.vllm.service import GenerationRequest, GenerationResult, Service

__all__ = [
    "GenerationRequest",
    "GenerationResult",
    "InProcess",
    "PolicySpec",
    "Remote",
    "Server",
    "Service",
    "VLLMEngine",
]
