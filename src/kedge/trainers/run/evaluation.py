"""Evaluations and sample completions of a run."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.backends.trackers import write_whole
from kedge.config.base import OnPolicyConfig
from kedge.config.compat.trl import NewerArguments
from kedge.config.resolve import RunSettings
from kedge.engine.evaluation import Evaluation, evaluate, solved, win_rate
from kedge.engine.hooks import StepReport
from kedge.engine.loop import Engine
from kedge.errors import CheckpointError, ConfigError
from kedge.protocols import PromptSource, RolloutEngine
from kedge.trainers.reporting.best_effort import BestEffortWriter
from kedge.trainers.reporting.completions import completion_rows
from kedge.trainers.run.hf_callbacks import Callbacks
from kedge.types import Sampling

TEMPERATURE = 0.01  # arXiv:2403.17031 samples evaluations nearly greedily
TABLE_ROWS = 5  # of a table drawn from the training batch


def printed_rows(config: Any) -> int:
    """Rows of a completions table that are shown on screen."""
    if not isinstance(config, NewerArguments):
        return TABLE_ROWS
    return config.num_completions_to_print or TABLE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One set of evaluation prompts."""

    prefix: str  # "eval_" or "eval_<name>_"
    source: PromptSource
    batches: int
    rows: int  # responses in total


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Scores evaluation prompts and shows completions.

    Args:
        engine: the loop, whose rollout engine, reward and learner are used.
        settings: sampling and seed.
        callbacks: receive metrics and tables.
        tokenizer: decodes completions.
        sets: evaluation prompts, in order.
        reference: whether there is a reference for the KL.
        initial_scores: scores of the initial policy; None without ``eval_against_start``.
        more: extra metrics of an evaluation, computed from its metrics.
    """

    engine: Engine
    settings: RunSettings
    callbacks: Callbacks
    tokenizer: Any
    sets: list[EvalSet]
    reference: bool
    initial_scores: InitialPolicyScores | None = None
    more: Callable[[Mapping[str, float]], Mapping[str, float]] = field(default=lambda _: {})

    def evaluate(self, sets: list[EvalSet] | None = None) -> dict[str, float]:
        """Score the evaluation prompts, log metrics and show completions."""
        metrics: dict[str, float] = {}
        for eval_set in self.sets if sets is None else sets:
            evaluation = self._evaluate(eval_set, eval_set.batches)
            rows = self._table(eval_set, evaluation)
            results = evaluation.metrics | self._eval_metrics(eval_set, evaluation, rows)
            results |= self._loss(evaluation.metrics) | dict(self.more(results))
            metrics |= {f"{eval_set.prefix}{name}": x for name, x in results.items()}
            self._show(rows, f"{eval_set.prefix}completions")
        self.callbacks.evaluated(metrics)
        return metrics

    def _loss(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The negative of the training objective: lower is better, as for any ``eval_loss``."""
        if "objective/scores" not in metrics:
            return {}
        coef = self.engine.kl.value + self.settings.loss_kl_coef
        return {"loss": coef * metrics.get("objective/kl", 0.0) - metrics["objective/scores"]}

    def _eval_metrics(
        self, eval_set: EvalSet, evaluation: Evaluation, rows: list[dict[str, object]]
    ) -> dict[str, float]:
        """Accuracy, and win rate against the initial policy, if enabled."""
        options = self.settings.evaluation
        metrics: dict[str, float] = {}
        if options.success is not None:
            metrics |= solved(
                evaluation.scores, per_prompt=options.completions, success=options.success
            )
        # A dataset passed to evaluate() has no initial scores.
        if self.initial_scores is not None and eval_set in self.sets:
            if self.engine.step == 0:
                self.initial_scores.keep(eval_set.prefix, evaluation.scores, rows)
            before = self.initial_scores.scores(eval_set.prefix, len(evaluation.scores))
            metrics |= {} if before is None else win_rate(evaluation.scores, before)
        return metrics

    def generate_completions(self, *, sampling: bool = False) -> list[dict[str, object]]:
        """Nearly greedy completions of the evaluation prompts, or of training prompts if none.

        Args:
            sampling: one batch only.
        """
        eval_set = self.sets[0] if self.sets else self._training_prompts()
        evaluation = self._evaluate(eval_set, 1 if sampling else eval_set.batches)
        rows = self._table(eval_set, evaluation)
        self._show(rows, "completions")
        return rows

    def show_samples(self, report: StepReport) -> None:
        """Show a table during training: evaluation prompts, or the batch just trained on."""
        if self.sets:
            self.generate_completions(sampling=True)
        else:
            sample = (report.rollout, report.reward_output)
            most = max(TABLE_ROWS, printed_rows(self.callbacks.args))
            rows = completion_rows([sample], self.tokenizer, limit=None if self._unique() else most)
            self._show(rows, "completions", most=most)

    def _training_prompts(self) -> EvalSet:
        engine = self.engine
        return EvalSet(
            prefix="", source=engine.source, batches=1, rows=engine.batch_sizes.batch_size
        )

    def _evaluate(self, eval_set: EvalSet, batches: int) -> Evaluation:
        return evaluate(
            eval_set.source,
            batches=batches,
            rows=eval_set.rows,
            rollouts=self._idle_engine(),
            reward_source=self.engine.reward,
            learner=self.engine.learner,
            sampling=self._sampling(),
            reference=self.reference,
            seed=self.settings.seed,
            clock=time.perf_counter,
        )

    def _sampling(self) -> Sampling:
        usual = self.settings.sampling
        if self.settings.evaluation.completions > 1:
            return usual
        return replace(usual, temperature=TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)

    def _idle_engine(self) -> RolloutEngine:
        """The rollout engine, idle and with the newest weights, so that timing has no effect."""
        engine = self.engine
        _ = engine.in_flight  # waits for pending samples
        engine.scheduler.wait_for_syncs()
        if engine.partial_batches:
            engine.rollout_engine.load_weights(engine.learner.weights(), engine.learner.version)
        return engine.rollout_engine

    def _table(self, eval_set: EvalSet, evaluation: Evaluation) -> list[dict[str, object]]:
        # The last batch is padded with prompts from the start.
        return completion_rows(evaluation.samples, self.tokenizer, limit=eval_set.rows)

    def _unique(self) -> bool:
        config = self.callbacks.args
        return isinstance(config, NewerArguments) and config.log_unique_prompts

    def _show(self, rows: list[dict[str, object]], name: str, *, most: int | None = None) -> None:
        if self._unique():
            first: dict[object, dict[str, object]] = {}
            for row in rows:
                first.setdefault(row["query"], row)
            rows = list(first.values())
        rows = rows[:most]
        if rows and self.callbacks.state.is_world_process_zero:
            self.callbacks.tracker.table(name, rows, step=self.engine.step)


FOLDER = "start"
logger = logging.getLogger(__name__)


def build_initial_scores(
    args: OnPolicyConfig, *, has_prompts: bool, main: bool
) -> InitialPolicyScores | None:
    """The scores of the initial policy, or None without ``eval_against_start``.

    Raises:
        ConfigError: there are no evaluation prompts.
    """
    if not args.eval_against_start:
        return None
    if not has_prompts:
        raise ConfigError("eval_against_start=True needs an eval_dataset; pass one")
    return InitialPolicyScores(Path(args.output_dir) if args.output_dir else None, main=main)


class InitialPolicyScores:
    """Keeps scores of the initial policy, in memory and on disk for resumed runs.

    Args:
        root: the run's output folder; None: in memory only.
        main: whether this is rank 0, which writes.
    """

    def __init__(self, root: Path | None, *, main: bool) -> None:
        self.root, self.main = root, main
        self._kept: dict[str, Tensor | None] = {}
        self._beside = BestEffortWriter()

    def keep(self, name: str, scores: Tensor, rows: Sequence[dict[str, object]]) -> None:
        """Keep the scores (float64 [rows], NaN for invalid rows) under the name of the set."""
        self._kept[name] = scores
        if self.root is None or not self.main:
            return
        file = self._file(self.root, name)
        plain = [None if math.isnan(x) else x for x in scores.tolist()]
        with self._beside.writing("scores of the initial policy", file):
            write_whole(file, json.dumps({"scores": plain, "completions": list(rows)}))

    def scores(self, name: str, count: int) -> Tensor | None:
        """The scores of a set of ``count`` rows, from this process or an earlier one.

        None, with one warning, if the folder of a resumed run does not hold them.

        Raises:
            CheckpointError: the file belongs to other prompts.
        """
        if name not in self._kept:
            self._kept[name] = self._read(name)
        scores = self._kept[name]
        if scores is not None and len(scores) != count:
            raise CheckpointError(
                f"the initial policy was scored on {len(scores)} rows of {name.strip('_')!r}, got "
                f"{count} now; evaluate on the same prompts, or set eval_against_start=False"
            )
        return scores

    def _read(self, name: str) -> Tensor | None:
        file = None if self.root is None else self._file(self.root, name)
        if file is None or not file.is_file():
            if self.main:
                logger.warning(
                    "eval_against_start: the scores of the initial policy are missing%s; no win "
                    "rate is logged",
                    f" ({file} does not exist)" if file else "",
                )
            return None
        try:
            scores: list[Any] = json.loads(file.read_text(encoding="utf-8"))["scores"]
            plain = [math.nan if x is None else float(x) for x in scores]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if self.main:
                logger.warning(
                    "eval_against_start: %s is damaged (%s); no win rate is logged", file, error
                )
            return None
        return torch.tensor(plain, dtype=torch.float64)

    @staticmethod
    def _file(root: Path, name: str) -> Path:
        return root / FOLDER / f"{name.strip('_')}.json"
