"""Weighted mixture of reward sources, minus penalties for cut-off responses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from kedge.math.rewards import place_score
from kedge.records.base import add_totals
from kedge.records.errors import ConfigError, RewardError
from kedge.records.protocols import RewardSource
from kedge.records.types import LEASES, RewardOutput, Rollout

logger = logging.getLogger(__name__)
SLOW = 8.0  # seconds, after which a call is named that has not returned
# Waits for a reward output; the second is bool [B]: rows that failed, which are dropped whatever
# other sources say.  The other rows that are not valid are those the source does not apply to.
Pending = Callable[[], tuple[RewardOutput, Tensor]]


class SlowCalls:
    """Names a call that has not returned after 8 s, or twice the longest one so far."""

    def __init__(self) -> None:
        self._longest = 0.0

    @contextmanager
    def report(
        self, name: str, rows: int, *, unless: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Context of one call of ``name``; ``unless`` something else was said of it meanwhile."""
        begin, after = time.monotonic(), max(SLOW, 2 * self._longest)

        def warn() -> None:
            if not unless():
                text = "%s has not returned after %g s, called with %d responses"
                logger.warning(text, name, after, rows)

        timer = threading.Timer(after, warn)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self._longest = max(self._longest, time.monotonic() - begin)


class Mixture:
    """Weighted sum of the sources that apply to a row, minus the penalty for cut-off responses.

        score_i = sum over sources s that apply to row i of  weight_s * score_s,i

    Sums are in float64 and rounded once, so that 0.3 + 0.6 equals 0.9.  Per-token rewards add up
    with the same weights and are part of the score, whatever source they come from:
    ``token_rewards`` move them from the end of the response, where algorithms place the score, to
    their tokens.  Every source's own scores are kept in ``components`` under its name, without
    weight and penalty.  Rows on which a source failed, or to which no source applies, are not
    valid.

    A response counts as ended if generation stopped it at a stop token or stop string
    (``Rollout.terminated``), whatever that token is.

    Args:
        sources: (name, source, weight) triples; repeated names get ``_2``, ``_3``, ...
        missing_eos_penalty: subtracted from the score of a cut-off response.
        non_eos_penalty: replace the score of a cut-off response, per-token rewards included.
        penalty_reward_value: the replacement.

    Raises:
        ConfigError: ``sources`` is empty.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, RewardSource, float]],
        *,
        missing_eos_penalty: float | None = None,
        non_eos_penalty: bool = False,
        penalty_reward_value: float = -1.0,
    ) -> None:
        if not sources:
            raise ConfigError("a mixture needs at least one reward source")
        self._sources: list[tuple[str, RewardSource, float]] = []
        names = [name for name, _, _ in sources]
        for i, (name, source, weight) in enumerate(sources):
            if name in names[:i]:  # f, f, f_2: the second must not take the name of the third
                names[i] = next(x for n in count(2) if (x := f"{name}_{n}") not in names)
            self._sources.append((names[i], source, float(weight)))
        self.name = "+".join(name for name, _, _ in self._sources)
        read = [getattr(source, "columns", None) for _, source, _ in sources]
        known = frozenset(name for columns in read for name in columns or ())
        self.columns = None if None in read else known
        self.only_models = all(getattr(s, "only_models", False) for _, s, _ in sources)
        self.reads_environments = any(
            getattr(s, "reads_environments", False) for _, s, _ in sources
        )
        # Batches that it scores at the same time, more than 1 if all sources are asynchronous.
        self.parallel: int = min(getattr(source, "parallel", 1) for _, source, _ in sources)
        self._free = threading.Semaphore(self.parallel)
        self._slow = {name: SlowCalls() for name, _, _ in self._sources}
        self._subtract = missing_eos_penalty or 0.0
        self._replace = penalty_reward_value if non_eos_penalty else None

    def score(self, rollout: Rollout) -> RewardOutput:
        """The weighted sum for all rows; asynchronous sources run at the same time."""
        with self._free:
            output, failed = self.begin(rollout)()
        return replace(output, valid=output.valid & ~failed)

    def begin(self, rollout: Rollout) -> Pending:
        """Start all asynchronous sources."""
        started = {name: _begin(source, rollout) for name, source, _ in self._sources}

        def finish(name: str, result: Pending) -> tuple[RewardOutput, Tensor]:
            with self._slow[name].report(f"reward {name}", len(rollout)):
                return result()

        return lambda: self._mix(rollout, [finish(*source) for source in started.items()])

    def _mix(
        self, rollout: Rollout, outputs: list[tuple[RewardOutput, Tensor]]
    ) -> tuple[RewardOutput, Tensor]:
        valid = torch.stack([output.valid for output, _ in outputs]).any(0)
        failed = torch.stack([rows for _, rows in outputs]).any(0)
        scores = torch.zeros(len(rollout), dtype=torch.float64, device=rollout.ids.device)
        dense = None
        parts: dict[str, Tensor] = {}
        for (name, _, weight), (output, _) in zip(self._sources, outputs, strict=True):
            scores = scores + weight * torch.where(output.valid, output.scores.double(), 0.0)
            if output.token_rewards is not None:
                kept = rollout.loss_mask & output.valid[:, None]
                added = weight * torch.where(kept, output.token_rewards.double(), 0.0)
                dense = added if dense is None else dense + added
            components = dict(output.components)
            if len(components) == 1:
                parts[name] = next(iter(components.values()))
            elif components:
                parts |= {f"{name}/{part}": column for part, column in components.items()}
            else:
                parts[name] = torch.where(output.valid, output.scores.float(), torch.nan)
        if dense is not None:
            whole = (scores + dense.sum(1)).float().double()
            scores, dense = whole, dense + place_score(scores - whole, rollout.loss_mask)
        leases = () if rollout.episodes is None else rollout.episodes.columns.get(LEASES, ())
        for lease in filter(None, leases):
            lease.release()
        cut_off = scores - self._subtract if self._replace is None else self._replace
        scores = torch.where(rollout.terminated, scores, cut_off)
        if dense is not None and self._replace is not None:
            dense = torch.where(rollout.terminated[:, None], dense, 0.0)
        mixed = RewardOutput(
            scores=scores.float(),
            valid=valid,
            components=parts,
            token_rewards=dense,
            metrics=add_totals([output.metrics for output, _ in outputs]),
            columns={name: x for output, _ in outputs for name, x in output.columns.items()},
        )
        return mixed, failed


def _begin(source: RewardSource, rollout: Rollout) -> Pending:
    begin: Callable[[Rollout], Pending] | None = getattr(source, "begin", None)
    if begin is not None:
        return begin(rollout)

    def score() -> tuple[RewardOutput, Tensor]:
        name, output = type(source).__name__, source.score(rollout)
        if not isinstance(output, RewardOutput):
            raise RewardError(
                f"{name}.score must return a kedge.records.types.RewardOutput, got"
                f" {type(output).__name__} (only a plain function of completions may return a list)"
            )
        shapes = (tuple(output.scores.shape), tuple(output.valid.shape))
        if shapes != ((len(rollout),),) * 2:
            raise RewardError(
                f"{name}.score returned scores of shape {shapes[0]} and valid of shape {shapes[1]}"
                f" for {len(rollout)} responses; both must have one entry per response"
            )
        return output, ~output.valid

    return score
