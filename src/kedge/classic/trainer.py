"""The classic trainer: you generate and score, ``step`` learns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from kedge.classic import state
from kedge.classic.assembly import (
    Given,
    check,
    make_accelerator,
    make_algorithm,
    make_brakes,
    make_learner,
    make_plan,
    make_reference,
)
from kedge.classic.config import PPOConfig
from kedge.classic.controllers import AdaptiveKLController, FixedKLController
from kedge.classic.core import empty_device_cache, set_seed
from kedge.classic.dataloading import as_lists, make_dataloader
from kedge.classic.generation import LengthFn, generate_many, generate_one
from kedge.classic.inputs import pad_id
from kedge.classic.pieces import Pieces
from kedge.classic.publishing import Publishing
from kedge.classic.samples import Samples, checked, judgement_of, on_grid, rollout_of
from kedge.classic.scores import RunningMoments, Scores, shaped
from kedge.classic.statistics import KEYS, over_steps
from kedge.classic.tracking import log_batch, start_trackers
from kedge.classic.watch import Watch
from kedge.engine.updater import Updater
from kedge.errors import ConfigError
from kedge.naming import named
from kedge.types import given


@named("argument", config=PPOConfig)
class PPOTrainer(Pieces, Publishing):
    """PPO one step at a time.

        responses = trainer.generate(queries, return_prompt=False, **options)
        scores = [torch.tensor(...) for ...]
        stats = trainer.step(queries, responses, scores)

    Args:
        config: a ``PPOConfig``.
        model: with a value head; its trainable weights train.
        ref_model: what the policy is held to; None: a frozen copy of the policy as it is now, or
            for a PEFT model its base without the adapter.
        tokenizer: of the policy.
        dataset: for ``dataloader``; None: bring your own batches.
        optimizer: None: Adam.
        data_collator: makes batches of ``dataloader``; None: lists, ``input_ids`` as tensors.
        num_shared_layers: see ``create_reference_model``; only without ``ref_model``.
        lr_scheduler: of your optimizer; it moves on once per ``step``.
        training_data_collator: accepted and not needed: rows are joined without padding.

    Raises:
        ConfigError: an argument that cannot work; says which.
    """

    def __init__(
        self,
        config: PPOConfig | None = None,
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
        if not isinstance(config, PPOConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; pass a kedge.classic.PPOConfig"
            )
        parts = Given(
            config=config,
            model=model,
            ref_model=ref_model,
            tokenizer=tokenizer,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            num_shared_layers=num_shared_layers,
        )
        check(parts)
        set_seed(config.seed)
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.accelerator = make_accelerator(config)
        start_trackers(self.accelerator, config)
        self.ref_model, reference = make_reference(parts)
        self.learner = make_learner(parts, self.ref_model, reference, self.accelerator)
        self.algorithm = make_algorithm(config)
        self._watch = Watch()
        self._updater = Updater(
            learner=self.learner,
            algorithm=self._watch.over(self.algorithm),
            kl=self._controller(),
            plan=make_plan(config),
            hooks=self._watch,
            seed=config.seed,
            brakes=make_brakes(config),
        )
        self.running = RunningMoments(self.learner.total)
        self.dataset, self.dataloader = dataset, None
        self.data_collator = data_collator or as_lists
        if dataset is not None:
            self.dataloader = self.accelerator.prepare(
                self.prepare_dataloader(dataset, data_collator)
            )
        self.highest_reward: float | None = None
        self._since_best = 0

    def _controller(self) -> AdaptiveKLController | FixedKLController:
        c = self.config
        if c.adap_kl_ctrl:
            return AdaptiveKLController(c.init_kl_coef, c.target, c.horizon)
        return FixedKLController(c.init_kl_coef)

    def prepare_dataloader(self, dataset: Any, data_collator: Any = None) -> DataLoader[Any]:
        """Shuffled batches of ``batch_size`` rows; an incomplete last batch is left out.

        A dataset with a text column "query" and no "input_ids" is tokenised.
        """
        return make_dataloader(dataset, self.config, self.model, self.tokenizer, data_collator)

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: LengthFn | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample responses with transformers' ``generate``.

        Args:
            query_tensor: int64 [P], or a list of such.
            length_sampler: draws ``max_new_tokens``, once per ``batch_size`` queries.
            batch_size: queries of a list that are sampled together.
            return_prompt: whether the query stands before its response; an encoder-decoder never
                returns it, but begins with its start token.
            generate_ref_response: also sample from the reference.
            **generation_kwargs: of ``generate``.

        Returns:
            For one query int64 [1, n], for a list a list of int64 [n_i] that end with their first
            end token.  With ``generate_ref_response`` a pair, the reference's second.
        """

        def sample(model: Any) -> Any:
            model.eval()
            if isinstance(query_tensor, list):
                return generate_many(
                    model,
                    query_tensor,
                    length=length_sampler,
                    rows=batch_size,
                    prompt=return_prompt,
                    eos=self.tokenizer.eos_token_id,
                    options={"pad_token_id": pad_id(self.tokenizer), **generation_kwargs},
                )
            return generate_one(
                model,
                query_tensor,
                length=length_sampler,
                prompt=return_prompt,
                options=generation_kwargs,
            )

        response = sample(self.model)
        if not generate_ref_response:
            return response
        if self.ref_model is not None:
            return response, sample(self.ref_model)
        with self.optional_peft_ctx():
            return response, sample(self.model)

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """One PPO update from ``batch_size`` samples of this process.

        Args:
            queries: int64 [P_i] each.
            responses: int64 [R_i] each; an empty one takes no part.
            scores: float [] or [1] each, or float [R_i]: a reward for every token.
            response_masks: [R_i] each; tokens at 0 get no loss and no reward (tool output).

        Returns:
            The statistics of ``docs/classic.md``: floats, and numpy arrays of per-token numbers.

        Raises:
            DataError: a list of the wrong length, or a tensor of the wrong shape; says which.
        """
        self._watch.begin()
        start = self._start_token
        samples = checked(
            self.config.batch_size, queries, responses, scores, response_masks, start=start
        )
        scaled = shaped(
            samples.scores,
            self.running,
            scale=self.config.use_score_scaling,
            norm=self.config.use_score_norm,
            clip=self.config.score_clip,
        )
        self._push_if_best(scaled)
        rollout = rollout_of(
            samples,
            pad=pad_id(self.tokenizer),
            eos=self.tokenizer.eos_token_id,
            first_row=self.learner.rank * self.config.batch_size,
            version=self.learner.version,
        )
        prepared, kl_coef = time.perf_counter(), float(self.kl_ctl.value)
        metrics = self._updater.train_on(rollout, judgement_of(scaled), {})
        trained = time.perf_counter()
        stats = self._statistics(samples, scaled, kl_coef)
        stats["ppo/learning_rate"] = float(metrics["lr"])
        stats |= self._times(prepared, trained)
        if self.config.optimize_device_cache:
            empty_device_cache()
        return {name: stats[name] for name in KEYS}

    def _statistics(self, samples: Samples, scores: Scores, kl_coef: float) -> dict[str, Any]:
        evidence = given(self._watch.evidence, "evidence")
        credit, note = given(self._watch.credit, "credit"), evidence.annotation
        mask, present = evidence.rollout.mask, evidence.rollout.present
        queries = None if self.is_encoder_decoder else samples.queries
        kl = given(credit.kl, "kl")

        def grid(x: Tensor) -> Tensor:
            return on_grid(x.cpu(), present.cpu(), queries)

        return self.record_step_stats(
            kl_coef,
            scores=scores.sums,
            logprobs=grid(note.logprobs),
            ref_logprobs=grid(given(note.ref_logprobs, "ref_logprobs")),
            non_score_reward=grid(-kl_coef * kl),
            masks=grid(mask.float()) > 0,
            kls=grid(kl),
            queries=samples.queries,
            responses=samples.responses,
            train_stats=over_steps([s.statistics(self.learner.total) for s in self._watch.steps]),
        )

    def _times(self, prepared: float, trained: float) -> dict[str, float]:
        """Seconds.  Rewards count making the batch; advantages count the KL penalty too."""
        seen, now = self._watch, time.perf_counter()
        return {
            "time/ppo/forward_pass": seen.annotated - prepared,
            "time/ppo/compute_rewards": prepared - seen.started,
            "time/ppo/compute_advantages": seen.credited - seen.annotated,
            "time/ppo/optimize_step": trained - seen.credited,
            "time/ppo/calc_stats": now - trained,
            "time/ppo/total": now - seen.started,
        }

    def _push_if_best(self, scores: Scores) -> None:
        where = self.config.options("push_to_hub_if_best_kwargs")
        if not where:
            return
        self._since_best += 1
        if self._since_best % self.config.compare_steps:
            return
        mean = float(self.learner.total(scores.sums.mean())) / self.learner.ranks
        if self.highest_reward is None or mean > self.highest_reward:
            self.highest_reward = mean
            self.push_to_hub(**where)

    def log_stats(
        self,
        stats: Mapping[str, Any],
        batch: Mapping[str, Any],
        rewards: list[Tensor] | Tensor,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Send statistics and a table of the batch to the trackers of ``log_with``.

        Args:
            stats: of ``step``.
            batch: columns of the batch, with those of ``columns_to_log``.
            rewards: one number per row; of a reward per token the sum is logged.
            columns_to_log: columns of the table ``game_log``.
        """
        log_batch(
            self.accelerator,
            self.config.log_with,
            stats,
            batch,
            rewards,
            list(columns_to_log),
            step=self.current_step,
        )

    def save_state(self, output_dir: str | Path) -> Path:
        """Write everything needed to go on exactly here to ``output_dir/checkpoint-N``.

        That is policy, value head, optimiser, schedule, KL coefficient, running moments and the
        random states of Python, numpy and torch.  Every process calls it.

        Returns:
            The checkpoint's folder.
        """
        return state.save(self, output_dir)

    def load_state(self, folder: str | Path) -> None:
        """Go on where ``save_state`` was called; ``folder`` is a checkpoint, or holds some.

        Raises:
            CheckpointError: there is none, it is damaged, or of another model.
        """
        state.load(self, folder)
