"""vLLM as a rollout engine: in this process, as a server started by Kedge, or a running server.

PolicyTemplate  the policy without its trained weights; can be pickled
Service     one vLLM: InProcess, or the client of a Server
VLLMEngine  the rollout engine over a service: records in and out, and verified weight syncs
"""

from kedge.ext.vllm.engine import Service, VLLMEngine
from kedge.ext.vllm.inprocess import InProcess
from kedge.ext.vllm.policy_template import PolicyTemplate
from kedge.ext.vllm.requests import GenerationRequest, GenerationResult
from kedge.ext.vllm.server import Server

__all__ = [
    "GenerationRequest",
    "GenerationResult",
    "InProcess",
    "PolicyTemplate",
    "Server",
    "Service",
    "VLLMEngine",
]
