"""Interface of one vLLM in any process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from packaging.version import Version

from kedge.config.rollout_engines import LOWEST_VLLM
from kedge.errors import ConfigError, RolloutError
from kedge.rollout.vllm.weight_payload import WeightPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Request for one response."""

    prompt: list[int]
    params: dict[str, Any]  # keyword arguments of vllm.SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One sampled response."""

    tokens: NDArray[np.int32]  # including the stop token
    logprobs: NDArray[np.float32]  # per token, nats, under the sampling distribution
    stopped: bool  # True: ended by a stop token or stop string, not by the length limit
    version: int  # weights version reported by vLLM; -1: unknown
    # versions in order, each with its number of tokens; empty: unknown
    spans: tuple[tuple[int, int], ...] = ()
    # [tokens, K]; tokens that could have been sampled, then -1; None: all
    allowed: NDArray[np.int32] | None = None
    prompt_logprobs: tuple[float, ...] = ()  # nats, for all prompt tokens but the first; optional


class Service(Protocol):
    """One vLLM.  Calls come from one thread at a time."""

    @property
    def abilities(self) -> tuple[int, bool]:
        """Number of concurrent requests, and whether ``load`` may be called while some run."""
        ...

    def serve(self, new: Mapping[int, GenerationRequest]) -> Mapping[int, GenerationResult]:
        """Add requests by key, and sample for a short time; returns results by key.

        Raises:
            LostRequestsError: the vLLM was restarted and lost its requests.
        """
        ...

    def cancel(self) -> None:
        """Drop all requests."""
        ...

    def load(self, payload: WeightPayload, version: int) -> None:
        """Load the weights and reset caches of older ones."""
        ...

    def version(self) -> int:
        """Version of the weights that vLLM reports; -1: unknown."""
        ...

    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        ...

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory."""
        ...

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate a part of the GPU memory again; both are needed to sample."""
        ...

    def close(self) -> None:
        """Release all resources; may be called again."""
        ...


def check_version(version: str, where: str) -> None:
    """Check that a vLLM is new enough.

    Raises:
        ConfigError: naming ``where`` the vLLM is and both versions.
    """
    if Version(version).release < Version(LOWEST_VLLM).release:
        raise ConfigError(
            f"{where} has version {version}, but Kedge needs vLLM {LOWEST_VLLM} or newer; upgrade"
            " it, for example with pip install -U vllm in its environment"
        )


def scale_out_flags(version: str) -> list[str]:
    """Flags of a server that takes and returns tokens; vLLM before 0.32 has none and needs none."""
    return ["--enable-scale-out"] if Version(version).release >= (0, 32) else []


def parse_version(text: str | None) -> int:
    """The number in vLLM's name of a weight version; -1 for a name not set by Kedge."""
    return int(text) if text is not None and text.lstrip("-").isdigit() else -1


def allowed_tokens(top: Sequence[tuple[int, float]]) -> list[int]:
    """Tokens of positive probability among the most likely ones.

    Args:
        top: token and log-probability (nats), after top-k, top-p and min-p; excluded tokens have
            -inf, or -9999 over HTTP; NaN remains, for ``build_rollout`` to report.

    Raises:
        RolloutError: more tokens could be sampled than are listed.
    """
    tokens = {token: logprob for token, logprob in top if not logprob <= -9999}
    total = sum(map(exp, tokens.values()))
    if total < 0.999:
        raise RolloutError(
            f"vLLM could sample more tokens than the {len(tokens)} most likely ones that it"
            f" reports, which have probability {total:.3g}: top_p and min_p do not limit the"
            " number of tokens, and top_k keeps all that tie with the last; set top_k, or a lower"
            " one"
        )
    return list(tokens)


def allowed_matrix(tops: Sequence[Sequence[tuple[int, float]]]) -> NDArray[np.int32]:
    """``GenerationResult.allowed``; for the arguments and errors see ``allowed_tokens``."""
    rows = [allowed_tokens(top) for top in tops]
    allowed = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
    for i, row in enumerate(rows):
        allowed[i, : len(row)] = row
    return allowed
