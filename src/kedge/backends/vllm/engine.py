"""The rollout engine over one vLLM, and the receipts of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.backends.hf.fingerprint import fingerprint
from kedge.backends.hf.rollout import check_prompts
from kedge.backends.hf.sampling import check
from kedge.backends.vllm.policy_spec import PolicySpec
from kedge.backends.vllm.requests import build_requests, build_rollout
from kedge.backends.vllm.service import Service
from kedge.errors import RolloutError, SyncError
from kedge.types import PromptBatch, Receipt, Rollout, Sampling

FULL_PRECISION, LOW_PRECISION = 1e-3, 5e-2  # accepted mean gaps, nats per token


class VLLMEngine:
    """Samples from a vLLM.

    A row's seed is made of (seed, row) alone.  vLLM computes rows in batches of changing sizes, so
    a draw can differ in the rare case that rounding decides it.

    Args:
        service: the vLLM.
        blueprint: what is known of the policy.
        pad_id: fills ``Rollout.ids`` after the end of a response.
        tolerance: largest accepted mean difference between what vLLM and the learner's code compute
            for the probe after a sync, nats per token.
        extra_slot: leave one slot after the longest response if max_new_tokens allows.
        sleeps: free vLLM's memory between one ``generate`` and the next.
    """

    def __init__(
        self,
        service: Service,
        blueprint: PolicySpec,
        *,
        pad_id: int,
        tolerance: float = FULL_PRECISION,
        extra_slot: bool = False,
        sleeps: bool = False,
    ) -> None:
        self.service = service
        self.blueprint = blueprint
        self.sync_gap = 0.0  # mean difference found by the last receipt, nats per token
        self._pad_id = pad_id
        self._tolerance = tolerance
        self._extra_slot = extra_slot
        self._sleeps = sleeps
        self._last: _Sync | None = None
        self._sent: int | None = None  # the version

    @property
    def shares_weights(self) -> Literal[False]:
        """It holds a copy of the policy."""
        return False

    @property
    def logprobs(self) -> Literal["sampled"]:
        """They are of the very distribution that tokens are drawn from."""
        return "sampled"

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed).

        Raises:
            ConfigError: the sampling cannot work for this model.
            RolloutError: the prompts break the contract, or vLLM failed.
            SyncError: it sampled with other weights than were loaded.
        """
        config: Any = self.blueprint.skeleton.config
        check(sampling, config.get_text_config().vocab_size)
        check_prompts(prompts, sampling, config)
        asks = build_requests(prompts, sampling, seed)
        if self._sleeps:
            self.service.wake()
        answers = self.service.generate(asks)
        if self._sleeps:
            self.service.sleep()
        if len(answers) != len(asks):
            raise RolloutError(f"vLLM answered {len(answers)} of {len(asks)} rows")
        self._check_versions({answer.version for answer in answers})
        return build_rollout(
            answers,
            prompts,
            sampling,
            pad_id=self._pad_id,
            tokenizer=self.blueprint.tokenizer,
            extra_slot=self._extra_slot,
        )

    def _check_versions(self, said: set[int]) -> None:
        if self._sent is not None and (wrong := said - {self._sent, -1}):  # -1: unknown
            raise SyncError(
                f"vLLM sampled with version {min(wrong)} after it was sent version {self._sent}: it"
                " lost its weights, or somebody else exchanges them"
            )

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt:
        """Sample from ``weights`` from now on.

        The receipt is read back: vLLM's own word for the version, and the fingerprint of the
        weights only once vLLM computes with them what the learner's code does.

        Raises:
            SyncError: they do not fit the policy, or vLLM computes something else.
        """
        parcel = self.blueprint.parcel(weights)
        self._sent = version
        sent = _Sync(version, fingerprint(weights), self.blueprint.logprobs(weights))
        if self._sleeps:
            self.service.wake()
        self.service.load(parcel, version)
        heard = torch.tensor(self.service.score(self.blueprint.probe().tolist()))
        said = self.service.version()
        self.sync_gap = _confirm(sent, self._last, heard, said, self._tolerance)
        sent.heard, sent.noise = heard, self.sync_gap
        self._last = sent
        return Receipt(version=said, fingerprint=sent.fingerprint)

    def close(self) -> None:
        """Release the vLLM."""
        self.service.close()


@dataclass(slots=True)
class _Sync:
    """Weights that were sent, and what became of them."""

    version: int
    fingerprint: str
    expected: Tensor  # float32 [rows, tokens]; of the probe, by the learner's code
    heard: Tensor | None = None  # the same, by vLLM
    noise: float = 0.0  # mean difference of the two


def _confirm(
    sent: _Sync, before: _Sync | None, heard: Tensor, said: int, tolerance: float
) -> float:
    """The mean gap between vLLM and the learner's code, if vLLM holds what was sent."""
    if said != sent.version:
        raise SyncError(f"vLLM says it holds version {said} after being sent {sent.version}")
    gap = _distance(heard, sent.expected)
    if before is not None and before.heard is not None:
        moved = _distance(sent.expected, before.expected)
        visible = moved > 4 * before.noise + 1e-7
        if visible and torch.equal(heard, before.heard):
            raise SyncError(
                f"loading version {sent.version} changed nothing: vLLM computes the very numbers of"
                f" version {before.version}, while the policy moved by {moved:.3g} nats per token"
            )
        if visible and _distance(heard, before.expected) < gap:
            raise SyncError(
                f"after loading version {sent.version}, vLLM is closer to version {before.version}"
                f" ({_distance(heard, before.expected):.3g} nats per token) than to what was sent"
                f" ({gap:.3g}): old weights or a stale cache are in use"
            )
    if not gap <= tolerance:
        raise SyncError(
            f"after loading version {sent.version}, vLLM and the learner differ by {gap:.3g} nats"
            f" per token on the probe (limit {tolerance:g}). Likely causes: a weight that vLLM did"
            " not take over (a tied head), another precision (vllm_engine_args dtype), or a model"
            " that vLLM implements differently"
        )
    return gap


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())
