"""One rollout engine for all ranks that train together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kedge.errors import RolloutError
from kedge.protocols import RolloutEngine
from kedge.rollout.rows import slice_rollout, stack_prompts, with_prompts, without_columns
from kedge.types import PromptBatch, Receipt, Rollout, Sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The request of one rank."""

    call: str = ""  # equal on all ranks with a request; empty: no request
    prompts: PromptBatch | None = None
    sampling: Sampling | None = None
    seed: int = 0


class RankSharedEngine:
    """Rank 0 holds the engine; the other ranks send it their prompts and receive their responses.

    Every rank makes the same calls in the same order; one that samples less often than others calls
    ``wait_for_other_ranks``.  Random numbers depend on the row in the batch of all ranks, so a
    response does not depend on the number of ranks.

    Args:
        engine: the engine on rank 0, None on the others.
        groups: process groups of the ranks.
        logprobs: the kind of log-probabilities that the engine records.
        extra_columns: slots that the engine leaves after the longest response.
    """

    shares_weights: Literal[False] = False

    def __init__(
        self,
        engine: RolloutEngine | None,
        groups: RankGroups,
        *,
        logprob_kind: Literal["sampled", "raw", "none"],
        extra_columns: int,
    ) -> None:
        self.engine: Any = engine
        self.logprob_kind: Literal["sampled", "raw", "none"] = logprob_kind
        self.ranks, self._extra_columns = groups, extra_columns
        self.sync_dtype: torch.dtype | None = getattr(engine, "sync_dtype", None)
        self.stage_weights: Any = getattr(engine, "stage_weights", None)
        self._lock = threading.Lock()

    @property
    def engines(self) -> tuple[RolloutEngine, ...]:
        """On rank 0 the engines that can sample concurrently; none on the others."""
        return tuple(getattr(self.engine, "engines", ())) or (self.engine,) * (self.ranks.rank == 0)

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed) alone.

        Raises:
            RolloutError: the engine failed; raised on every rank.
        """
        call = f"generate with seed {seed} and {sampling}"
        request = _Request(
            call=call, prompts=without_columns(prompts), sampling=sampling, seed=seed
        )
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

        return self._request(_Request(call=f"load version {version}"), load)

    def close(self) -> None:
        """Release the engine on rank 0."""
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()

    def _generate(
        self, engine: RolloutEngine, requests: list[_Request]
    ) -> list[tuple[Rollout | None, bool]]:
        """Generate the responses of each rank; returns whether any rank requested some, too."""
        active = [request for request in requests if request.prompts is not None]
        if not active:
            return [(None, False)] * len(requests)
        parts = [request.prompts for request in active if request.prompts is not None]
        sampling = active[0].sampling
        assert sampling is not None  # set with the prompts
        whole = engine.generate(stack_prompts(parts), sampling=sampling, seed=active[0].seed)
        responses: list[tuple[Rollout | None, bool]] = []
        begin = 0
        for prompts in (request.prompts for request in requests):
            if prompts is None:
                responses.append((None, True))
                continue
            rows = slice(begin, begin + len(prompts))
            responses.append((slice_rollout(whole, rows, prompts, self._extra_columns), True))
            begin = rows.stop
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
    wait for each other, and neither may interfere with the collectives of training.

    Args:
        timeout: seconds that one call may take.
        mail: carries what ``scatter`` sends: a ``kedge.ray.context.RankContext``; None: gloo.
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


def build_shared_engine(
    make: Callable[[], RolloutEngine],
    *,
    ranks: int,
    timeout: float,
    extra_columns: int,
    mail: Any = None,
) -> RolloutEngine:
    """Make an engine with ``make``; several ranks share it.

    Args:
        make: called on rank 0 only.
        ranks: number of processes that train together; each must call this.
        timeout: seconds that making the engine, or one batch, may take.
        extra_columns: slots that the engine leaves after the longest response.
        mail: as for ``RankGroups``.
    """
    if ranks == 1:
        return make()
    groups = RankGroups(timeout, mail)
    engines: list[RolloutEngine] = []

    def start(requests: list[Any]) -> list[Any]:
        engines.append(make())
        return [engines[0].logprob_kind] * len(requests)

    logprob_kind = groups.run_on_first(None, start)
    return RankSharedEngine(
        engines[0] if engines else None,
        groups,
        logprob_kind=logprob_kind,
        extra_columns=extra_columns,
    )
