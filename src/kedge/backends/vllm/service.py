"""Interface of one vLLM, in whatever process it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kedge.backends.vllm.weight_payload import WeightPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Request for one response."""

    prompt: list[int]
    params: dict[str, Any]  # keyword arguments of vllm.SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One sampled response."""

    tokens: list[int]  # including the stop token
    logprobs: list[float]  # of each token, nats, under the sampling distribution
    stopped: bool  # by a stop token or stop string, not by the length limit
    version: int  # of the weights, as vLLM reports; -1: unknown


class Service(Protocol):
    """One vLLM.  Calls come from one thread at a time."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One result per request, in order."""
        ...

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability (nats, temperature 1) of each token of each row but its first."""
        ...

    def load(self, payload: WeightPayload, version: int) -> None:
        """Load the weights and reset caches of older ones."""
        ...

    def version(self) -> int:
        """Version of the weights that vLLM reports; -1: unknown."""
        ...

    def sleep(self) -> None:
        """Free GPU memory until ``wake``."""
        ...

    def wake(self) -> None:
        """Undo ``sleep``."""
        ...

    def close(self) -> None:
        """Release all resources; may be called again."""
        ...


def parse_version(text: str | None) -> int:
    """The number in vLLM's name of a weight version; -1 for a name not set by Kedge."""
    return int(text) if text is not None and text.lstrip("-").isdigit() else -1
