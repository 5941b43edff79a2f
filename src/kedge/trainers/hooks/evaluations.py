"""Evaluates when a callback asks for it, and shows tables of completions."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

import torch

from kedge.loop.evaluation import Evaluation, evaluate, solve_rates, win_rate
from kedge.records.errors import CheckpointError
from kedge.records.protocols import Hook
from kedge.records.types import RewardOutput, Rollout, StepReport
from kedge.reporting.responses import IntervalSchedule, completion_rows
from kedge.trainers.hooks.parts import RunParts
from kedge.trainers.prompts import EvalSet

TEMPERATURE = 0.01  # arXiv:2403.17031 evaluates nearly greedily
TABLE_ROWS = 5  # rows per table of a training batch


@dataclass(kw_only=True)
class Evaluations(RunParts, Hook):
    """Scores of evaluation prompts, and tables of completions."""

    schedule: IntervalSchedule | None = None  # of tables during training
    _incomplete: bool = False  # the user's metrics of the newest evaluation are missing

    def on_step_begin(self, step: int) -> None:
        """Show what the policy says before training, where samples are shown."""
        if step == 0 and self.eval_sets and self._shows_samples:
            self.generate_completions(sampling=True)

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """Without evaluation prompts, the first batch is what it says before training."""
        if step == 0 and not self.eval_sets and self._shows_samples:
            self._show_batch(rollout, reward_output)

    def on_step_end(self, report: StepReport) -> None:
        """Show a table if it is due, and evaluate if a callback asks for it."""
        if self.schedule is not None and self.schedule.samples(report.step):
            if self.eval_sets:
                self.generate_completions(sampling=True)
            elif report.step > 1:  # the batch just trained on; the first one was shown
                self._show_batch(report.rollout, report.reward_output)
        self.on_epoch_end()

    @property
    def _shows_samples(self) -> bool:
        return self.schedule is not None and self.schedule.sample_every is not None

    def _show_batch(self, rollout: Rollout, reward_output: RewardOutput) -> None:
        rows = completion_rows([(rollout, reward_output)], self.tokenizer)
        self.show_table(rows, "completions", most=max(TABLE_ROWS, self.printed_rows))

    def on_epoch_end(self) -> None:
        """Evaluate if a callback asks for it."""
        if self.callbacks.control.should_evaluate and self.eval_sets:
            metrics = self.trainer.evaluate()
            best = self.callbacks.note_best(metrics, incomplete=self._incomplete)
            if self.args.save_strategy == "best":
                self.callbacks.control.should_save = best

    def evaluate(self, sets: list[EvalSet]) -> dict[str, float]:
        """Score the evaluation prompts, log metrics and show completions."""
        metrics: dict[str, float] = {}
        self._incomplete = False
        for eval_set in sets:
            evaluation = self._sample_eval_set(eval_set, eval_set.batches)
            rows = completion_rows(evaluation.samples, self.tokenizer, limit=eval_set.rows)
            results = evaluation.metrics | self._accuracy(eval_set, evaluation)
            names = self.metric_names(results)
            if "objective/scores" in results:  # negated: eval_loss must fall
                coef = self.engine.kl.value + self.args.loss_kl_coef
                kl = results.get("objective/kl", 0.0)
                results["loss"] = coef * kl - results["objective/scores"]
            results |= names | self._user_metrics(evaluation, eval_set.rows)
            metrics |= {f"{eval_set.prefix}{name}": x for name, x in results.items()}
            self.show_table(rows, f"{eval_set.prefix}completions")
        self.callbacks.log(dict(metrics))
        self.callbacks.fire("on_evaluate", metrics=dict(metrics))
        return metrics

    def generate_completions(self, *, sampling: bool = False) -> list[dict[str, object]]:
        """Sample nearly greedily from evaluation prompts, or else from training prompts."""
        source, rows = self.engine.source, self.engine.batch_sizes.batch_size
        training = EvalSet(prefix="", source=source, batches=1, rows=rows)
        eval_set = self.eval_sets[0] if self.eval_sets else training
        evaluation = self._sample_eval_set(eval_set, 1 if sampling else eval_set.batches)
        table = completion_rows(evaluation.samples, self.tokenizer, limit=eval_set.rows)
        self.show_table(table, "completions")
        return table

    @property
    def printed_rows(self) -> int:
        """Rows of a table of completions that are shown on screen."""
        return self.args.num_completions_to_print or TABLE_ROWS

    def show_table(
        self, rows: list[dict[str, object]], name: str, *, most: int | None = None
    ) -> None:
        """Send at most ``most`` rows of a table to the trackers."""
        unique = self.args.log_unique_prompts
        if most is not None or unique:  # prefer new prompts to further answers to the same one
            earlier: Counter[object] = Counter()
            order = []
            for row in rows:
                order.append(earlier[row["query"]])
                earlier[row["query"]] += 1
            rows = [rows[i] for i in sorted(range(len(rows)), key=order.__getitem__)]
            rows = rows[: len(earlier) if unique else most][:most]
        if rows and self.state.is_world_process_zero:
            self.callbacks.tracker.table(name, rows, step=self.engine.step)

    def _user_metrics(self, evaluation: Evaluation, rows: int) -> dict[str, float]:
        if self.eval_metrics is None:
            return {}
        found = self.eval_metrics.compute(
            evaluation.samples,
            self.learner,
            rows=rows,
            tokenizer=self.tokenizer,
            ends=self.engine.sampling.stop_ids,
        )
        self._incomplete |= found is None
        return found or {}

    def _accuracy(self, eval_set: EvalSet, evaluation: Evaluation) -> dict[str, float]:
        """Accuracy, and win rate against the initial policy, if enabled."""
        success, metrics = self.args.eval_success_score, {}
        if success is not None:
            per_prompt = self.args.num_generations_eval or 1
            metrics = solve_rates(evaluation.scores, per_prompt=per_prompt, success=success)
        # A dataset passed to evaluate() has no initial scores.
        if self.args.eval_against_start and eval_set in self.eval_sets:
            initial, scores = self.state.initial_scores, evaluation.scores
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

    def _sample_eval_set(self, eval_set: EvalSet, batches: int) -> Evaluation:
        """Sample and score prompts; the last batch is padded with prompts from the start."""
        engine, sampling = self.engine, self.engine.sampling
        if (self.args.num_generations_eval or 1) == 1:
            sampling = replace(sampling, temperature=TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)
        # The engine is idle and has the newest weights, so timing does not matter.
        engine.scheduler.wait_until_idle()
        engine.scheduler.wait_for_syncs()
        if engine.as_completed:
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
