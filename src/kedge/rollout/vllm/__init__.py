"""vLLM as a rollout engine: in this process, as a server started by Kedge, or a running server.

PolicyTemplate  the policy without its trained weights; can be pickled
Service     one vLLM: InProcess, Server (started by Kedge) or Remote (already running)
VLLMEngine  the rollout engine over a service: records in and out, and verified weight syncs
"""

from kedge.rollout.vllm.engine import Service, VLLMEngine
from kedge.rollout.vllm.inprocess import InProcess
from kedge.rollout.vllm.policy_template import PolicyTemplate
from kedge.rollout.vllm.remote import Remote
from kedge.rollout.vllm.server import Server
from kedge.rollout.vllm.service import GenerationRequest, GenerationResult

__all__ = [
    "GenerationRequest",
    "GenerationResult",
    "InProcess",
    "PolicyTemplate",
    "Remote",
    "Server",
    "Service",
    "VLLMEngine",
]
