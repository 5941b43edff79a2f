"""Builds the rollout engine of a run, and the correction between it and the learner."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from kedge.config.rollout_engines import engine_args, load_function
from kedge.errors import ConfigError
from kedge.learner.learner import HFLearner
from kedge.learner.learner_state import WeightCopier
from kedge.math.ratios import Correction
from kedge.protocols import RolloutEngine
from kedge.trainers.assembly.models import Models
from kedge.trainers.assembly.setup import Setup
from kedge.trainers.run.files import recording_fingerprint
from kedge.trainers.spec import shared_kwargs

if TYPE_CHECKING:
    from kedge.checkpoint.replay import RolloutReplay

logger = logging.getLogger(__name__)
PARTIAL_BATCHES_PER_WORKER = 4  # gives a fast engine more work
Kind = Literal["truncate", "mask"]
Level = Literal["token", "sequence", "sequence_mean"]

HIGH: dict[Level, float] = {"token": 2.0, "sequence": 5.0, "sequence_mean": 1.01}
_TRL = "vllm_importance_sampling_"
# Values of vllm_importance_sampling_mode in TRL.
MODES: dict[str, tuple[Level, Kind]] = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}


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
        self.options = shared_kwargs(args, load_function(self.spec.build))
        if args.in_flight_weight_updates and "vllm_engine_args" in self.options:
            # Otherwise a token in flight would count as sampled with the next weights.
            given = engine_args(args.vllm_engine_args)
            self.options["vllm_engine_args"] = {"async_scheduling": False} | given
        self.replayed: RolloutReplay | None = None
        if args.replay_rollouts is not None:
            from kedge.checkpoint.replay import RolloutReplay

            self.replayed = RolloutReplay(
                str(args.replay_rollouts),
                settings=recording_fingerprint(setup.sampling),
                rank=setup.accelerator.process_index,
                world_size=self.ranks,
                rows=setup.sizes.local_rows,
            )
        ready = self.replayed or custom
        # All ranks share the engines, which rank 0 has.
        self.shared = ready is None and self.spec.copies_weights and not self.spec.per_rank
        self._check_groups()
        self.correction = build_correction(
            args,
            engine=type(ready).__name__,
            vllm=self.spec.vllm,
            logprobs="sampled" if ready is None else ready.logprob_kind,
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
        from kedge.rollout.engines import EngineInputs

        inputs = EngineInputs(
            policy=models.policy_copy or learner.policy,
            pad_id=setup.pad_id,
            tokenizer=setup.tokenizer if setup.sampling.stop_strings or not copies else None,
            dtype=setup.dtype,
            extra_column=setup.algorithm.extra_column,
            chunk_rows=args.local_rollout_forward_batch_size,
        )
        make = partial(load_function(self.spec.build), inputs, **options)
        if not copies:
            return learner.wrap_engine(make())
        engine = self._start_on_first(make, learner.world_size) if self.shared else make()
        learner.copy_weights = WeightCopier(
            first_only=self.shared,
            dtype=getattr(engine, "sync_dtype", None),
            stage=getattr(engine, "stage_weights", None),
            device="cpu",
            live=args.max_lag == 0,
        )
        return engine

    def _start_on_first(self, make: Callable[[], RolloutEngine], ranks: int) -> RolloutEngine:
        """Make an engine on rank 0 that all ranks share."""
        from kedge.rollout.engines import build_shared_engine

        setup, args, mail = self.setup, self.setup.args, None
        if self.spec.actors:
            from kedge.ray.context import get_context

            mail = get_context()
        return build_shared_engine(
            make,
            ranks=ranks,
            timeout=args.rollout_timeout + args.worker_start_timeout,
            extra_columns=int(setup.algorithm.extra_column),
            mail=mail,
        )

    def num_partial_batches(self, engine: RolloutEngine) -> int:
        """Number of partial batches in "as completed"; 0: whole batches in order."""
        if not self.as_completed:
            return 0
        from kedge.rollout.scheduler.worker import list_engines

        limit = PARTIAL_BATCHES_PER_WORKER * len(list_engines(engine))
        return self.setup.args.num_partial_batches or max(n for n in self._divisors() if n <= limit)

    def _divisors(self) -> list[int]:
        sizes = self.setup.sizes
        prompts = sizes.prompts if self.shared else sizes.local_prompts
        return [n for n in range(1, prompts + 1) if prompts % n == 0]

    def _check_groups(self) -> None:
        """Check that ranks have whole groups, and that partial batches divide their prompts."""
        sizes, resample = self.setup.sizes, self.setup.algorithm.resample
        if (resample or self.as_completed) and sizes.local_rows % sizes.group:
            option, default = 'rollout_schedule="as_completed"', 'rollout_schedule="in_order"'
            if resample:
                option, default = f"dynamic_sampling={resample}", "dynamic_sampling=0"
            raise ConfigError(
                f"{option} needs whole groups on each rank, but {sizes.local_rows} responses per"
                f" rank are not a multiple of {sizes.group}; change per_device_train_batch_size,"
                f" or set {default}"
            )
        number = self.setup.args.num_partial_batches
        if number is not None and number not in self._divisors():
            raise ConfigError(
                f"num_partial_batches={number} must divide the {self._divisors()[-1]} prompts of"
                f" {'an iteration' if self.shared else 'a rank'}; valid values:"
                f" {', '.join(map(str, self._divisors()))}"
            )


def build_correction(args: Any, *, engine: str, vllm: bool, logprobs: str) -> Correction | None:
    """The correction that a run uses, or None; logged if it is on by default.

    Explicit options act at every lag: ``sampler_correction*``, or TRL's
    ``vllm_importance_sampling_*`` where vLLM samples.  Unset, weights per token truncated at 2 are
    on with vLLM, from ``max_lag=2``, and in flight.

    Args:
        args: the config.
        engine: name of the rollout engine, for messages.
        vllm: whether vLLM samples.
        logprobs: ``RolloutEngine.logprob_kind``.
    """
    asked, correction = _asked_correction(args, vllm=vllm)
    recorded = logprobs != "none"
    in_flight = args.in_flight_weight_updates  # tokens may be older than max_lag
    if not asked and recorded and (vllm or in_flight or args.max_lag >= 2):
        correction = Correction()
        logger.warning(
            "%s: importance weights of learner over rollout engine multiply the advantages (%s, per"
            ' %s, bounded at %g); sampler_correction="off" disables them',
            "vLLM samples" if vllm else f"max_lag={args.max_lag}",
            *(correction.kind, correction.level, correction.high),
        )
    if correction is None and args.max_lag > 0 and not recorded:
        logger.warning(
            "max_lag=%d trains on samples of older weights, but %s records no log-probabilities:"
            " the loss does not correct for stale samples",
            *(args.max_lag, engine),
        )
    if correction is not None and correction.kind == "ratio" and logprobs == "raw":
        raise ConfigError(
            f"sampler_correction='ratio' needs log-probabilities of the distribution that {engine}"
            " samples from, but it records those of the model without temperature; leave it unset"
        )
    if correction is not None and not recorded:
        raise ConfigError(
            f"{asked[0]}={getattr(args, asked[0])!r} needs log-probabilities of the rollout engine,"
            f" but {engine} records none; leave it unset"
        )
    return correction


def _asked_correction(args: Any, *, vllm: bool) -> tuple[list[str], Correction | None]:
    """The correction options that are set, and the correction they describe."""
    mode = args.sampler_correction or "off"
    own = _set_options(args, [f"sampler_correction_{x}" for x in ("level", "low", "high")])
    asked = own if mode == "auto" else ["sampler_correction", *own]
    trl = _set_options(args, [f"{_TRL}{name}" for name in ("mode", "clip_max", "clip_min")])
    on = not hasattr(args, f"{_TRL}correction") or args.vllm_importance_sampling_correction
    trl = trl if on else [f"{_TRL}correction", *trl]
    if asked and trl:
        one, other = (f"{name}={getattr(args, name)!r}" for name in (asked[0], trl[0]))
        raise ConfigError(f"{one} and {other} both set the importance weights; leave out one")
    if trl and vllm:
        return trl, _trl_correction(args) if on else None
    if trl:
        logger.warning("%s has no effect: vLLM does not sample", ", ".join(trl))
    if mode in ("off", "ratio") and own:
        raise ConfigError(
            f"{own[0]}={getattr(args, own[0])!r} has no effect with sampler_correction={mode!r};"
            " leave one of them out"
        )
    if not asked or mode == "off":
        return asked, None
    if mode == "ratio":
        return asked, Correction(kind="ratio")
    level: Level = args.sampler_correction_level or "token"
    kind: Kind = "mask" if mode == "mask" else "truncate"
    low, high = args.sampler_correction_low, args.sampler_correction_high
    high = HIGH[level] if high is None else high
    if low is None and kind == "mask" and high > 1:  # symmetric bounds, as in verl
        low = 1 / high
    _check_order("sampler_correction_low", low, "sampler_correction_high", high)
    return asked, Correction(kind=kind, level=level, high=high, low=low or 0.0)


def _set_options(args: Any, names: list[str]) -> list[str]:
    return [name for name in names if getattr(args, name, None) is not None]


def _trl_correction(args: Any) -> Correction:
    """The correction set by TRL's options."""
    mode = args.vllm_importance_sampling_mode
    high, low = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    level, kind = MODES[mode or "token_truncate"]
    if high is None:  # TRL's default is 3
        high = 2.0 if mode is None else 3.0
    _check_order(f"{_TRL}clip_min", low, f"{_TRL}clip_max", high)
    if kind == "truncate" and high == math.inf and low is None:
        raise ConfigError(
            f"{_TRL}mode={mode!r} needs a bound: set {_TRL}clip_max or {_TRL}clip_min, or"
            f" {_TRL}correction=False"
        )
    return Correction(kind=kind, level=level, high=high, low=low or 0.0)


def _check_order(low_name: str, low: float | None, high_name: str, high: float) -> None:
    if low is not None and low >= high:
        raise ConfigError(f"{low_name}={low:g} must be less than {high_name}={high:g}")
