"""Builds the rollout engine of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kedge.backends.hf.learner import HFLearner
from kedge.backends.hf.learner_state import WeightCopier
from kedge.backends.ray.rollout_store import exchange_of_launch
from kedge.backends.rollout import EngineInputs, build_shared_engine
from kedge.config.rollout import engine_args
from kedge.config.rollout_engines import RolloutEngineSpec, load_function
from kedge.engine.checkpoint.replay import Replay, Replayed
from kedge.engine.rollout.worker import num_workers
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine
from kedge.trainers.build.correction import build_correction
from kedge.trainers.build.models import Models
from kedge.trainers.build.setup import Setup
from kedge.trainers.run.checkpoint import recording_fingerprint
from kedge.trainers.spec import shared_kwargs

PARTIAL_BATCHES_PER_WORKER = 4  # so that a fast engine gets more work


class RolloutStage:
    """The rollout engine: a recording, the one passed by the user, or the one the config names."""

    def __init__(self, setup: Setup) -> None:
        args, custom = setup.args, setup.inputs.rollout_engine
        self.setup, self.spec = setup, setup.engine
        if custom is not None and self.spec.copies_weights:
            raise ConfigError(
                f"rollout_engine={args.rollout_engine!r} is set in the config and an engine is"
                " passed to the trainer; remove one of them"
            )
        if self.spec.check is not None:
            check = load_function(self.spec.check)
            check(setup.inputs.model, setup.sampling, **shared_kwargs(args, check))
        self.as_completed = args.rollout_schedule == "as_completed"
        separate = self.spec.per_rank or (self.as_completed and self.spec.copies_weights)
        self.separate = separate and self.ranks > 1
        self.options = shared_kwargs(args, load_function(self.spec.build))
        if args.in_flight_weight_updates and "vllm_engine_args" in self.options:
            # Otherwise a token that is on its way would count as sampled with the next weights.
            given = engine_args(args.vllm_engine_args)
            self.options["vllm_engine_args"] = {"async_scheduling": False} | given
        if self.separate and not self.spec.per_rank:
            self.options["vllm_num_engines"] = engines_per_rank(args, self.spec, ranks=self.ranks)
        self._check_groups()
        self.replayed = None if args.replay_rollouts is None else self._build_replay()
        ready = self.replayed or custom
        self.correction = build_correction(
            args,
            setup.algorithm,
            engine=type(ready).__name__,
            vllm=self.spec.vllm,
            logprobs="sampled" if ready is None else ready.logprobs,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.setup.accelerator.num_processes

    def build(self, learner: HFLearner, models: Models) -> RolloutEngine:
        """Start the rollout engine, with the policy of the learner."""
        setup, args = self.setup, self.setup.args
        ready = self.replayed or setup.inputs.rollout_engine
        if ready is not None:
            return ready
        copies = self.spec.copies_weights
        options: dict[str, Any] = self.options
        if self.spec.actors:
            options = options | {"cluster": setup.ray_cluster}
        inputs = EngineInputs(
            policy=models.policy_copy or learner.policy,
            pad_id=setup.pad_id,
            tokenizer=setup.tokenizer if setup.sampling.stop_strings or not copies else None,
            dtype=setup.dtype,
            extra_slot=setup.algorithm.extra_slot,
            chunk_rows=args.local_rollout_forward_batch_size,
            rank=learner.rank if self.separate else None,
        )
        make = partial(load_function(self.spec.build), inputs, **options)
        if not copies:
            return learner.wrap_engine(make())
        if not self.separate:
            make = partial(self._shared, make, learner.world_size)
        engine = make()
        learner.copy_weights = WeightCopier(
            first_only=not self.separate,
            dtype=getattr(engine, "sync_dtype", None),
            stage=getattr(engine, "stage_weights", None),
            device="cpu",
            live=args.max_lag == 0,
        )
        return engine

    def _shared(self, make: Callable[[], RolloutEngine], ranks: int) -> RolloutEngine:
        """The engine that ``make`` makes on rank 0, shared by all ranks."""
        setup, args = self.setup, self.setup.args
        return build_shared_engine(
            make,
            ranks=ranks,
            timeout=args.rollout_timeout + args.worker_start_timeout,
            extra_slots=int(setup.algorithm.extra_slot),
            exchange=exchange_of_launch(setup.pad_id) if self.spec.actors else None,
        )

    def num_partial_batches(self, engine: RolloutEngine) -> int:
        """Partial batches per batch if sampled as completed; 0: whole batches in order."""
        if not self.as_completed:
            return 0
        limit = PARTIAL_BATCHES_PER_WORKER * len(num_workers(engine))
        return self.setup.args.num_partial_batches or max(n for n in self._divisors() if n <= limit)

    def _divisors(self) -> list[int]:
        prompts = self.setup.sizes.local_prompts
        return [n for n in range(1, prompts + 1) if prompts % n == 0]

    def _check_groups(self) -> None:
        """Check that ranks have whole groups, and that partial batches divide their prompts."""
        sizes, resample = self.setup.sizes, self.setup.algorithm.resample
        option = (
            f"dynamic_sampling={resample}"
            if resample
            else 'rollout_schedule="as_completed"'
            if self.as_completed
            else None
        )
        if option and sizes.local_rows % sizes.group:
            default = "dynamic_sampling=0" if resample else 'rollout_schedule="in_order"'
            raise ConfigError(
                f"{option} needs whole groups on each rank, but {sizes.local_rows} responses per"
                f" rank are not a multiple of {sizes.group}; change per_device_train_batch_size,"
                f" or set {default}"
            )
        number = self.setup.args.num_partial_batches
        if number is not None and number not in self._divisors():
            raise ConfigError(
                f"num_partial_batches={number} must divide the {sizes.local_prompts} prompts of a"
                f" rank; valid values: {', '.join(map(str, self._divisors()))}"
            )

    def _build_replay(self) -> Replayed:
        setup = self.setup
        replay = Replay(
            str(setup.args.replay_rollouts),
            about=recording_fingerprint(setup.sampling),
            rank=setup.accelerator.process_index,
            world_size=self.ranks,
        )
        return Replayed(replay, rows=setup.sizes.local_rows)


def engines_per_rank(args: Any, engine: RolloutEngineSpec, *, ranks: int) -> int:
    """The number of engines of one rank when each rank has separate engines."""
    schedule = f'rollout_schedule="as_completed" needs separate engines for each of {ranks} ranks'
    if not engine.several:
        raise ConfigError(
            f"{schedule}, but {args.rollout_engine!r} is a single engine; use"
            " rollout_engine='vllm_server' or 'ray' with vllm_num_engines, or"
            ' rollout_schedule="in_order"'
        )
    count: int = args.vllm_num_engines
    if count % ranks:
        raise ConfigError(
            f"{schedule}, but vllm_num_engines={count} is not a multiple of {ranks}; set it to"
            f' {ranks * max(1, round(count / ranks))}, or rollout_schedule="in_order"'
        )
    return count // ranks
