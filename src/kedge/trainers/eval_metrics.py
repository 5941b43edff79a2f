"""Metrics that the user's function computes from all responses of an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from kedge.learner.learner import HFLearner
from kedge.records.errors import ConfigError, describe_error
from kedge.records.types import LEASES, RewardOutput, Rollout
from kedge.rewards.function import Signature, function_name, is_async
from kedge.rewards.texts import Texts

logger = logging.getLogger(__name__)


class EvalMetrics:
    """Calls ``compute_metrics`` once, on rank 0, with the rows of all ranks in order.

    It gets those of these keyword arguments that it accepts, lists with one entry per response:
    ``prompts``, ``completions``, ``prompt_ids``, ``completion_ids`` and dataset columns, as reward
    functions do, and ``scores`` (None: not scored).  It returns a dict of numbers.
    """

    def __init__(self, function: Callable[..., Mapping[str, Any]]) -> None:
        self._function, self._name = function, function_name(function)
        self.signature = Signature(
            function, self._name, fixed=("scores",), kind="compute_metrics function"
        )
        if is_async(function):
            raise ConfigError(
                f"compute_metrics function {self._name} is asynchronous; pass a function that"
                " returns a dict of numbers"
            )

    def compute(
        self,
        samples: Sequence[tuple[Rollout, RewardOutput]],
        learner: HFLearner,
        *,
        rows: int,
        tokenizer: Any,
        ends: Collection[int],
    ) -> dict[str, float] | None:
        """The function's metrics on every rank; None, with a warning, if it fails.

        ``samples`` are this rank's batches; of those of all ranks, the first ``rows`` count.
        """
        own: list[tuple[int, dict[str, Any]]] = []
        for batch, (played, output) in enumerate(samples):
            rollout, episodes = played, played.episodes
            if episodes is not None:  # environments play on by now
                left = {name: x for name, x in episodes.columns.items() if name != LEASES}
                rollout = replace(played, episodes=replace(episodes, columns=left))
            pairs = zip(output.scores.tolist(), output.valid.tolist(), strict=True)
            fixed = {"scores": [score if valid else None for score, valid in pairs]}
            columns = self.signature.arguments(Texts(rollout, tokenizer, ends=ends), fixed)
            first = batch * len(rollout) * learner.world_size
            for i, row in enumerate(rollout.prompts.row.tolist()):
                own.append((first + row, {name: x[i] for name, x in columns.items()}))
        table = sorted((x for x in gather_object(own) if x[0] < rows), key=lambda x: x[0])
        results = [self._call([row for _, row in table]) if learner.rank == 0 else None]
        found: dict[str, float] | None = broadcast_object_list(results)[0]
        return found

    def _call(self, table: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
        try:
            returned = self._function(**{name: [row[name] for row in table] for name in table[0]})
            return {name.removeprefix("eval_"): float(x) for name, x in returned.items()}
        except (
            Exception,
            SystemExit,
        ) as error:  # the user's code; hours of training are worth more than it
            logger.warning(
                "compute_metrics function %s failed, or returned no dict of numbers (%s); its"
                " metrics are left out of this evaluation, and no best model is chosen by them",
                self._name,
                describe_error(error),
                exc_info=True,
            )
        return None
