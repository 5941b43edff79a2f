"""Evaluations and sample completions of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kedge.config.base import OnPolicyConfig
from kedge.config.compat.trl import NewerArguments
from kedge.engine.evaluation import Evaluation, evaluate, solved, win_rate
from kedge.engine.hooks import StepReport
from kedge.engine.loop import Engine
from kedge.protocols import RolloutEngine
from kedge.trainers.build.data import EvalSet
from kedge.trainers.reporting.completions import completion_rows
from kedge.trainers.run.hf_callbacks import Callbacks
from kedge.trainers.run.initial_scores import InitialPolicyScores
from kedge.trainers.spec import MetricNames
from kedge.types import Sampling

TEMPERATURE = 0.01  # arXiv:2403.17031 samples evaluations nearly greedily
TABLE_ROWS = 5  # of a table drawn from the training batch


def printed_rows(config: Any) -> int:
    """Rows of a completions table that are shown on screen."""
    if not isinstance(config, NewerArguments):
        return TABLE_ROWS
    return config.num_completions_to_print or TABLE_ROWS


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Scores evaluation prompts and shows completions.

    Args:
        args: the config.
        engine: the loop, whose rollout engine, reward and learner are used.
        callbacks: receive metrics and tables.
        tokenizer: decodes completions.
        sets: evaluation prompts, in order.
        initial_scores: scores of the initial policy; None without ``eval_against_start``.
        metric_names: adds metrics under other names.
    """

    args: OnPolicyConfig
    engine: Engine
    callbacks: Callbacks
    tokenizer: Any
    sets: list[EvalSet]
    metric_names: MetricNames
    initial_scores: InitialPolicyScores | None = None

    def evaluate(self, sets: list[EvalSet] | None = None) -> dict[str, float]:
        """Score the evaluation prompts, log metrics and show completions."""
        metrics: dict[str, float] = {}
        for eval_set in self.sets if sets is None else sets:
            evaluation = self._evaluate(eval_set, eval_set.batches)
            rows = self._table(eval_set, evaluation)
            results = evaluation.metrics | self._eval_metrics(eval_set, evaluation, rows)
            results |= self._loss(evaluation.metrics) | self.metric_names(results)
            metrics |= {f"{eval_set.prefix}{name}": x for name, x in results.items()}
            self._show(rows, f"{eval_set.prefix}completions")
        self.callbacks.evaluated(metrics)
        return metrics

    def _loss(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The negative of the training objective: lower is better, as for any ``eval_loss``."""
        if "objective/scores" not in metrics:
            return {}
        coef = self.engine.kl.value + self.args.loss_kl_coef
        return {"loss": coef * metrics.get("objective/kl", 0.0) - metrics["objective/scores"]}

    def _eval_metrics(
        self, eval_set: EvalSet, evaluation: Evaluation, rows: list[dict[str, object]]
    ) -> dict[str, float]:
        """Accuracy, and win rate against the initial policy, if enabled."""
        success, metrics = self.args.eval_success_score, {}
        if success is not None:
            per_prompt = self.args.num_generations_eval or 1
            metrics = solved(evaluation.scores, per_prompt=per_prompt, success=success)
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
            most = max(TABLE_ROWS, printed_rows(self.args))
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
            reference=self.engine.algorithm.needs_reference,
            seed=self.args.seed,
            clock=time.perf_counter,
        )

    def _sampling(self) -> Sampling:
        usual = self.engine.sampling
        if (self.args.num_generations_eval or 1) > 1:
            return usual
        return replace(usual, temperature=TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)

    def _idle_engine(self) -> RolloutEngine:
        """The rollout engine, idle and with the newest weights, so that timing has no effect."""
        engine = self.engine
        engine.scheduler.wait_until_idle()
        engine.scheduler.wait_for_syncs()
        if engine.partial_batches:
            engine.rollout_engine.load_weights(engine.weights(), engine.learner.version)
        return engine.rollout_engine

    def _table(self, eval_set: EvalSet, evaluation: Evaluation) -> list[dict[str, object]]:
        # The last batch is padded with prompts from the start.
        return completion_rows(evaluation.samples, self.tokenizer, limit=eval_set.rows)

    def _unique(self) -> bool:
        return isinstance(self.args, NewerArguments) and self.args.log_unique_prompts

    def _show(self, rows: list[dict[str, object]], name: str, *, most: int | None = None) -> None:
        if self._unique():
            first: dict[object, dict[str, object]] = {}
            for row in rows:
                first.setdefault(row["query"], row)
            rows = list(first.values())
        rows = rows[:most]
        if rows and self.callbacks.state.is_world_process_zero:
            self.callbacks.tracker.table(name, rows, step=self.engine.step)
