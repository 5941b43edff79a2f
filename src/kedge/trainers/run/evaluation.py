"""Evaluations and sample completions of a run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from kedge.config.base import OnPolicyConfig
from kedge.errors import CheckpointError
from kedge.loop.evaluation import Evaluation, evaluate, solved, win_rate
from kedge.loop.hooks import StepReport
from kedge.loop.loop import Engine
from kedge.reporting.completions import completion_rows
from kedge.trainers.assembly.setup import EvalSet
from kedge.trainers.run.hf_callbacks import Callbacks
from kedge.trainers.spec import MetricNames

TEMPERATURE = 0.01  # arXiv:2403.17031 samples evaluations nearly greedily
TABLE_ROWS = 5  # of a table drawn from the training batch


def printed_rows(config: Any) -> int:
    """Rows of a completions table that are shown on screen."""
    return getattr(config, "num_completions_to_print", None) or TABLE_ROWS


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Scores evaluation prompts and shows completions.

    Args:
        args: the config.
        engine: the loop, whose rollout engine, reward and learner are used.
        callbacks: receive metrics and tables.
        tokenizer: decodes completions.
        sets: evaluation prompts, in order.
        metric_names: adds metrics under other names.
    """

    args: OnPolicyConfig
    engine: Engine
    callbacks: Callbacks
    tokenizer: Any
    sets: list[EvalSet]
    metric_names: MetricNames

    def evaluate(self, sets: list[EvalSet] | None = None) -> dict[str, float]:
        """Score the evaluation prompts, log metrics and show completions."""
        metrics: dict[str, float] = {}
        for eval_set in self.sets if sets is None else sets:
            evaluation = self._evaluate(eval_set, eval_set.batches)
            rows = self._table(eval_set, evaluation)
            results = evaluation.metrics | self._eval_metrics(eval_set, evaluation)
            names = self.metric_names(results)
            if "objective/scores" in results:  # lower is better, as for any ``eval_loss``
                coef = self.engine.kl.value + self.args.loss_kl_coef
                kl = results.get("objective/kl", 0.0)
                results["loss"] = coef * kl - results["objective/scores"]
            results |= names
            metrics |= {f"{eval_set.prefix}{name}": x for name, x in results.items()}
            self._show(rows, f"{eval_set.prefix}completions")
        self.callbacks.log(dict(metrics))
        self.callbacks.fire("on_evaluate", metrics=dict(metrics))
        return metrics

    def _eval_metrics(self, eval_set: EvalSet, evaluation: Evaluation) -> dict[str, float]:
        """Accuracy, and win rate against the initial policy, if enabled."""
        success, metrics = self.args.eval_success_score, {}
        if success is not None:
            per_prompt = self.args.num_generations_eval or 1
            metrics = solved(evaluation.scores, per_prompt=per_prompt, success=success)
        # A dataset passed to evaluate() has no initial scores.
        if self.args.eval_against_start and eval_set in self.sets:
            initial, scores = self.callbacks.state.initial_scores, evaluation.scores
            if self.engine.step == 0:
                initial[eval_set.prefix] = scores.tolist()
            before = torch.tensor(initial.get(eval_set.prefix, []), dtype=torch.float64)
            if len(before) not in (0, len(scores)):
                raise CheckpointError(
                    f"the initial policy was scored on {len(before)} rows of"
                    f" {eval_set.prefix.strip('_')!r}, got {len(scores)} now; evaluate on the same"
                    " prompts, or set eval_against_start=False"
                )
            metrics |= win_rate(scores, before) if len(before) else {}
        return metrics

    def generate_completions(self, *, sampling: bool = False) -> list[dict[str, object]]:
        """Nearly greedy completions of the evaluation prompts, or of training prompts if none.

        Args:
            sampling: one batch only.
        """
        source, rows = self.engine.source, self.engine.batch_sizes.batch_size
        training = EvalSet(prefix="", source=source, batches=1, rows=rows)
        eval_set = self.sets[0] if self.sets else training
        evaluation = self._evaluate(eval_set, 1 if sampling else eval_set.batches)
        table = self._table(eval_set, evaluation)
        self._show(table, "completions")
        return table

    def show_samples(self, report: StepReport) -> None:
        """Show a table during training: evaluation prompts, or the batch just trained on."""
        if self.sets:
            self.generate_completions(sampling=True)
        else:
            sample = (report.rollout, report.reward_output)
            most = max(TABLE_ROWS, printed_rows(self.args))
            rows = completion_rows([sample], self.tokenizer)
            self._show(rows, "completions", most=most)

    def _evaluate(self, eval_set: EvalSet, batches: int) -> Evaluation:
        engine, sampling = self.engine, self.engine.sampling
        if (self.args.num_generations_eval or 1) == 1:
            sampling = replace(sampling, temperature=TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)
        # The engine is idle and has the newest weights, so that timing has no effect.
        engine.scheduler.wait_until_idle()
        engine.scheduler.wait_for_syncs()
        if engine.partial_batches:
            engine.rollout_engine.load_weights(engine.weights(), engine.learner.version)
        return evaluate(
            eval_set.source,
            batches=batches,
            rows=eval_set.rows,
            rollouts=engine.rollout_engine,
            reward_source=engine.reward,
            learner=engine.learner,
            sampling=sampling,
            reference=engine.algorithm.needs_reference,
            seed=self.args.seed,
            clock=time.perf_counter,
        )

    def _table(self, eval_set: EvalSet, evaluation: Evaluation) -> list[dict[str, object]]:
        # The last batch is padded with prompts from the start.
        return completion_rows(evaluation.samples, self.tokenizer, limit=eval_set.rows)

    def _show(self, rows: list[dict[str, object]], name: str, *, most: int | None = None) -> None:
        unique = getattr(self.args, "log_unique_prompts", False)
        if most is not None or unique:  # other prompts before other answers to the same
            earlier: Counter[object] = Counter()
            order = []
            for row in rows:
                order.append(earlier[row["query"]])
                earlier[row["query"]] += 1
            rows = [rows[i] for i in sorted(range(len(rows)), key=order.__getitem__)]
            rows = rows[: len(earlier) if unique else most][:most]
        if rows and self.callbacks.state.is_world_process_zero:
            self.callbacks.tracker.table(name, rows, step=self.engine.step)
