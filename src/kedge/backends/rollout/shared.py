"""One rollout engine for all ranks that train together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor

from kedge.backends.rollout.rows import answering, bare, build_share, stack_prompts
from kedge.errors import RolloutError
from kedge.protocols import RolloutEngine
from kedge.types import PromptBatch, Receipt, Rollout, Sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """What a rank wants of the engine."""

    what: str = ""  # what all ranks have to want at the same time; empty: nothing
    prompts: PromptBatch | None = None
    sampling: Sampling | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What a rank gets of a round of sampling."""

    rollout: Rollout | None = None
    more: bool = False  # others are still being served


class RankSharedEngine:
    """The first rank holds the engine; the others send it their prompts and get their responses.

    Every rank makes the same calls in the same order, as the loop does; one that wants less than
    others rests meanwhile.  Draws are named by the row
    in the batch of all ranks, so a response does not depend on the number of ranks.

    Args:
        engine: the engine on the first rank, None on the others.
        ranks: how they talk to each other.
        logprobs: what the engine's log-probabilities are of.
        spare: slots that the engine leaves after the longest response.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        ranks: Ranks,
        *,
        logprobs: Literal["sampled", "raw", "none"],
        spare: int,
    ) -> None:
        self.engine = engine
        self.logprobs: Literal["sampled", "raw", "none"] = logprobs
        self._ranks, self._spare = ranks, spare
        self._turn = threading.Lock()

    @property
    def shares_weights(self) -> Literal[False]:
        """It holds a copy of the policy."""
        return False

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed) alone.

        Raises:
            RolloutError: the engine failed; on every rank.
        """
        what = f"generate with seed {seed} and {sampling}"
        ask = _Ask(what=what, prompts=bare(prompts), sampling=sampling, seed=seed)
        found = self._ask(ask, self._generate).rollout
        assert found is not None  # prompts were brought
        return answering(found, prompts)

    def rest(self) -> None:
        """Ask for nothing until no rank does; the first rank continues to serve the others.

        For ranks that sample unequally often: afterwards all are at the same place again.
        """
        while self._ask(_Ask(), self._generate).more:
            pass

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Sample from the first rank's ``weights`` from now on; every rank gets the receipt."""

        def serve(engine: RolloutEngine, asks: list[_Ask]) -> list[Receipt | None]:
            return [engine.load_weights(weights, version)] * len(asks)

        return self._ask(_Ask(what=f"load version {version}"), serve)

    def close(self) -> None:
        """Release the engine, where it is."""
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()

    def _generate(self, engine: RolloutEngine, asks: list[_Ask]) -> list[_Share]:
        """Every rank's responses, for those that brought prompts."""
        active = [ask for ask in asks if ask.prompts is not None]
        if not active:
            return [_Share()] * len(asks)
        parts = [ask.prompts for ask in active if ask.prompts is not None]
        first = active[0]
        assert first.sampling is not None
        whole = engine.generate(stack_prompts(parts), sampling=first.sampling, seed=first.seed)
        found, begin = [], 0
        for ask in asks:
            if ask.prompts is None:
                found.append(_Share(more=True))
                continue
            rows = slice(begin, begin + len(ask.prompts))
            found.append(_Share(rollout=build_share(whole, rows, ask.prompts, self._spare)))
            begin = rows.stop
        return found

    def _ask(self, ask: _Ask, serve: Callable[[RolloutEngine, list[_Ask]], list[T]]) -> T:
        def work(asks: list[_Ask]) -> list[T]:
            assert self.engine is not None
            if len({each.what for each in asks if each.what}) > 1:
                raise RolloutError(
                    "ranks ask different things of the engine that they share: "
                    + "; ".join(
                        f"rank {i}: {each.what or 'nothing'}" for i, each in enumerate(asks)
                    )
                )
            with self._turn:
                return serve(self.engine, asks)

        return self._ranks.at_first(ask, work)


class Ranks:
    """Process groups in which the first rank works for all, one for each side of the loop.

    The thread that makes this (it trains and evaluates) and the one that samples ahead must not
    wait for each other, and neither must meet the collectives of training.

    Args:
        timeout: most seconds that one piece of work may take.
    """

    def __init__(self, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self._home = threading.get_ident()
        self._main = dist.new_group(backend="gloo", timeout=limit)
        self._ahead = dist.new_group(backend="gloo", timeout=limit)

    def at_first(self, mine: Any, work: Callable[[list[Any]], list[T]]) -> T:
        """This rank's share of ``work([what every rank brings])``, done by the first rank.

        An error of the work is raised on every rank.
        """
        group = self._main if threading.get_ident() == self._home else self._ahead
        first = dist.get_rank() == 0
        brought: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, brought if first else None, dst=0, group=group)
        outcomes: list[tuple[bool, Any]] | None = None
        if first:
            try:
                outcomes = [(True, x) for x in work(brought)]
            except Exception as error:  # raised again below, everywhere
                outcomes = [(False, error)] * len(brought)
        own: list[Any] = [None]
        dist.scatter_object_list(own, outcomes, src=0, group=group)
        good, found = own[0]
        if not good:
            raise found
        return found


def shared(
    make: Callable[[], RolloutEngine], *, ranks: int, timeout: float, spare: int
) -> RolloutEngine:
    """The engine that ``make`` makes, or on several ranks one that all share.

    Args:
        make: called on the first rank alone.
        ranks: processes that train together; every one calls this.
        timeout: most seconds that making it, or one batch, may take.
        spare: slots that the engine leaves after the longest response.
    """
    if ranks == 1:
        return make()
    talk = Ranks(timeout)
    made: list[RolloutEngine] = []

    def begin(asks: list[Any]) -> list[Any]:
        made.append(make())
        return [made[0].logprobs] * len(asks)

    logprobs = talk.at_first(None, begin)
    return RankSharedEngine(made[0] if made else None, talk, logprobs=logprobs, spare=spare)
