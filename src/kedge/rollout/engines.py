"""What rollout engines share: inputs, requests by row, work split over engines or ranks."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kedge.background import in_thread
from kedge.records.errors import LostNodeError, RolloutError, SyncError
from kedge.records.protocols import RolloutEngine
from kedge.records.types import (
    PromptBatch,
    Receipt,
    Rollout,
    Sampling,
    group_rows,
    with_unique_groups,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response of n tokens, on the host."""

    tokens: Tensor  # int64 [n]
    logprobs: Tensor  # float32 [n], nats
    allowed: Tensor | None  # int64 [n, K]; tokens that could have been sampled, then -1; None: all
    terminated: bool
    versions: Sequence[tuple[int, int]]  # in order, each with the number of tokens from it


def build_rollout(
    prompts: PromptBatch,
    responses: Sequence[Response],
    sampling: Sampling,
    *,
    pad_id: int,
    extra_column: bool,
) -> Rollout:
    """The rollout [B, R] of one response per row, on the device of the prompts.

    With ``extra_column`` there is a slot after the longest response if max_new_tokens allows.
    """
    longest = max(len(x.tokens) for x in responses)
    size = min(longest + extra_column, sampling.max_new_tokens)

    def stack(parts: Sequence[Tensor], fill: float) -> Tensor:
        whole = nn.utils.rnn.pad_sequence([*parts], batch_first=True, padding_value=fill)
        after = [0] * 2 * (whole.ndim - 2)
        return nn.functional.pad(whole, [*after, 0, size - whole.shape[1]], value=fill)

    logprobs = stack([x.logprobs for x in responses], 0.0)
    if not logprobs.isfinite().all():
        row = int((~logprobs.isfinite()).any(1).nonzero()[0])
        raise RolloutError(
            f"the rollout engine returned NaN or infinite log-probabilities for row {row}, sampled"
            f" by version {responses[row].versions[-1][0]}; lower the learning rate, or check the"
            " weights that were loaded"
        )
    if sampling.temperature == 0:
        logprobs = torch.zeros_like(logprobs)  # greedy choices have probability 1
    allowed = [x.allowed for x in responses if x.allowed is not None]
    width = max((x.shape[1] for x in allowed), default=0)
    wide = [nn.functional.pad(x, (0, width - x.shape[1]), value=-1) for x in allowed]
    mask = torch.arange(size) < torch.tensor([len(x.tokens) for x in responses])[:, None]
    rollout = Rollout(
        prompts=prompts,
        ids=stack([x.tokens for x in responses], pad_id),
        loss_mask=mask,
        response_mask=mask.clone(),
        terminated=torch.tensor([x.terminated for x in responses]),
        policy_version=torch.tensor([min(x.versions)[0] for x in responses]),
        token_version=_token_versions(responses, size),
        behavior_logprobs=logprobs,
        allowed_tokens=stack(wide, -1) if wide else None,
    )
    return with_prompts(rollout, prompts)


def _token_versions(responses: Sequence[Response], size: int) -> Tensor | None:
    """``Rollout.token_version`` int64 [B, size]; None if every row has one version."""
    if all(len(x.versions) == 1 for x in responses):
        return None
    versions = torch.full((len(responses), size), -1)
    for i, response in enumerate(responses):
        begin = 0
        for version, tokens in response.versions:
            versions[i, begin : begin + tokens] = version
            begin += tokens
    return versions


class GroupRequests(Generic[T]):
    """The rows of several batches by key, and their results."""

    def __init__(self) -> None:
        self._next = 0  # key of the next row
        self._groups: dict[int, tuple[PromptBatch, Sampling]] = {}  # by group id
        self._results: dict[int, dict[int, T]] = {}  # by group id and index in the group
        self._of_row: dict[int, tuple[int, int]] = {}  # key -> group id and index in the group

    @property
    def unfinished(self) -> int:
        """Rows without a result; not 0 while complete groups were not taken.

        A weight sync or a whole batch may complete the last rows, and callers stop at 0.
        """
        return len(self._of_row) or len(self._groups)

    def add(self, prompts: PromptBatch, sampling: Sampling) -> range:
        """Add whole groups; returns the key of each row, in order."""
        keys = range(self._next, self._next + len(prompts))
        self._next = keys.stop
        for number, rows in zip(*group_rows(prompts), strict=True):
            if number in self._groups:
                raise ValueError(f"group {number} is being sampled; ids of groups must differ")
            self._groups[number], self._results[number] = (prompts.rows(rows), sampling), {}
            self._of_row |= {keys[i]: (number, n) for n, i in enumerate(rows.tolist())}
        return keys

    def put(self, key: int, result: T) -> None:
        """Store the result of a row."""
        number, place = self._of_row.pop(key)
        self._results[number][place] = result

    def take_complete(
        self, build: Callable[[PromptBatch, list[T], Sampling], Rollout]
    ) -> Rollout | None:
        """Remove groups with all results, and ``build`` their rollout.

        It is called once per sampling distribution, with the largest max_new_tokens.
        """
        done = [
            n for n, (prompts, _) in self._groups.items() if len(prompts) == len(self._results[n])
        ]
        by_distribution: dict[Sampling, list[tuple[PromptBatch, Sampling, list[T]]]] = {}
        for number in done:
            (prompts, sampling), results = self._groups.pop(number), self._results.pop(number)
            ordered = [results[i] for i in range(len(prompts))]
            kind = replace(sampling, max_new_tokens=0)
            by_distribution.setdefault(kind, []).append((prompts, sampling, ordered))
        rollouts = [
            build(
                PromptBatch.cat([prompts for prompts, _, _ in groups]),
                [result for _, _, results in groups for result in results],
                max((sampling for _, sampling, _ in groups), key=lambda s: s.max_new_tokens),
            )
            for groups in by_distribution.values()
        ]
        return Rollout.cat(rollouts) if rollouts else None

    def clear(self) -> None:
        """Forget all rows."""
        self._groups.clear()
        self._results.clear()
        self._of_row.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """Inputs from which every rollout engine is built."""

    policy: nn.Module  # a transformers causal language model with its current weights
    pad_id: int
    tokenizer: Any = None  # needed for stop strings only
    dtype: torch.dtype | None = None  # precision of the learner; None is float32
    extra_column: bool = False  # leave one slot after the longest response
    chunk_rows: int = 64  # rows that an embedded engine samples at a time


class ShardedEngine:
    """Gives consecutive rows of a batch to engines that sample concurrently.

    A response depends on (weights, prompt, row, seed), so not on the number of engines.  ``check``
    rejects prompts that cannot be answered, by their row in the whole batch.  ``on_close`` is
    called once, after closing the engines; on garbage collection in a new thread.  ``send`` sends
    weights to all of the engines at once, between calls of their ``prepare`` and ``load_weights``.
    """

    shares_weights: Literal[False] = False

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        pad_id: int,
        check: Callable[[PromptBatch, Sampling], None] | None = None,
        on_close: Callable[[], None] = lambda: None,
        send: Callable[[Sequence[Any], Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        self.engines: list[Any] = list(engines)
        self.logprob_kind: Literal["sampled", "raw", "none"] = engines[0].logprob_kind
        self._send = send
        self._pad_id = pad_id
        self._check = check
        self._on_close = on_close
        # Garbage collection runs in any thread, even a Ray thread that ``on_close`` waits for.
        self._forgotten = weakref.finalize(self, in_thread, on_close)
        self._forgotten.atexit = False
        # The dtype in which weights are sent to engines (None: unchanged), and what puts them
        # where engines read them (None: there is no such place).
        self.sync_dtype: torch.dtype | None = getattr(self.engines[0], "sync_dtype", None)
        self.stage_weights: Any = getattr(self.engines[0], "stage_weights", None)
        self._threads = ThreadPoolExecutor(len(self.engines), thread_name_prefix="engine")

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; an engine's failure is raised once the others have finished."""
        if self._check is not None:
            self._check(prompts, sampling)
        parts = self._generate(prompts, sampling=sampling, seed=seed)
        return join_rollouts(prompts, parts, self._pad_id)

    def _generate(self, prompts: PromptBatch, **how: Any) -> list[Rollout]:
        """The rollouts of all engines, in the order of rows.

        Rows of engines whose nodes are lost are sampled again, on the others.
        """
        ends = [len(prompts) * i // len(self.engines) for i in range(len(self.engines) + 1)]
        parts = [prompts.rows(slice(a, b)) for a, b in pairwise(ends) if b > a] or [prompts]
        engines = self.engines[: len(parts)]
        calls = [
            partial(engine.generate, part, **how)
            for engine, part in zip(engines, parts, strict=True)
        ]
        results: list[Rollout] = []
        for result, part in zip(self._call_all(calls, engines), parts, strict=True):
            results += [result] if result is not None else self._generate(part, **how)
        return results

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Load ``weights`` into every engine; returns their receipt, with the largest gap."""
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
        if self._forgotten.detach() is None:
            return
        try:
            engines = [e for e in self.engines if hasattr(e, "close")]
            self._call_all([engine.close for engine in engines], engines)
        finally:
            self._threads.shutdown(wait=True)
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
    """Call all makers concurrently; if one fails, close what the others made, then ``undo``."""
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


class _Request(NamedTuple):
    """The request of one rank."""

    call: str = ""  # equal on all ranks with a request; empty: no request
    sample: tuple[PromptBatch, Sampling, int] | None = None  # with the seed


class RankSharedEngine:
    """Rank 0 holds the engine; the other ranks send it their prompts and receive their responses.

    ``make`` makes the engine, on rank 0 only.  Every rank makes the same calls in the same order;
    one that samples less often than others calls ``wait_for_other_ranks``.  Random numbers depend
    on the row in the batch of all ranks, so a response does not depend on the number of ranks.  The
    engine leaves ``extra_columns`` slots after the longest response.
    """

    shares_weights: Literal[False] = False

    def __init__(
        self, make: Callable[[], RolloutEngine], ranks: RankGroups, *, extra_columns: int
    ) -> None:
        self.engine: Any = None
        self.ranks, self._extra_columns = ranks, extra_columns
        self._lock = threading.Lock()

        def start(requests: list[None]) -> list[Any]:
            self.engine = make()
            return [self.engine.logprob_kind] * len(requests)

        self.logprob_kind: Literal["sampled", "raw", "none"] = ranks.run_on_first(None, start)
        self.sync_dtype: torch.dtype | None = getattr(self.engine, "sync_dtype", None)
        self.stage_weights: Any = getattr(self.engine, "stage_weights", None)

    @property
    def engines(self) -> tuple[RolloutEngine, ...]:
        """On rank 0 the engines that can sample concurrently; none on the others."""
        return tuple(getattr(self.engine, "engines", ())) or (self.engine,) * (self.ranks.rank == 0)

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; a failure of the engine is raised on every rank."""
        call = f"generate with seed {seed} and {sampling}"
        request = _Request(call, (without_columns(prompts), sampling, seed))
        rollout, _ = self._request(request, self._generate)
        assert rollout is not None  # the request had prompts
        return with_prompts(rollout, prompts)

    def wait_for_other_ranks(self) -> None:
        """Wait until no rank samples any more; rank 0 continues to serve the others."""
        while self._request(_Request(), self._generate)[1]:
            pass

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Load the ``weights`` of rank 0; every rank gets the receipt."""

        def load(engine: RolloutEngine, requests: list[_Request]) -> list[Receipt | None]:
            return [engine.load_weights(weights, version)] * len(requests)

        return self._request(_Request(f"load version {version}"), load)

    def close(self) -> None:
        """Release the engine on rank 0."""
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()

    def _generate(
        self, engine: RolloutEngine, requests: list[_Request]
    ) -> list[tuple[Rollout | None, bool]]:
        """Generate the responses of each rank; returns whether any rank requested some, too."""
        samples = [request.sample for request in requests if request.sample is not None]
        if not samples:
            return [(None, False)] * len(requests)
        _, sampling, seed = samples[0]
        together = PromptBatch.cat(with_unique_groups([prompts for prompts, *_ in samples]))
        whole = engine.generate(together, sampling=sampling, seed=seed)
        responses: list[tuple[Rollout | None, bool]] = []
        begin = 0
        for request in requests:
            rollout = None
            if request.sample is not None:
                prompts = request.sample[0]
                rows = slice(begin, begin + len(prompts))
                rollout = slice_rollout(whole, rows, prompts, self._extra_columns)
                begin = rows.stop
            responses.append((rollout, True))
        return responses

    def _request(
        self, request: _Request, serve: Callable[[RolloutEngine, list[_Request]], list[T]]
    ) -> T:
        def serve_all(requests: list[_Request]) -> list[T]:
            assert self.engine is not None
            if len({r.call for r in requests if r.call}) > 1:
                raise RolloutError(
                    "all ranks must make the same call to the engine that they share, got "
                    + "; ".join(f"rank {i}: {r.call or 'nothing'}" for i, r in enumerate(requests))
                )
            with self._lock:
                return serve(self.engine, requests)

        return self.ranks.run_on_first(request, serve_all)


class RankGroups:
    """Process groups, for the main thread and for sampling, in which rank 0 works for all ranks.

    The thread that creates this (it trains and evaluates) and the one that samples ahead must not
    wait for each other, and neither may interfere with the collectives of training.  One call may
    take ``timeout`` seconds.  ``mail`` carries what ``scatter`` sends: a
    ``kedge.ext.ray.context.RankContext``; None: gloo.
    """

    def __init__(self, timeout: float, mail: Any = None) -> None:
        self._mail = mail
        limit = timedelta(seconds=timeout)
        self._main_thread = threading.get_ident()
        self._main = dist.new_group(backend="gloo", timeout=limit)
        self._sampling = dist.new_group(backend="gloo", timeout=limit)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def scatter(self, work: Callable[[], list[T]]) -> T:
        """This rank's item of ``work()``, which runs on rank 0; an error is raised on every rank.

        Called by the main thread.
        """
        own: list[T] = []

        def send(_: list[None]) -> list[Any]:
            items: list[Any] = work()
            own[:], others = items[:1], items[1:]
            if self._mail is not None:
                self._mail.send(others)
                others = [None] * len(others)
            return [None, *others]

        received = self.run_on_first(None, send)
        if self.rank == 0 or self._mail is None:
            return own[0] if own else received
        return self._mail.receive()

    def run_on_first(self, local: Any, work: Callable[[list[Any]], Sequence[T]]) -> T:
        """This rank's item of ``work([local of every rank])``, which runs on rank 0.

        An error of ``work`` is raised on every rank.
        """
        group = self._main if threading.get_ident() == self._main_thread else self._sampling
        first = self.rank == 0
        gathered: list[Any] = [None] * self.size
        dist.gather_object(local, gathered if first else None, dst=0, group=group)
        outcomes: list[tuple[bool, Any]] | None = None
        if first:
            try:
                outcomes = [(True, x) for x in work(gathered)]
            except Exception as error:  # raised again below, on every rank
                outcomes = [(False, error)] * len(gathered)
        received: list[Any] = [None]
        dist.scatter_object_list(received, outcomes, src=0, group=group)
        succeeded, outcome = received[0]
        if not succeeded:
            raise outcome
        return outcome


def without_columns(prompts: PromptBatch) -> PromptBatch:
    """Prepare prompts for another process: on the CPU, without dataset columns."""
    return replace(prompts.to("cpu"), columns={})


def join_rollouts(prompts: PromptBatch, parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Concatenate the rollouts of consecutive rows of ``prompts``, padded to the widest."""
    names = [f"rollout engine {i} of {len(parts)}" for i in range(len(parts))]
    whole = Rollout.cat([part.to(prompts.ids.device) for part in parts], names=names)
    ids = whole.ids.masked_fill(~whole.response_mask, pad_id)
    return replace(whole, prompts=prompts, ids=ids)


def with_prompts(rollout: Rollout, prompts: PromptBatch) -> Rollout:
    """Restore the prompts and columns of a rollout from another process."""
    return replace(rollout.to(prompts.ids.device), prompts=prompts)


def slice_rollout(rollout: Rollout, rows: slice, prompts: PromptBatch, extra: int) -> Rollout:
    """The rows that answer ``prompts``, as wide as their longest response plus ``extra`` slots."""
    part = replace(rollout.rows(rows), prompts=prompts)
    return part.trim(int(part.response_mask.sum(1).max()) + extra)
