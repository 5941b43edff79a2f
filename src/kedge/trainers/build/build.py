"""Builds a run from the constructor arguments of a trainer, stage by stage.

Each stage checks its options when it is created and makes its part in ``build``.  All stages are
created before the first one loads weights.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.load import without_weights
from kedge.backends.hub import logged_in
from kedge.config.base import OnPolicyConfig
from kedge.config.ppo import PPOConfig
from kedge.engine.kl_control import AdaptiveKL, FixedKL
from kedge.engine.loop import Engine
from kedge.protocols import KLController, RewardSource, RolloutEngine
from kedge.trainers.build.advice import advise
from kedge.trainers.build.environments import find_environments
from kedge.trainers.build.inputs import TrainerInputs
from kedge.trainers.build.learner import LearnerStage, receives_weights
from kedge.trainers.build.loading import own_or
from kedge.trainers.build.models import Models, ModelStage
from kedge.trainers.build.reward import RewardStage
from kedge.trainers.build.rollout import RolloutStage
from kedge.trainers.build.setup import Setup, build_setup
from kedge.trainers.run.evaluation import Evaluator
from kedge.trainers.run.hf_callbacks import Callbacks, own_callbacks
from kedge.trainers.run.initial_scores import InitialPolicyScores
from kedge.trainers.run.run import Run

logger = logging.getLogger(__name__)


def build_run(inputs: TrainerInputs) -> Run:
    """Build everything a run needs; all options are checked before any weights are loaded.

    Raises:
        ConfigError: invalid or conflicting options.
        DataError: invalid prompts.
    """
    environments = find_environments(inputs)
    setup = build_setup(environments.inputs)
    environments.check(setup.sampling)
    models = ModelStage(setup)
    reward = RewardStage(setup)
    learner = LearnerStage(setup)
    rollout = RolloutStage(setup)
    engine = EngineStage(setup)

    # Everything is checked: from here on weights are loaded and actors are started.
    with without_weights(receives_weights(setup)):
        loaded = models.build()
    for text in advise(setup.args, loaded.policy, batch_size=setup.sizes.batch_size):
        if setup.accelerator.is_main_process:
            logger.warning(text)
    callbacks = engine.start_callbacks(loaded)
    reward_source = reward.build(loaded, trainer_state=lambda: callbacks.state)
    hf_learner = learner.build(loaded)
    rollout_engine = rollout.build(hf_learner, loaded)
    if rollout.replayed is None:
        rollout_engine = environments.wrap(
            rollout_engine,
            setup.tokenizer,
            pad_id=setup.pad_id,
            extra_slot=setup.algorithm.extra_slot,
        )
    return engine.build(loaded, reward_source, hf_learner, rollout_engine, rollout)


class EngineStage:
    """The training loop, and the run around it: callbacks, evaluations and checkpoints."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        args, accelerator = setup.args, setup.accelerator
        reports = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
        if "trackio" in reports and args.trackio_space_id is not None and not logged_in():
            logger.warning("report_to=trackio: not logged in to the hub; the dashboard stays local")
            args.trackio_space_id = None
        self.callbacks = Callbacks(
            args,
            [*(setup.inputs.callbacks or []), *own_callbacks(args)],
            rank=accelerator.process_index,
            local_rank=accelerator.local_process_index,
        )

    def start_callbacks(self, models: Models) -> Callbacks:
        """The callbacks, which get the policy from now on."""
        tokenizer = own_or(self.setup.inputs.processing_class, self.setup.tokenizer)
        self.callbacks.start(model=models.policy, processing_class=tokenizer)
        return self.callbacks

    def build(
        self,
        models: Models,
        reward_source: RewardSource,
        learner: HFLearner,
        rollout_engine: RolloutEngine,
        rollout: RolloutStage,
    ) -> Run:
        """The run of these parts."""
        setup, args, algorithm = self.setup, self.setup.args, self.setup.algorithm
        self.callbacks.watch(learner.optimizer, learner.scheduler)
        source: Any = setup.prompts
        if rollout.replayed is not None:
            source = reward_source = rollout.replayed
            algorithm = replace(algorithm, resample=0)  # replayed batches were resampled before
        engine = Engine(
            source=source,
            rollout_engine=rollout_engine,
            reward=reward_source,
            learner=learner,
            algorithm=algorithm,
            kl=build_kl_controller(args),
            batch_sizes=setup.sizes,
            sampling=setup.sampling,
            seed=args.seed,
            max_lag=args.max_lag,
            partial_batches=rollout.num_partial_batches(rollout_engine),
            in_flight_weight_updates=args.in_flight_weight_updates,
            correction=rollout.correction,
            value_warmup_steps=self._value_warmup_steps(),
        )
        metric_names = setup.inputs.spec.metric_names(args, engine)
        evaluator = Evaluator(
            args=args,
            engine=engine,
            callbacks=self.callbacks,
            tokenizer=setup.tokenizer,
            sets=setup.eval_sets,
            metric_names=metric_names,
            initial_scores=InitialPolicyScores(
                Path(args.output_dir) if args.output_dir else None,
                main=setup.accelerator.is_main_process,
            )
            if args.eval_against_start
            else None,
        )
        return Run(
            args=args,
            engine=engine,
            learner=learner,
            callbacks=self.callbacks,
            evaluator=evaluator,
            tokenizer=setup.tokenizer,
            fresh_reference=models.fresh_reference,
            metric_names=metric_names,
        )

    def _value_warmup_steps(self) -> int:
        """Iterations at the start that train only the value model."""
        args = self.setup.args
        if not (self.setup.algorithm.needs_values and isinstance(args, PPOConfig)):
            return 0
        steps = args.value_warmup_steps
        if steps >= self.setup.sizes.iterations:
            logger.warning(
                "value_warmup_steps=%d covers all %d iterations: the policy will not be trained",
                steps,
                self.setup.sizes.iterations,
            )
        return steps


def build_kl_controller(args: OnPolicyConfig) -> KLController:
    """The controller of the KL coefficient."""
    if args.adaptive_kl:
        return AdaptiveKL(value=args.kl_coef, target=args.kl_target, horizon=args.kl_horizon)
    return FixedKL(value=args.kl_coef)
