"""What Kedge asks of one vLLM, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kedge.backends.vllm.weight_payload import WeightPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to be sampled."""

    prompt: list[int]
    params: dict[str, Any]  # keyword arguments of vllm.SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One sampled response."""

    tokens: list[int]  # the stop token is the last of them
    logprobs: list[float]  # of each token, nats, in the distribution it was drawn from
    stopped: bool  # by a stop token or stop string, not by the length limit
    version: int  # of the weights that sampled it, as vLLM says; -1: it does not know


class Service(Protocol):
    """One vLLM.  Calls come from one thread at a time."""

    def generate(self, asks: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """The answers, in the order of the asks."""
        ...

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability (nats, temperature 1) of each token of each row but its first."""
        ...

    def load(self, parcel: WeightPayload, version: int) -> None:
        """Compute with these weights from now on, and forget what was cached of older ones."""
        ...

    def version(self) -> int:
        """The version of the weights, as vLLM says; -1: it does not know."""
        ...

    def sleep(self) -> None:
        """Free the memory of the cache until ``wake``."""
        ...

    def wake(self) -> None:
        """Be ready to generate again."""
        ...

    def close(self) -> None:
        """Release everything; calling it again does nothing."""
        ...


def parse_version(text: str | None) -> int:
    """The number in vLLM's name of a weight version; -1 for a name that is none of ours."""
    return int(text) if text is not None and text.lstrip("-").isdigit() else -1
