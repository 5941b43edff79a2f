"""Splits the rows of each batch over several rollout engines."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from kedge.errors import LostNodeError, SyncError
from kedge.protocols import RolloutEngine
from kedge.rollout.rows import join_rollouts, split_rows
from kedge.types import PromptBatch, Receipt, Rollout, Sampling

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """Inputs from which every rollout engine is built.

    Args:
        policy: a transformers causal language model with its current weights.
        pad_id: token id after the end of a response.
        tokenizer: needed for stop strings only.
        dtype: precision of the learner; None is float32.
        extra_column: leave one slot after the longest response.
        chunk_rows: rows that an embedded engine samples at a time.
    """

    policy: nn.Module
    pad_id: int
    tokenizer: Any = None
    dtype: torch.dtype | None = None
    extra_column: bool = False
    chunk_rows: int = 64


class ShardedEngine:
    """Gives consecutive rows of a batch to engines that sample concurrently.

    A response depends on (weights, prompt, row, seed), so not on the number of engines.

    Args:
        engines: each holds a copy of the same policy.
        pad_id: fills ``Rollout.ids`` after the end of a response.
        check: rejects prompts that cannot be answered, by their row in the whole batch.
        on_close: called once, after closing the engines; on garbage collection in a new thread.
        send: sends weights to all of the engines at once, between calls of their ``prepare`` and
            ``load_weights``; None: ``load_weights`` alone.
    """

    shares_weights: Literal[False] = False

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        pad_id: int,
        check: Callable[[PromptBatch, Sampling], None] | None = None,
        on_close: Callable[[], None] | None = None,
        send: Callable[[Sequence[Any], Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        self.engines: list[Any] = list(engines)
        self.logprob_kind: Literal["sampled", "raw", "none"] = engines[0].logprob_kind
        self._send = send
        self._pad_id = pad_id
        self._check = check
        self._on_close = on_close
        # Garbage collection runs in any thread, even a Ray thread that ``on_close`` waits for.
        self._forgotten = weakref.finalize(self, _run_in_background, on_close)
        self._forgotten.atexit = False
        self._closed = False
        # The dtype in which weights are sent to engines (None: unchanged), and what puts them
        # where engines read them (None: there is no such place).
        self.sync_dtype: torch.dtype | None = getattr(self.engines[0], "sync_dtype", None)
        self.stage_weights: Any = getattr(self.engines[0], "stage_weights", None)
        self._threads = ThreadPoolExecutor(len(self.engines), thread_name_prefix="engine")

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed) alone.

        Raises:
            RolloutError: an engine failed; raised once the others have finished.
        """
        if self._check is not None:
            self._check(prompts, sampling)

        def sample(engine: RolloutEngine, rows: slice) -> Rollout:
            return engine.generate(prompts.rows(rows), sampling=sampling, seed=seed)

        parts = self._sample(slice(0, len(prompts)), sample)
        return join_rollouts(prompts, parts, self._pad_id)

    def _sample(
        self, rows: slice, sample: Callable[[RolloutEngine, slice], Rollout]
    ) -> list[Rollout]:
        """Collect results of ``sample`` from all engines, in the order of rows.

        Rows of engines whose nodes are lost are sampled again, on the others.
        """
        parts = [
            slice(rows.start + part.start, rows.start + part.stop)
            for part in split_rows(rows.stop - rows.start, len(self.engines))
        ] or [rows]
        engines = self.engines[: len(parts)]
        calls = [partial(sample, engine, part) for engine, part in zip(engines, parts, strict=True)]
        results: list[Rollout] = []
        for result, part in zip(self._call_all(calls, engines), parts, strict=True):
            results += [result] if result is not None else self._sample(part, sample)
        return results

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Load ``weights`` into every engine; returns their receipt, with the largest gap.

        Raises:
            SyncError: the engines report different weights.
        """
        if self._send is not None:
            engines = list(self.engines)
            self._call_all([partial(engine.prepare, version) for engine in engines], engines)
            self._send(self.engines, weights)
        engines = list(self.engines)
        calls = [partial(engine.load_weights, weights, version) for engine in engines]
        loaded = self._call_all(calls, engines)
        receipts = [r for r, engine in zip(loaded, engines, strict=True) if engine in self.engines]
        for i, receipt in enumerate(receipts):
            if receipt != receipts[0]:
                raise SyncError(
                    f"engine {i} of {len(receipts)} reports {receipt} after loading version"
                    f" {version}, and engine 0 {receipts[0]}: they would sample from two policies"
                )
        return max(receipts, key=lambda r: (r and r.gap) or 0.0)

    def close(self) -> None:
        """Release the engines; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            engines = [e for e in self.engines if hasattr(e, "close")]
            self._call_all([engine.close for engine in engines], engines)
        finally:
            self._threads.shutdown(wait=True)
            if self._forgotten.detach() and self._on_close is not None:
                self._on_close()

    def _call_all(
        self, calls: Sequence[Callable[[], T]], engines: Sequence[RolloutEngine]
    ) -> list[T | None]:
        """Make concurrent calls; an error is raised once all have ended.

        An engine whose node is lost is dropped, with None as its result, unless it is the last.
        """
        futures = [self._threads.submit(call) for call in calls]
        wait(futures)
        results: list[T | None] = []
        for future, engine in zip(futures, engines, strict=True):
            try:
                results.append(future.result())
            except LostNodeError as error:  # noqa: PERF203
                if len(self.engines) == 1:
                    raise
                logger.warning("%s; continuing with %d engines", error, len(self.engines) - 1)
                self.engines = [other for other in self.engines if other is not engine]
                results.append(None)
        return results


def start_all(
    makers: Sequence[Callable[[], T]], *, undo: Callable[[], None] | None = None
) -> list[T]:
    """Call all makers concurrently; if one fails, close what the others made.

    Args:
        makers: each makes an object with a ``close`` method.
        undo: called after a failure.
    """
    with ThreadPoolExecutor(len(makers)) as threads:
        futures = [threads.submit(make) for make in makers]
        wait(futures)
    if any(future.exception() for future in futures):
        for future in futures:
            if future.exception() is None:
                started: Any = future.result()
                started.close()
        if undo is not None:
            undo()
    return [future.result() for future in futures]


def _run_in_background(function: Callable[[], None] | None) -> None:
    if function is not None:
        threading.Thread(target=function, daemon=True).start()
