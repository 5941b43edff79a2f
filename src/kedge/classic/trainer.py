"""The classic trainer: you generate and score, ``step`` runs one PPO iteration."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import DataCollatorForLanguageModeling

from kedge.classic import state
from kedge.classic.accumulation import GradientAccumulator
from kedge.classic.assembly import (
    check_arguments,
    make_accelerator,
    make_algorithm,
    make_batch_sizes,
    make_learner,
    make_reference,
    make_step_limits,
)
from kedge.classic.config import AdaptiveKLController, FixedKLController, PPOConfig
from kedge.classic.core import (
    PPODecorators,
    convert_to_scalar,
    empty_device_cache,
    set_seed,
    stats_to_np,
)
from kedge.classic.generation import Generation
from kedge.classic.inputs import Batches, pad_id
from kedge.classic.publishing import Publishing
from kedge.classic.samples import (
    Samples,
    build_reward_output,
    build_rollout,
    check_samples,
    on_grid,
    samples_of,
)
from kedge.classic.scores import RunningMoments, Scores, shaped
from kedge.classic.stats_recorder import KEYS, STAGES, StatsRecorder, over_steps, update_statistics
from kedge.classic.step_parts import PPOSteps, overridden
from kedge.classic.stepwise import step_by_step
from kedge.classic.tracking import log_batch, start_trackers
from kedge.engine.updater import Updater
from kedge.errors import ConfigError
from kedge.suggestions import named
from kedge.types import require

_PREPARE = "; prepare their loader with trainer.accelerator.prepare(dataloader)"


@named("argument", config=PPOConfig)
class PPOTrainer(PPOSteps, Generation, Batches, Publishing):
    """PPO one step at a time.

        responses = trainer.generate(queries, return_prompt=False, **options)
        scores = [torch.tensor(...) for ...]
        stats = trainer.step(queries, responses, scores)

    Args:
        config: a ``PPOConfig``.
        model: the policy with a value head; its trainable weights are trained.
        ref_model: the reference of the KL penalty; None: a frozen copy of the initial policy, or
            for a PEFT model its base without the adapter.
        tokenizer: of the policy.
        dataset: for ``dataloader``; None: bring your own batches.
        optimizer: None: Adam.
        data_collator: makes batches for ``dataloader``; None: columns as lists, ``input_ids`` as
            tensors; rows that are not dictionaries use torch's default collation.
        num_shared_layers: see ``create_reference_model``; only without ``ref_model``.
        lr_scheduler: of your optimizer; it advances once per ``step``.
        training_data_collator: pads rows for the forward passes of ``step``, which then runs step
            by step as if ``prepare_model_inputs`` was overridden; None: rows are packed without
            padding, which is faster.

    A subclass may override the steps of PPO: ``prepare_model_inputs``, ``batched_forward_pass``,
    ``compute_rewards``, ``compute_advantages``, ``loss``, ``train_minibatch``,
    ``record_step_stats``, ``gather_stats``, ``_kl_penalty``, ``_early_stop`` and
    ``_step_safety_checker``.

    Raises:
        ConfigError: an invalid argument, or an override that is not supported.
    """

    def __init__(
        self,
        config: PPOConfig = None,  # type: ignore[assignment]
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: Optimizer | None = None,
        data_collator: Any = None,
        num_shared_layers: int | None = None,
        lr_scheduler: LRScheduler | None = None,
        training_data_collator: Any = None,
    ) -> None:
        check_arguments(
            config, model, ref_model, tokenizer, optimizer, lr_scheduler, num_shared_layers
        )
        set_seed(config.seed)
        self.config, self.model = config, model
        self.tokenizer = self.processing_class = tokenizer
        self._usual_collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        self.data_collator = training_data_collator or self._usual_collator
        self.accelerator = make_accelerator(config)
        start_trackers(self.accelerator, config)
        self._ref_model = make_reference(model, ref_model, num_shared_layers)
        self.learner = make_learner(
            config, model, self._ref_model, self.accelerator, optimizer, lr_scheduler
        )
        self._gradients = GradientAccumulator(self.learner)
        self._check_overrides()
        self.algorithm = make_algorithm(config)
        self._recorder = StatsRecorder()
        self._updater = Updater(
            learner=self.learner,
            algorithm=self._recorder.over(self.algorithm),
            kl=self._controller(),
            batch_sizes=make_batch_sizes(config),
            hooks=self._recorder,
            seed=config.seed,
            step_limits=make_step_limits(config),
        )
        self.running = RunningMoments(self.learner.total)
        self.dataset, self.dataloader = dataset, None
        if dataset is not None:
            self.dataloader = self.accelerator.prepare(
                self.prepare_dataloader(dataset, data_collator)
            )
        else:
            warnings.warn(
                f"no dataset was given: pass batch_size={config.batch_size} samples to "
                "step() on each process" + _PREPARE * self.is_distributed,
                stacklevel=3,
            )
        self.highest_reward: float | None = None
        self._since_best = 0
        PPODecorators.optimize_device_cache = config.optimize_device_cache

    def _check_overrides(self) -> frozenset[str]:
        """The names of the overridden steps.

        Raises:
            ConfigError: an override is not supported in this setup.
        """
        replaced = overridden(self)
        self._accumulates = "train_minibatch" in replaced
        scaled = self.learner.scaler.is_enabled()
        if self._accumulates and (scaled or self.is_distributed):
            where = "with fp16" if scaled else f"with {self.learner.world_size} processes"
            raise ConfigError(
                f"{type(self).__name__} overrides train_minibatch, which takes the optimizer step; "
                f"{where} its gradients would be {'unscaled' if scaled else 'summed'} too late. "
                "Override loss instead, which train_minibatch calls, or use "
                + ("bf16" if scaled else "one process")
            )
        return replaced

    def _follow_config(self) -> None:
        """Apply options that were changed in ``config`` since the last step."""
        config, updater = self.config, self._updater
        config.check()
        self.algorithm = make_algorithm(config)
        updater.algorithm = self._recorder.over(self.algorithm)
        updater.batch_sizes = make_batch_sizes(config)
        updater.step_limits = make_step_limits(config)
        self.learner.settings = replace(
            self.learner.settings,
            forward_rows=config.mini_batch_size,
            max_grad_norm=config.max_grad_norm or 0.0,
        )

    def _controller(self) -> AdaptiveKLController | FixedKLController:
        c = self.config
        if c.adap_kl_ctrl:
            return AdaptiveKLController(c.init_kl_coef, c.target, c.horizon)
        return FixedKLController(c.init_kl_coef)

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """One PPO iteration on ``batch_size`` samples of this process.

        If a subclass overrides a step of PPO, all steps run as calls of their methods.

        Args:
            queries: int64 [P_i] each.
            responses: int64 [R_i] each; an empty one is ignored.
            scores: float [] or [1] each, or float [R_i]: a reward for every token.
            response_masks: [R_i] each; tokens with 0 get no loss and no reward (tool output).

        Returns:
            The statistics listed in ``docs/classic.md``: floats, and numpy arrays per token.

        Raises:
            DataError: a list has the wrong length, or a tensor the wrong shape.
        """
        self._recorder.begin()
        self._follow_config()
        replaced = self._check_overrides()
        size = self.config.batch_size
        checked = self._step_safety_checker(size, queries, responses, scores, response_masks)
        if "_step_safety_checker" in replaced:
            check_samples(size, *checked)
        samples = samples_of(*checked, start=self._start_token)
        scaled = shaped(
            samples.scores,
            self.running,
            scale=self.config.use_score_scaling,
            norm=self.config.use_score_norm,
            clip=self.config.score_clip,
        )
        self._push_if_best(scaled)
        if replaced - {"_step_safety_checker"}:
            stats = step_by_step(self, samples, scaled, masked=checked[3] is not None)
        else:
            stats = self._fast_step(samples, scaled)
        if self.config.optimize_device_cache:
            empty_device_cache()
        return {name: stats[name] for name in KEYS if name in stats} | stats

    def _fast_step(self, samples: Samples, scores: Scores) -> dict[str, Any]:
        """One iteration by the training engine: rows packed without padding, logits never kept."""
        rollout = build_rollout(
            samples,
            pad=pad_id(self.tokenizer),
            eos=self.tokenizer.eos_token_id,
            first_row=self.learner.rank * self.config.batch_size,
            version=self.learner.version,
        )
        recorder, times = self._recorder, [time.perf_counter()]
        kl_coef = float(self.kl_ctl.value)
        metrics = self._updater.train_on(rollout, build_reward_output(scores), {})
        times.append(time.perf_counter())
        stats = self._statistics(samples, scores, kl_coef)
        times.append(time.perf_counter())
        seconds = (  # rewards include building the batch; advantages the KL penalty
            recorder.annotated - times[0],
            times[0] - recorder.started,
            recorder.credited - recorder.annotated,
            times[1] - recorder.credited,
            times[2] - times[1],
            times[2] - recorder.started,
        )
        stats |= {f"time/ppo/{name}": x for name, x in zip(STAGES, seconds, strict=True)}
        return stats | {"ppo/learning_rate": float(metrics["lr"])}

    def _statistics(self, samples: Samples, scores: Scores, kl_coef: float) -> dict[str, Any]:
        recorder = self._recorder
        inputs = require(recorder.advantage_inputs, "advantage_inputs")
        kl = require(require(recorder.advantage_output, "advantage_output").kl, "kl")
        rollout, outputs = inputs.rollout, inputs.model_outputs
        queries = None if self.is_encoder_decoder else samples.queries

        def grid(x: Tensor) -> Tensor:
            return on_grid(x.cpu(), rollout.response_mask.cpu(), queries)

        stats = update_statistics(
            kl_coef,
            scores=scores.sums,
            logprobs=grid(outputs.logprobs),
            ref_logprobs=grid(require(outputs.ref_logprobs, "ref_logprobs")),
            non_score_reward=grid(-kl_coef * kl),
            masks=grid(rollout.loss_mask.float()) > 0,
            kls=grid(kl),
            queries=samples.queries,
            responses=samples.responses,
            train_stats=over_steps([s.statistics(self.learner.total) for s in recorder.steps]),
            total=self.learner.total,
        )
        return convert_to_scalar(stats_to_np(stats))

    def _push_if_best(self, scores: Scores) -> None:
        push_options = self.config.options("push_to_hub_if_best_kwargs")
        if not push_options:
            return
        self._since_best += 1
        if self._since_best % self.config.compare_steps:
            return
        mean = float(self.learner.total(scores.sums.mean())) / self.learner.world_size
        if self.highest_reward is None or mean > self.highest_reward:
            self.highest_reward = mean
            self.push_to_hub(**push_options)

    def log_stats(
        self,
        stats: Mapping[str, Any],
        batch: Mapping[str, Any],
        rewards: list[Tensor] | Tensor,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Send statistics and a table of the batch to the trackers of ``log_with``.

        Args:
            stats: result of ``step``.
            batch: columns of the batch, including ``columns_to_log``.
            rewards: one number per row; rewards per token are summed.
            columns_to_log: columns of the table ``game_log``.
        """
        columns = list(columns_to_log)
        log_batch(self.accelerator, stats, batch, rewards, columns, step=self.current_step)

    def save_state(self, output_dir: str | Path | None = None) -> Path | None:
        """Write everything needed to resume exactly to ``output_dir/checkpoint-N``.

        Saves policy, value head, optimizer, schedule, KL coefficient, running moments and the
        random states of Python, numpy and torch.  Every process calls it.

        Args:
            output_dir: created if missing; None only in a class that also inherits from
                ``transformers.Trainer``, whose ``save_state`` is then called.

        Returns:
            The checkpoint's folder.
        """
        if output_dir is not None:
            return state.save(self, output_dir)
        parent_save = getattr(super(), "save_state", None)
        if parent_save is None:
            raise ConfigError("save_state needs a folder; call save_state(output_dir)")
        parent_save()
        return None

    def load_state(self, folder: str | Path) -> None:
        """Resume from ``save_state``; ``folder`` is a checkpoint or contains checkpoints.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or belongs to another model.
        """
        state.load(self, folder)
