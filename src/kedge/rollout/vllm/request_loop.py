"""The requests that a vLLM in this process holds, and the steps of its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kedge.errors import RolloutError
from kedge.rollout.vllm.service import GenerationRequest

_STEPS = 16  # of the engine in one call of ``advance``


class Output(NamedTuple):
    """What vLLM returned for a request, and which weights sampled it."""

    request: Any  # vllm.RequestOutput
    spans: tuple[tuple[int, int], ...]  # as in ``GenerationResult``


class RequestLoop:
    """Steps a vLLM engine; requests can be added between steps.

    Args:
        engine: a ``vllm.v1.engine.llm_engine.LLMEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._count = 0  # requests so far
        self._in_flight: dict[str, int] = {}  # vLLM's name of a request -> key
        self._outputs: dict[int, Output] = {}  # complete, by key
        self.version = 0  # of the weights
        self._starts: dict[int, list[tuple[int, int]]] = {}  # by key: (version, its first token)

    @property
    def holds(self) -> bool:
        """Whether it holds requests, or outputs of them."""
        return bool(self._in_flight or self._outputs)

    def set_version(self, version: int) -> None:
        """Requests that are held sample their next tokens with weights of this version."""
        self.version = version
        for state in self._engine.output_processor.request_states.values():
            key = self._in_flight[state.external_req_id]
            self._starts[key].append((version, state.detokenizer.num_output_tokens()))

    def run(self, requests: Sequence[GenerationRequest], adapter: Any) -> list[Output]:
        """The outputs of these requests; others that are held are sampled on meanwhile."""
        keys = [-1 - self._count - i for i in range(len(requests))]
        self.add(dict(zip(keys, requests, strict=True)), adapter)
        while not all(key in self._outputs for key in keys):
            self._step()
        return [self._outputs.pop(key) for key in keys]

    def add(self, requests: Mapping[int, GenerationRequest], adapter: Any) -> None:
        """Hold these requests, by key.

        Raises:
            RolloutError: vLLM rejected one.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for key, request in requests.items():
            params = SamplingParams(
                **request.params, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY
            )
            # The salt keeps apart prefixes that different weights have read.
            prompt = {"prompt_token_ids": request.prompt, "cache_salt": str(self.version)}
            self._count += 1
            name = str(self._count)
            try:
                self._engine.add_request(name, prompt, params, lora_request=adapter)
            except ValueError as error:
                raise RolloutError(f"vLLM rejected a prompt: {error}") from error
            self._in_flight[name] = key
            self._starts[key] = [(self.version, 0)]

    def advance(self) -> dict[int, Output]:
        """Step until a request is complete, at most 16 times; outputs by key of at least 0."""
        for _ in range(_STEPS):
            if self._outputs or not self._in_flight:
                break
            self._step()
        outputs, self._outputs = self._outputs, {}
        return {key: out for key, out in outputs.items() if key >= 0}

    def cancel(self) -> None:
        """Drop all requests."""
        self._engine.abort_request(list(self._in_flight))
        self._in_flight.clear()
        self._starts.clear()
        self._outputs.clear()

    def _step(self) -> None:
        for out in self._engine.step():
            if out.finished:
                key = self._in_flight.pop(out.request_id)
                versions, starts = zip(*self._starts.pop(key), strict=True)
                ends = (*starts[1:], len(out.outputs[0].token_ids))
                counts = [end - start for start, end in zip(starts, ends, strict=True)]
                spans = tuple((v, n) for v, n in zip(versions, counts, strict=True) if n)
                self._outputs[key] = Output(out, spans)
