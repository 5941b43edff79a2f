"""One training run behind a Trainer-style API: train, log, evaluate, save, resume."""

from __future__ import annotations

import json
import logging
import math
import resource
import shlex
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as transformers_logging

from kedge import plugins
from kedge.checkpoint import checkpoint
from kedge.config.base import OnPolicyConfig
from kedge.data import DatasetPrompts
from kedge.learner.learner import HFLearner
from kedge.loop.evaluation import Evaluation, evaluate, solve_rates, win_rate
from kedge.loop.loop import Engine
from kedge.loop.shutdown import GracefulShutdown
from kedge.loop.updater import Hooks, StepReport
from kedge.output import share_weights
from kedge.records.errors import CheckpointError, ConfigError, way_out
from kedge.records.protocols import EngineInfo, RewardInfo, read_info
from kedge.records.types import Experience, RewardOutput, Rollout, Sampling
from kedge.reporting.base import BestEffortWriter, required_write
from kedge.reporting.responses import IntervalSchedule, TokenLog, completion_rows
from kedge.trainers.assembly.setup import EvalSet
from kedge.trainers.hf_callbacks import Callbacks, RunState, merge_rows, share_control
from kedge.trainers.spec import MetricNames

if TYPE_CHECKING:
    from kedge.checkpoint.replay import RolloutRecorder
    from kedge.reporting.trackers import ConsoleTracker

logger = logging.getLogger(__name__)
MUCH_CLIPPED, MUCH_MASKED, MOST_RATIO = 0.25, 0.05, 1.2  # limits after one iteration
MUCH_NOISE = 3  # iterations in a row in which the value is worse than the mean
TEMPERATURE = 0.01  # arXiv:2403.17031 evaluates nearly greedily
TABLE_ROWS = 5  # rows per table of a training batch
VALUE_FOLDER = "value_model"


def earlier_run(output_dir: Path, *, overwrite: bool) -> list[Path]:
    """Checkpoints of an earlier run that a new run in the folder removes."""
    existing = checkpoint.checkpoints(output_dir)
    if existing and not overwrite:
        raise CheckpointError(
            f"{output_dir} holds {', '.join(p.name for p in existing[-3:])} of an earlier run;"
            " continue it with resume_from_checkpoint=True (--resume_from_checkpoint), start over"
            " with overwrite_output_dir=True (--overwrite_output_dir), or set another output_dir"
        )
    return existing


def recording_fingerprint(sampling: Sampling) -> dict[str, Any]:
    """Settings that a recording and a replaying run must share."""
    return {"temperature": sampling.temperature, "stop_ids": [*sampling.stop_ids]}


@dataclass(kw_only=True)
class Run(Hooks):
    """The engine of a Trainer-style trainer and everything around it.

    The run is the loop's hooks.  Order within one iteration, as in ``transformers.Trainer``:
    on_step_begin; per optimizer step on_optimizer_step; on_step_end; then, if control asks for
    it, on_log, evaluation with on_evaluate, saving with on_save; after each pass over the prompts
    on_epoch_end, and again the requested actions.
    """

    trainer: Any  # evaluates and saves models, perhaps with methods that a subclass overrides
    args: OnPolicyConfig
    engine: Engine
    learner: HFLearner
    callbacks: Callbacks
    eval_sets: list[EvalSet]
    tokenizer: Any
    fresh_reference: bool  # the reference is the initial policy, so that the KL starts at 0
    metric_names: MetricNames
    check_prompts: Callable[[list[Any]], None] | None = None  # columns that environments read
    best_effort: BestEffortWriter = field(default_factory=BestEffortWriter)
    clock: Callable[[], float] = time.perf_counter
    shutdown: GracefulShutdown = field(default_factory=GracefulShutdown)
    # Set by ``train``:
    screen: ConsoleTracker | None = field(default=None, init=False)  # on rank 0
    schedule: IntervalSchedule | None = field(default=None, init=False)  # for tables of completions
    recorder: RolloutRecorder | None = field(default=None, init=False)
    token_log: TokenLog | None = field(default=None, init=False)
    _playing: int = field(default=0, init=False)

    @property
    def state(self) -> RunState:
        """The state that callbacks see."""
        return self.callbacks.state

    @property
    def iterations_per_epoch(self) -> float:
        """Iterations of one pass over the prompts, may be a fraction."""
        sizes = self.engine.batch_sizes
        return sizes.iterations_per_epoch or sizes.iterations

    def train(self, resume: str | Path | bool | None) -> TrainOutput:
        """Train all iterations, or until a callback stops the run.

        ``resume`` is True for the newest intact checkpoint in ``output_dir``, or a folder.
        """
        engine, sizes = self.engine, self.engine.batch_sizes
        self._tidy(new_run=not resume)
        resumed = self._resume(resume) if resume else None
        self._open(resumed)
        engine.hooks = self
        if resumed is None:
            if self.state.is_world_process_zero:
                from kedge.reporting.trackers import log_prompt_lengths

                log_prompt_lengths(self.callbacks.handler.callbacks, engine.source)
            at_start = self.args.eval_against_start or self.args.eval_on_start
            if at_start and self.eval_sets:
                self.trainer.evaluate()
        begin, before = time.perf_counter(), engine.step
        try:
            engine.run(sizes.iterations)
            self.end_epoch()
            asked = bool(self.learner.all_reduce(torch.tensor([float(self.shutdown.requested)])))
            if asked and self._saved < engine.step and self.args.output_dir:
                self._save()  # the signal came after the last iteration
            seconds, iterations = time.perf_counter() - begin, engine.step - before
            rate = iterations / max(seconds, 1e-9)
            totals = {  # totals of this call under transformers' names
                "train_runtime": seconds,
                "train_samples_per_second": rate * sizes.batch_size,
                "train_steps_per_second": rate,
                "train_loss": self.state.loss_sum / max(engine.step, 1),
            }
            if iterations > 0 or resumed is not None:  # the last row may be missing
                self.callbacks.log(self.take_pending() | totals)
            if not asked:  # or a second call would continue from the best weights
                self._load_best()
            self.callbacks.fire("on_train_end")
        finally:
            self.callbacks.tracker.close()
        if self.screen is not None and self.args.output_dir:
            root = shlex.quote(str(self.root()))
            self.screen.note(f"the run is in {root}; `kedge report {root}` writes a report of it")
        if self.args.output_dir and self.state.is_world_process_zero:
            file = self.root() / "curves.png"
            from kedge.reporting.log import draw_curves

            with self.best_effort.writing("curves", file):
                draw_curves(self.state.log_history, file)
        metrics = totals | {"episode": self.state.episode, "epoch": self.state.epoch or 0.0}
        return TrainOutput(engine.step, totals["train_loss"], metrics)

    def _open(self, resumed: Path | None) -> None:
        """Open screen, trackers and files, and begin at the current iteration."""
        from kedge.reporting.trackers import ConsoleTracker, build_trackers, link

        engine, sizes, args = self.engine, self.engine.batch_sizes, self.args
        if self.state.is_world_process_zero:
            self.screen = screen = ConsoleTracker(
                sizes.iterations,
                start=engine.step,
                bar=not args.disable_tqdm,
                tables=args.num_sample_generations > 0,
                max_rows=self._printed_rows,
            )
            trackers = build_trackers(
                self.callbacks.handler.callbacks,
                self.state.log_history,
                args,
                screen,
                self.best_effort,
            )
            self.callbacks.tracker = trackers
        if self.screen is not None and resumed is not None:
            done = "; nothing is left to train" if engine.step >= sizes.iterations else ""
            place = f"iteration {engine.step} of {sizes.iterations}"
            self.screen.note(f"resuming from {resumed} ({place}){done}")
        self.callbacks.begin(
            max_steps=sizes.iterations,
            epochs=sizes.iterations / self.iterations_per_epoch,
            batch_size=sizes.local_rows,
        )
        if self.state.is_world_process_zero:
            link(self.callbacks.handler.callbacks, trackers.trackers, args)
        self.schedule = IntervalSchedule(
            args, iterations=sizes.iterations, iterations_per_epoch=self.iterations_per_epoch
        )
        if args.save_rollouts is not None:
            from kedge.checkpoint.replay import RolloutRecorder

            with required_write("save_rollouts", args.save_rollouts):
                self.recorder = RolloutRecorder(
                    args.save_rollouts,
                    settings=recording_fingerprint(engine.sampling),
                    rank=self.learner.rank,
                    world_size=self.learner.world_size,
                )
        if args.output_dir and self.schedule.tokens_every is not None:
            self.token_log = TokenLog(
                self.root(),
                rows=args.log_token_rows,
                due=self.schedule.writes_tokens,
                learner=self.learner,
                tokenizer=self.tokenizer,
            )
        self.start()

    def start(self) -> None:
        """Start the counters of this call of ``train``."""
        self._begin, self._first_episode = self.clock(), self.state.episode
        self._epoch_open = False
        self._first = self._saved = self.state.global_step  # step of the last checkpoint
        self._findings: set[str] = set()
        self._noise = 0.0  # last iterations in which the value was worse than the mean

    # -- during training --------------------------------------------------------------------------

    def on_step_begin(self, step: int) -> None:
        """Open a pass over the prompts if none is open, then the step."""
        if not self._epoch_open:
            self.callbacks.fire("on_epoch_begin")
            self._epoch_open = True
        self.callbacks.fire("on_step_begin")

    def on_sample(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> None:
        """Record the batch; check the first one."""
        if self.recorder is not None:
            with self.best_effort.writing("recorded rollouts", self.recorder.folder):
                self.recorder.write(step, rollout, reward_output)
        if step == 0 and self.args.preflight:
            self._check_first_batch(rollout, reward_output)

    def on_experience(self, step: int, experience: Experience) -> None:
        """Keep the rows of the token log."""
        if self.token_log is not None:
            self.token_log.keep_rows(step, experience)

    def on_optimizer_step(self) -> None:
        """Forward the event."""
        self.callbacks.fire("on_optimizer_step")

    def on_step_end(self, report: StepReport) -> bool:
        """Finish an iteration; returns True if a callback asks to stop."""
        state = self.state
        before = math.floor((state.epoch or 0.0) + 1e-9)
        state.global_step = report.step
        state.epoch = report.step / self.iterations_per_epoch
        state.episode = int(report.metrics.get("episode", state.episode))
        state.loss_sum += report.metrics.get("loss", 0.0)
        row = {**report.metrics, **self._measure(report)}
        if self.screen is not None:
            self.screen.advance(report.step, row)
        state.pending.append(row | self.metric_names(row))
        if self.token_log is not None:
            self.token_log.write(report)
        if self.schedule is not None and self.schedule.samples(report.step):
            self.show_samples(report)
        every = self.args.torch_empty_cache_steps
        if every and report.step % every == 0 and torch.cuda.is_available():
            from kedge.rollout.embedded.decode import capturing

            with capturing:  # a sampling thread may be capturing a decode step
                torch.cuda.empty_cache()
        self.callbacks.fire("on_step_end")
        self._act()
        first = self._first + 1 == report.step < state.max_steps
        if first and state.pending and self.screen is not None:
            self.screen.log(row, step=report.step)  # shows progress before the first logged row
        delay = getattr(self.args, "value_warmup_steps", 0)  # then the rate rises to its peak
        if report.step == 1 + delay + self.args.get_warmup_steps(max(1, state.max_steps - delay)):
            self._warn_of_large_steps(row)
        known = row.get("val/explained_variance", 0.0)
        noise = known < 0 < row.get("lr", 0.0)
        self._noise = self._noise + 1 if noise else min(self._noise, 0)
        if self._noise == MUCH_NOISE:
            self._noise = -math.inf  # say it once
            self._warn(
                f"in {MUCH_NOISE} iterations in a row the value was worse than the mean return:"
                f" explained variance {known:.2f}; set value_warmup_steps, or use kedge value fit"
            )
        if math.floor(state.epoch + 1e-9) > before:
            self.end_epoch()
        return self.callbacks.control.should_training_stop

    def _warn_of_large_steps(self, metrics: Mapping[str, float]) -> None:
        """Warn if the policy's first iteration already moved it out of the clip region.

        Masked tokens stay where they moved, even in the wrong direction, so the limit is lower.
        """
        clipped, ratio = metrics.get("policy/clipfrac_avg", 0.0), metrics.get("val/ratio", 1.0)
        masked = getattr(self.args, "policy_loss", "clip") == "mask"
        most = MUCH_MASKED if masked else MUCH_CLIPPED
        if clipped >= most or not 1 / MOST_RATIO <= ratio <= MOST_RATIO:
            self._warn(
                f"the policy's first iteration {'masked' if masked else 'clipped'} {clipped:.0%} of"
                f" the tokens (mean ratio {ratio:.3g}): its steps are too large; lower"
                f" learning_rate={self.args.learning_rate:g}, or"
                f" num_ppo_epochs={self.args.num_ppo_epochs}"
            )

    def _measure(self, report: StepReport) -> dict[str, float]:
        state, args = self.state, self.args
        elapsed = max(self.clock() - self._begin, 1e-9)
        metrics: dict[str, float] = {"eps": (state.episode - self._first_episode) / elapsed}
        if "rollout/tokens" in report.metrics:
            state.num_tokens += round(report.metrics["rollout/tokens"])
            metrics["num_tokens"] = state.num_tokens
        include = str(args.include_num_input_tokens_seen)
        if include != "no":
            rollout, prompts = report.rollout, report.rollout.prompts
            count = (
                prompts.ids.numel() + rollout.ids.numel()
                if include == "all"  # padding included
                else int(prompts.mask.sum()) + int(rollout.response_mask.sum())
            )
            tokens = torch.tensor(float(count), dtype=torch.float64)
            state.num_input_tokens_seen += round(float(self.learner.all_reduce(tokens)))
            metrics["num_input_tokens_seen"] = state.num_input_tokens_seen
        if not args.skip_memory_metrics:
            unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            metrics["memory/peak_cpu"] = peak / 2**20  # MiB
            if torch.cuda.is_available():
                metrics["memory/peak_gpu"] = torch.cuda.max_memory_allocated() / 2**20
        return metrics

    def _check_first_batch(self, rollout: Rollout, reward_output: RewardOutput) -> None:
        from kedge.loop.preflight import FULL_PRECISION, LOW_PRECISION, preflight

        low = self.learner.low_precision or self.args.tf32
        length, alias = "response_length", self.args.length_option
        reward = self.engine.reward
        problems = preflight(
            rollout,
            reward_output,
            engine=self.engine.rollout_engine,
            learner=self.learner,
            algorithm=self.engine.algorithm,
            kl_coef=self.engine.kl.value,
            fresh_reference=self.fresh_reference,
            sampling=self.engine.sampling,
            length_option=length if alias == length else f"{length} ({alias})",
            decode=getattr(self.tokenizer, "decode", None),
            reward=reward if read_info(reward, RewardInfo).only_models else None,
            tolerance=LOW_PRECISION if low else FULL_PRECISION,
        )
        for problem in problems:
            self._warn(f"preflight: {problem}")
        if self.screen is not None:
            sizes = self.engine.batch_sizes
            passed = reward_output.valid.any() and not problems
            count, steps = sizes.iterations, sizes.optimizer_steps_per_iteration
            self.screen.note(
                f"{'preflight passed; ' * bool(passed)}{count} iteration{'s' * (count != 1)} of"
                f" {sizes.batch_size} responses, {steps} optimizer step{'s' * (steps != 1)} each"
            )

    def end_epoch(self) -> None:
        """End the open pass over the prompts, if there is one.

        Not called after an exception: it may save, and the weights may be inconsistent.
        """
        if not self._epoch_open:
            return
        self._epoch_open = False
        self.callbacks.fire("on_epoch_end")
        self._act()

    def _act(self) -> None:
        """Log, evaluate and save according to the callbacks' control."""
        callbacks = self.callbacks
        self._share_control()
        if callbacks.control.should_epoch_stop:
            callbacks.control.should_epoch_stop = False
            warnings.warn(
                "a callback set should_epoch_stop, which has no effect here; set "
                "should_training_stop to end training",
                stacklevel=3,
            )
        if callbacks.control.should_log and self.state.pending:
            callbacks.log(self.take_pending())
            self._warn_of_findings()
        if callbacks.control.should_evaluate and self.eval_sets:
            best = callbacks.note_best(self.trainer.evaluate())
            if self.args.save_strategy == "best":
                callbacks.control.should_save = best
            self._share_control()  # the evaluation may have taken minutes
        if callbacks.control.should_save and self.args.output_dir:
            self._save()
            callbacks.fire("on_save")

    def _share_control(self) -> None:
        """Synchronize the callbacks' control over ranks; a signal saves and stops the run."""
        control = self.callbacks.control
        if self.shutdown.requested:
            control.should_training_stop = True
            control.should_save |= self._saved < self.engine.step
        if self.learner.world_size > 1:
            share_control(control, self.learner.all_reduce)

    def _warn_of_findings(self) -> None:
        """Warn once of findings of ``kedge doctor`` that are worth stopping for."""
        examine = plugins.load("kedge.hooks", "doctor")
        rows = [row for row in self.state.log_history if "objective/scores" in row]
        for text in examine(rows, self._findings) if examine else ():
            self._warn(text)

    def take_pending(self) -> dict[str, float]:
        """Take the pending iterations and return their mean."""
        rows, self.state.pending = self.state.pending, []
        return merge_rows(rows)

    def _warn(self, message: str) -> None:
        if self.state.is_world_process_zero:
            logger.warning("%s", message)

    # -- evaluation and tables of completions ---------------------------------------------------

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Context in which environments are kept; the outermost one closes them at its end."""
        self._playing += 1
        try:
            yield
        finally:
            self._playing -= 1
            if not self._playing:
                read_info(self.engine.rollout_engine, EngineInfo).close_environments()

    @property
    def _printed_rows(self) -> int:
        """Rows of a table of completions that are shown on screen."""
        return self.args.num_completions_to_print or TABLE_ROWS

    def evaluate(self, sets: list[EvalSet] | None = None) -> dict[str, float]:
        """Score the evaluation prompts, log metrics and show completions."""
        metrics: dict[str, float] = {}
        for eval_set in self.eval_sets if sets is None else sets:
            evaluation = self._sample_eval_set(eval_set, eval_set.batches)
            rows = completion_rows(evaluation.samples, self.tokenizer, limit=eval_set.rows)
            results = evaluation.metrics | self._eval_metrics(eval_set, evaluation)
            names = self.metric_names(results)
            if "objective/scores" in results:  # negated: eval_loss must fall
                coef = self.engine.kl.value + self.args.loss_kl_coef
                kl = results.get("objective/kl", 0.0)
                results["loss"] = coef * kl - results["objective/scores"]
            results |= names
            metrics |= {f"{eval_set.prefix}{name}": x for name, x in results.items()}
            self._show_table(rows, f"{eval_set.prefix}completions")
        self.callbacks.log(dict(metrics))
        self.callbacks.fire("on_evaluate", metrics=dict(metrics))
        return metrics

    def _eval_metrics(self, eval_set: EvalSet, evaluation: Evaluation) -> dict[str, float]:
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

    def generate_completions(self, *, sampling: bool = False) -> list[dict[str, object]]:
        """Sample nearly greedily from evaluation prompts, or else from training prompts."""
        source, rows = self.engine.source, self.engine.batch_sizes.batch_size
        training = EvalSet(prefix="", source=source, batches=1, rows=rows)
        eval_set = self.eval_sets[0] if self.eval_sets else training
        evaluation = self._sample_eval_set(eval_set, 1 if sampling else eval_set.batches)
        table = completion_rows(evaluation.samples, self.tokenizer, limit=eval_set.rows)
        self._show_table(table, "completions")
        return table

    def show_samples(self, report: StepReport) -> None:
        """Show a table during training: evaluation prompts, or the batch just trained on."""
        if self.eval_sets:
            self.generate_completions(sampling=True)
        else:
            sample = (report.rollout, report.reward_output)
            most = max(TABLE_ROWS, self._printed_rows)
            rows = completion_rows([sample], self.tokenizer)
            self._show_table(rows, "completions", most=most)

    def _sample_eval_set(self, eval_set: EvalSet, batches: int) -> Evaluation:
        """Sample and score prompts; the last batch is padded with prompts from the start."""
        engine, sampling = self.engine, self.engine.sampling
        if (self.args.num_generations_eval or 1) == 1:
            sampling = replace(sampling, temperature=TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)
        # The engine is idle and has the newest weights, so timing does not matter.
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

    def _show_table(
        self, rows: list[dict[str, object]], name: str, *, most: int | None = None
    ) -> None:
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

    # -- checkpoints ----------------------------------------------------------------------------

    def on_failure(self, step: int, error: Exception) -> None:
        """Save iterations that no checkpoint holds yet, and say how to resume."""
        args = self.args
        if step <= self._saved or isinstance(error, CheckpointError):
            return
        since = f"training stopped after iteration {step} with {type(error).__name__}"
        if not args.output_dir or args.save_strategy == "no":
            why = "save_strategy='no'" if args.output_dir else "output_dir is not set"
            self._warn(
                f"{since}; no checkpoint is written because {why}: unsaved iterations are lost"
            )
            return
        try:
            folder = self._save()
        except Exception as other:
            self._warn(f"{since}, and saving a checkpoint failed: {other}")
            return
        self._warn(
            f"{since}; the models are in {folder} (save_only_model=True)"
            if args.save_only_model
            else f"{since}; no completed iteration is lost. Fix the cause and resume from {folder}"
            " with train(resume_from_checkpoint=True), or --resume_from_checkpoint on the command"
            " line"
        )

    def _save(self) -> Path:
        state, root = self.state, self.root()
        best = root / f"checkpoint-{state.best_global_step}"
        if state.best_global_step == state.global_step or best.is_dir():
            state.best_model_checkpoint = str(best)
        saved = self.save_checkpoint()
        if state.is_world_process_zero:
            keep = (saved, state.best_model_checkpoint)
            checkpoint.rotate(root, self.args.save_total_limit, keep=keep)
        self._saved = state.global_step
        return saved

    def save_checkpoint(self) -> Path:
        """Write ``checkpoint-N`` into the output folder; atomic if the process is killed."""
        from kedge.checkpoint.replay import pack

        engine, accelerator = self.engine, self.learner.accelerator
        parts = {} if self.args.save_only_model else engine.state_dict()
        in_flight = [pack(sample) for sample in engine.in_flight]
        return checkpoint.save(
            self.root(),
            engine.step,
            parts,
            local=in_flight or None,
            settings=self._fingerprint(),
            write_models=self._write_checkpoint,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            barrier=accelerator.wait_for_everyone,
        )

    def write_models(self, folder: Path) -> None:
        """Write policy, tokenizer and value model in the layout of ``from_pretrained``.

        Every rank calls it; rank 0 writes.
        """
        if bad := self.learner.non_finite_weights():
            root = self.args.output_dir
            earlier = checkpoint.checkpoints(root) if root else []
            last = f"{earlier[-1]} is the last good checkpoint" if earlier else "none was saved yet"
            raise CheckpointError(
                f"{len(bad)} trained weights, such as {bad[0]}, are NaN or infinite after iteration"
                f" {self.engine.step}, so they are not saved; {last}. Lower the learning rate"
            )
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()  # it would interrupt the run's own bar
        try:
            self.learner.save(folder, folder / VALUE_FOLDER)
            if self.state.is_world_process_zero and hasattr(self.tokenizer, "save_pretrained"):
                self.tokenizer.save_pretrained(folder)
            if self.state.is_world_process_zero:
                for models in (folder, folder / VALUE_FOLDER):
                    share_weights(models)
        except Exception as error:
            # tokenizers raises a bare Exception for file-system errors
            if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
                raise CheckpointError(
                    f"cannot write the models to {folder}: {error}; {way_out(error)}, or pass"
                    " another folder to save_model()"
                ) from error
            raise
        finally:
            if bars:
                transformers_logging.enable_progress_bar()

    def _write_checkpoint(self, folder: Path) -> None:
        self.trainer.save_model(str(folder), _internal_call=True)
        if self.state.is_world_process_zero:
            self.callbacks.write_state(folder)

    def _fingerprint(self) -> dict[str, Any]:
        """Everything that affects the numerics, as JSON values; compared on resume.

        Options, prompts and the reference's weights, but not sizes that only cut the same batch
        into other micro-batches.
        """
        engine, sizes = self.engine, self.engine.batch_sizes
        values = self.args.resume_values() | {
            "algorithm": engine.algorithm.name,
            "iterations": sizes.iterations,
            "batch_size": sizes.batch_size,
            "num_mini_batches": sizes.minibatches,
            "num_ppo_epochs": sizes.epochs,
            "num_generations": sizes.group,
            "optim": type(self.learner.optimizer).__name__,
            "stop_ids": engine.sampling.stop_ids,
        }
        if isinstance(engine.source, DatasetPrompts):
            values["prompts"] = engine.source.fingerprint()
        if self.learner.reference is not None:
            values["reference"] = self.learner.reference.fingerprint()
        return json.loads(json.dumps(values, default=str))

    def _resume(self, resume: str | Path | bool) -> Path:
        """Load a checkpoint; return its folder."""
        if not isinstance(resume, bool | str | Path):
            raise ConfigError(
                f"resume_from_checkpoint={resume!r} must be True (newest checkpoint) or a folder"
            )
        if not isinstance(resume, bool):
            checkpoint.load_one(resume, self._load)
            return Path(resume)
        total, root = self.learner.all_reduce, self.root()
        newest = checkpoint.load_latest(
            root,
            self._load,
            anywhere=lambda failed: bool(total(torch.tensor([float(failed)])).item()),
        )
        if newest is None:
            raise CheckpointError(
                f"resume_from_checkpoint=True, but {root} has no checkpoint; leave it unset to"
                " start from the beginning"
            )
        return newest

    def _load(self, folder: Path) -> None:
        """Load a checkpoint whose files are verified."""
        from kedge.checkpoint.replay import unpack

        accelerator = self.learner.accelerator
        saved = checkpoint.load(
            folder,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            settings=self._fingerprint(),
            verified=True,
        )
        if not saved.parts:
            raise CheckpointError(
                f"{folder} was written with save_only_model=True and has no optimizer state to"
                " resume from; to start a new run from its weights, pass it as `model`"
            )
        self.engine.load_state_dict(dict(saved.parts))
        self.engine.restore([unpack(sample) for sample in saved.local or []])
        self.callbacks.restore(folder)

    def _tidy(self, *, new_run: bool) -> None:
        """Remove incomplete files of a killed run, and old checkpoints that a new run replaces."""
        if not self.args.output_dir:
            return
        root, accelerator = self.root(), self.learner.accelerator
        if accelerator.is_main_process:
            checkpoint.tidy(root)
        accelerator.wait_for_everyone()
        first = new_run and self.engine.step == 0
        old = earlier_run(root, overwrite=self.args.overwrite_output_dir) if first else []
        accelerator.wait_for_everyone()  # wait until every rank has looked
        for folder in old if accelerator.is_main_process else []:
            shutil.rmtree(folder)
        accelerator.wait_for_everyone()

    def _load_best(self) -> None:
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            saved = checkpoint.load(best)
            if not saved.parts:
                raise ConfigError("load_best_model_at_end=True needs save_only_model=False")
            with checkpoint.report_damage(Path(best)):
                self.learner.load_state_dict(saved.parts["learner"])
            rollout_engine = self.engine.rollout_engine
            if not rollout_engine.shares_weights:
                rollout_engine.load_weights(self.learner.weights(), self.learner.version)

    def root(self) -> Path:
        """The output folder."""
        if not self.args.output_dir:
            raise ConfigError("output_dir must be set to write checkpoints")
        return Path(self.args.output_dir)
