"""The rollout engine over one vLLM, with verified weight syncs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.background import Stopped, check_stop
from kedge.ext.vllm.inprocess import InProcess
from kedge.ext.vllm.policy_template import Expected, PolicyTemplate
from kedge.ext.vllm.requests import (
    GenerationRequest,
    GenerationResult,
    build_requests,
    read_responses,
)
from kedge.ext.vllm.server import Server
from kedge.records.errors import RolloutError, SyncError
from kedge.records.protocols import EngineInfo
from kedge.records.types import PromptBatch, Receipt, Rollout, Sampling
from kedge.rollout.embedded.engine import check_prompts
from kedge.rollout.embedded.sampling import check_sampling
from kedge.rollout.engines import GroupRequests, build_rollout

Service = InProcess | Server  # one vLLM; calls come from one thread at a time
FULL_PRECISION, LOW_PRECISION = 1e-3, 5e-2  # allowed mean gaps, nats per token
_ROUNDING = 2.5  # allowed multiple of the learner's own rounding error in low precision
_SCORE: dict[str, Any] = {  # return log-probabilities of the prompt
    "max_tokens": 1,
    "prompt_logprobs": 0,
    "logprobs": 0,
    "temperature": 1.0,
    "detokenize": False,
}
_CHANGED = 0.25  # share of probe values an update must change to be detected in low precision


class VLLMEngine:
    """A rollout engine that samples with vLLM.

    The seed of a row depends only on (seed, row).  vLLM computes rows in batches of varying sizes,
    so rounding can, rarely, change a sampled token.

    Args:
        service: the vLLM.
        spec: the policy without its trained weights.
        pad_id: token id that fills ``Rollout.ids`` after the end of a response.
        tolerance: largest accepted mean difference of log-probabilities between vLLM and the
            learner's code on the probe after a weight sync, nats per token.  None: 1e-3 in float32;
            in another dtype 5e-2, or 2.5 times what that dtype changes in the learner's code.
        extra_column: leave one slot after the longest response if max_new_tokens allows.
        sleeps: free vLLM's GPU memory between calls of ``generate``.
    """

    shares_weights: Literal[False] = False  # the engine holds its own copy
    logprob_kind: Literal["sampled"] = "sampled"

    def __init__(
        self,
        service: Service,
        spec: PolicyTemplate,
        *,
        pad_id: int,
        tolerance: float | None = None,
        extra_column: bool = False,
        sleeps: bool = False,
    ) -> None:
        self.service = service
        self.spec = spec
        self._pad_id = pad_id
        self._tolerance = tolerance
        self._extra_column = extra_column
        self._sleeps = sleeps
        self._asleep: set[Literal["weights", "kv_cache"]] = set()  # GPU memory of these is released
        self.max_length = service.max_length()  # maximum tokens of prompt and response together
        self._last: _Sync | None = None
        self._sent: int | None = None  # version of the weights sent last
        self._incomplete: int | None = None  # version whose weights may be incomplete
        self._requests = GroupRequests[GenerationResult]()
        self._new: dict[int, GenerationRequest] = {}  # requests not yet sent to the service
        self._keys = itertools.count(-1, -1)  # negative keys for other requests

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed).

        Raises:
            ConfigError: the sampling does not fit this model.
            RolloutError: the prompts break the contract, or vLLM failed.
            SyncError: vLLM sampled with other weights than those loaded.
        """
        requests = self._build_requests(prompts, sampling, seed)
        self._wake("weights", "kv_cache")
        results = self._run(requests)
        if self._sleeps:
            self.service.sleep()
            self._asleep = {"weights", "kv_cache"}
        if self._sent is not None:
            reported = {version for result in results for version, _ in result.versions}
            if wrong := reported - {self._sent}:
                raise SyncError(
                    f"vLLM sampled with version {min(wrong)} instead of {self._sent}: it lost its"
                    " weights, or another client changes them"
                )
        return self._build_rollout(prompts, results, sampling)

    def _run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Results of these requests, in order; the engine's other requests continue meanwhile."""
        new = {next(self._keys): request for request in requests}
        keys, results = list(new), dict[int, GenerationResult]()
        while not results.keys() >= set(keys):  # others may be left over from a failed call
            self._check_stop()
            answers, new = self.service.serve(new), {}
            if not answers and not self.service.holds_requests:  # it would be asked for ever
                raise RolloutError(
                    f"vLLM has lost {len(set(keys) - {*results})} of {len(keys)} requests; resume"
                    " the run from its latest checkpoint"
                )
            results |= self._put_held(answers)
        return [results[key] for key in keys]

    def _put_held(self, results: Mapping[int, GenerationResult]) -> dict[int, GenerationResult]:
        """Store results of held requests; returns the others, which belong to ``_run``."""
        for key, result in results.items():
            if key >= 0:
                self._requests.put(key, result)
        return {key: result for key, result in results.items() if key < 0}

    def _build_rollout(
        self, prompts: PromptBatch, results: Sequence[GenerationResult], sampling: Sampling
    ) -> Rollout:
        tokenizer, vocabulary = self.spec.tokenizer, self.spec.vocabulary
        responses = read_responses(results, sampling, tokenizer=tokenizer, vocabulary=vocabulary)
        pad_id, extra = self._pad_id, self._extra_column
        return build_rollout(prompts, responses, sampling, pad_id=pad_id, extra_column=extra)

    def _build_requests(
        self, prompts: PromptBatch, sampling: Sampling, seed: int
    ) -> list[GenerationRequest]:
        self._check_complete()
        check_sampling(sampling, self.spec.vocabulary)
        check_prompts(prompts, sampling, self.spec.meta_model.config)
        lengths, limits = prompts.mask.sum(-1), prompts.limits(sampling).to(prompts.mask.device)
        row = int((lengths + limits).argmax())
        if lengths[row] + limits[row] > self.max_length:  # vLLM would silently cut the response
            raise RolloutError(
                f"the prompt of {lengths[row]} tokens and max_new_tokens={limits[row]}"
                f" need {lengths[row] + limits[row]} tokens, but vLLM was started with"
                f" max_model_len={self.max_length} (vllm_engine_args); raise"
                " it, or shorten prompts (max_prompt_length) or responses"
            )
        return build_requests(prompts, sampling, seed, vocabulary=self.spec.vocabulary)

    @functools.cached_property
    def info(self) -> EngineInfo:
        """VLLM's limits; it samples whole batches alone if it sleeps between them.

        With an adapter, weights are not updated in flight: vLLM 0.32 on CPUs cannot score the probe
        of a weight sync in one step with other requests (``bgmv_shrink`` gets the wrong number of
        rows).
        """
        adapter = self.spec.adapter is not None
        return EngineInfo(
            slots=0 if self._sleeps else self.service.slots(),
            updates_in_flight=not self._sleeps and not adapter,
            max_length=self.max_length,
            sync_dtype=None if adapter else self.spec.dtype,
        )

    @property
    def unfinished(self) -> int:
        """Responses that are being sampled."""
        return self._requests.unfinished

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        """Add rows; each is sampled as by ``generate``."""
        requests = self._build_requests(prompts, sampling, seed)
        keys = self._requests.add(prompts, sampling)
        self._new |= dict(zip(keys, requests, strict=True))

    def advance(self) -> Rollout | None:
        """Sample for a short time; returns complete groups."""
        self._check_complete()
        self._check_stop()
        new, self._new = self._new, {}
        self._put_held(self.service.serve(new))
        return self._requests.take_complete(self._build_rollout)

    def _check_stop(self) -> None:
        try:
            check_stop()
        except Stopped:
            self.cancel()  # or vLLM would go on with them
            raise

    def cancel(self) -> None:
        """Drop all requests."""
        self._requests.clear()
        self._new = {}
        self.service.cancel()

    def _wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        for part in parts:
            if part in self._asleep:
                self.service.wake(part)
                self._asleep.remove(part)

    def _check_complete(self) -> None:
        if self._incomplete is not None:
            raise SyncError(
                f"vLLM cannot sample: loading version {self._incomplete} failed, so it may have"
                " weights of two versions; load weights again, or resume the run"
            )

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt:
        """Send ``weights`` to vLLM and verify that it computes with them.

        The receipt has the version that vLLM reports, and the fingerprint of the weights after vLLM
        and the learner's code agreed on the probe.

        Raises:
            SyncError: the weights do not fit the policy, or vLLM does not compute with them.
        """
        payload, expected = self.spec.payload(weights), self.spec.expected(weights)
        return self.load(partial(self.service.load, payload, version), version, expected)

    def load(self, load: Callable[[], None], version: int, expected: Expected) -> Receipt:
        """Load weights by calling ``load``, and verify that vLLM computes with them.

        ``expected`` is ``PolicyTemplate.expected`` of the weights.
        """
        dtype, tolerance = self.spec.dtype, self._tolerance
        if tolerance is None:
            tolerance = FULL_PRECISION
            if dtype is not None and dtype != torch.float32:
                rounding = _distance(expected.rounded, expected.logprobs)
                tolerance = max(LOW_PRECISION, _ROUNDING * rounding)
        self._wake("weights")  # not the KV cache yet: loading needs memory
        self._incomplete = version
        load()
        self._wake("kv_cache")
        # One by one: with an adapter, vLLM on CPUs mixes up rows that it scores together.
        probe = [GenerationRequest(prompt=row, params=_SCORE) for row in self.spec.probe().tolist()]
        measured = torch.tensor([self._run([request])[0].prompt_logprobs for request in probe])
        if (reported := self.service.version()) != version:
            raise SyncError(f"vLLM reports version {reported} after being sent {version}")
        sync = _Sync(version, expected, measured)
        _verify(sync, self._last, tolerance)
        self._last, self._sent, self._incomplete = sync, version, None
        return Receipt(version=reported, fingerprint=expected.fingerprint, gap=sync.gap)

    def close(self) -> None:
        """Release the vLLM."""
        self.service.close()


@dataclass(frozen=True, slots=True)
class _Sync:
    """A weight sync: the sent weights, and the probe's log-probabilities with them."""

    version: int
    expected: Expected
    measured: Tensor  # by vLLM: float32 [rows, tokens], nats

    @property
    def gap(self) -> float:
        """Mean difference between vLLM and the learner's code."""
        return _distance(self.measured, self.expected.logprobs)


def _verify(sent: _Sync, before: _Sync | None, tolerance: float) -> None:
    """Check that vLLM has the sent weights."""
    if before is not None:
        moved = _distance(sent.expected.logprobs, before.expected.logprobs)
        visible = moved > 4 * before.gap + 1e-7
        # In bfloat16, one update is below the rounding error, but changes the rounded numbers.
        different = sent.expected.rounded != before.expected.rounded
        changed = float(different.float().mean()) > _CHANGED
        if (visible or changed) and torch.equal(sent.measured, before.measured):
            raise SyncError(
                f"loading version {sent.version} had no effect: vLLM computes the numbers"
                f" of version {before.version}, but the policy moved by {moved:.3g} nats per token"
            )
        old_gap = _distance(sent.measured, before.expected.logprobs)
        if visible and old_gap < sent.gap:
            raise SyncError(
                f"after loading version {sent.version}, vLLM is closer to version {before.version}"
                f" ({old_gap:.3g} nats per token) than to the sent one ({sent.gap:.3g}): it uses"
                " old weights or a stale cache"
            )
    if not sent.gap <= tolerance:
        raise SyncError(
            f"after loading version {sent.version}, vLLM and the learner differ by {sent.gap:.3g}"
            f" nats per token on the probe (vllm_tolerance={tolerance:g}). Likely causes: a weight"
            " that vLLM did not load (a tied head), another precision (dtype in vllm_engine_args),"
            " or a model that vLLM implements differently"
        )


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())
