"""Several rollout engines that share the rows of each batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from kedge.backends.rollout.rows import join, shares
from kedge.errors import SyncError
from kedge.protocols import RolloutEngine
from kedge.types import PromptBatch, Receipt, Rollout, Sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """What every rollout engine is built from.

    Args:
        policy: a transformers causal language model with its current weights.
        pad_id: token id that fills ``Rollout.ids`` after the end of a response.
        tokenizer: needed for stop strings only.
        dtype: precision of the learner; None is float32.
        extra_slot: leave one slot after the longest response.
        chunk_rows: rows that an embedded engine samples at a time.
        rank: the rank that these engines belong to; None: all ranks share them.
    """

    policy: nn.Module
    pad_id: int
    tokenizer: Any = None
    dtype: torch.dtype | None = None
    extra_slot: bool = False
    chunk_rows: int = 64
    rank: int | None = None


class ShardedEngine:
    """Hands consecutive rows of a batch to engines that work at the same time.

    A response depends on (weights, prompt, row, seed), so it does not depend on how many engines
    there are.

    Args:
        engines: they hold copies of one policy.
        pad_id: fills ``Rollout.ids`` after the end of a response.
        check: refuses prompts that cannot be answered, with their place in the whole batch.
        on_close: called once, after closing the engines or on garbage collection.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        pad_id: int,
        check: Callable[[PromptBatch, Sampling], None] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.engines = list(engines)
        self._pad_id = pad_id
        self._check = check
        self._release = weakref.finalize(self, on_close) if on_close is not None else None
        self._closed = False
        self._threads = ThreadPoolExecutor(len(self.engines), thread_name_prefix="engine")

    @property
    def lanes(self) -> tuple[RolloutEngine, ...]:
        """The engines, each of which can sample on its own."""
        return tuple(self.engines)

    @property
    def shares_weights(self) -> Literal[False]:
        """They hold copies of the policy."""
        return False

    @property
    def logprobs(self) -> Literal["sampled", "raw", "none"]:
        """What the engines' log-probabilities are of."""
        return self.engines[0].logprobs

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed) alone.

        Raises:
            RolloutError: an engine failed; the others have ended their share by then.
        """
        if self._check is not None:
            self._check(prompts, sampling)
        rows = shares(len(prompts), len(self.engines))
        if not rows:  # for its error
            return self.engines[0].generate(prompts, sampling=sampling, seed=seed)
        parts = [prompts.rows(each) for each in rows]
        found = self._all(
            [
                lambda e=e, p=p: e.generate(p, sampling=sampling, seed=seed)  # type: ignore[misc]
                for e, p in zip(self.engines, parts, strict=False)
            ]
        )
        return join(prompts, found, self._pad_id)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Every engine samples from ``weights`` from now on; one receipt, if they all agree.

        Raises:
            SyncError: an engine holds something else than the first.
        """
        receipts = self._all(
            [lambda e=e: e.load_weights(weights, version) for e in self.engines]  # type: ignore[misc]
        )
        for i, receipt in enumerate(receipts):
            if receipt != receipts[0]:
                raise SyncError(
                    f"engine {i} of {len(receipts)} reports {receipt} after loading version"
                    f" {version}, and engine 0 {receipts[0]}: they would sample from two policies"
                )
        return receipts[0]

    def close(self) -> None:
        """Release the engines; calling it again does nothing."""
        closing = [close for e in self.engines if (close := getattr(e, "close", None)) is not None]
        if self._closed:
            return
        self._closed = True
        try:
            self._all(closing)
        finally:
            self._threads.shutdown(wait=True)
            if self._release is not None:
                self._release()

    def _all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of calls made at the same time; an error once all are over."""
        running = [self._threads.submit(call) for call in calls]
        wait(running)
        return [each.result() for each in running]


def start_all(
    makers: Sequence[Callable[[], T]], *, undo: Callable[[], None] | None = None
) -> list[T]:
    """What the makers make, all at the same time; nothing of it is left if one fails.

    Args:
        makers: each makes something with a ``close`` method.
        undo: called after a failure.
    """
    with ThreadPoolExecutor(len(makers)) as threads:
        running = [threads.submit(make) for make in makers]
        wait(running)
    if any(each.exception() for each in running):
        for each in running:
            if each.exception() is None:
                made: Any = each.result()
                made.close()
        if undo is not None:
            undo()
    return [each.result() for each in running]
