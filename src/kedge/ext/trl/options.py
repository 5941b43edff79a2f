"""Configs with the names and defaults of TRL 0.22 and later; ``v0_17`` has those before.

Each is a config of ours in which an option also has TRL's name: ``kedge.trl.GRPOConfig(beta=0.1,
max_completion_length=64)`` may be passed to any trainer of Kedge.
"""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Interval
from transformers import TrainingArguments

from kedge.config import grpo, ppo, rloo
from kedge.config.declare import (
    Accepts,
    Count,
    NoEffect,
    Seconds,
    Unsupported,
    default_of,
    format_value,
    option,
    read_mapping,
    switch,
)
from kedge.config.dialect import Alias, Dialect
from kedge.config.rollout_engines import engine_args, find_engine
from kedge.ext.trl.transformers4 import REMOVED, Names, no_effect, unsupported
from kedge.records.errors import ConfigError

logger = logging.getLogger(__name__)
_IMPORTANCE = "vllm_importance_sampling_"
MinP: TypeAlias = Annotated[float, Interval(ge=0, lt=1)] | None


_STILL_FIELDS = {f.name for f in fields(TrainingArguments)}  # in the installed release
TRANSFORMERS4 = {name: entry for name, entry in REMOVED.items() if name not in _STILL_FIELDS}
# Names that every trainer of TRL has or had.
TRL: Names = {
    **TRANSFORMERS4,
    "stop_token_id": Alias(
        "stop_token_ids", lambda x: [int(x) if isinstance(x, str) and x.isdigit() else x]
    ),
    "keep_sampling_mask": NoEffect(
        "training is always over the tokens that top_k, top_p and min_p allowed", False, (True,)
    ),
    **no_effect("responses are always sampled with full weights", ds3_gather_for_generation=True),
}
# Names of RLOOTrainer and GRPOTrainer from TRL 0.22 on.
GROUPS: Names = {
    **TRL,
    "num_iterations": Alias("num_ppo_epochs"),
    "max_completion_length": Alias("response_length"),
    **unsupported("dropout would make the probability ratio random", disable_dropout=True),
    **unsupported(
        "there is no load-balancing loss for mixtures of experts", router_aux_loss_coef=None
    ),
    **unsupported(
        "sampling would use another distribution than training",
        **{"repetition_penalty": 1.0, "vllm_structured_outputs_regex": None},
    ),
    **no_effect("rows are packed without padding", pad_to_multiple_of="auto"),
    **no_effect(
        "transformers does not sample here; Kedge's rollout engine or vLLM does",
        **{"cache_implementation": None, "use_transformers_continuous_batching": False},
        **{"transformers_continuous_batching_config": None, "use_transformers_paged": False},
    ),
    **no_effect(
        "weights are sent to a server as files (weight_sync_folder)", vllm_group_port=51216
    ),
    **no_effect("prompts are text only", log_multimodal=True),
    **unsupported(
        "tables of completions are files in the output folder",
        "upload its folder completions with `hf upload`",
        log_completions_hub_repo=None,
    ),
}


@dataclass(repr=False)
class PPOConfig(Dialect, ppo.PPOConfig):
    """Options of ``PPOTrainer``, in the names of TRL 0.12 and later."""

    NAMES: ClassVar[Mapping[str, Any]] = TRL


@dataclass(repr=False)
class GroupNames:
    """Options of TRL 0.22 and later that become others when the config is made."""

    CONVERTED: ClassVar[Sequence[str]] = ()  # set below

    SECTION: ClassVar[str] = "names of TRL"

    steps_per_generation: Count | None = option(
        None,
        "Number of micro-batches that a process trains on per iteration; "
        "gradient_accumulation_steps of them make an optimizer step.",
    )
    generation_batch_size: Count | None = option(
        None, "Number of responses per iteration; it replaces steps_per_generation."
    )
    log_completions: bool | None = switch(
        None, "False shows no tables; otherwise there are num_sample_generations of them."
    )
    generation_kwargs: dict[str, Any] | str | None = option(
        None, "Extra sampling arguments: only {'stop': strings} is accepted, for stop_strings."
    )
    use_vllm: bool = option(False, "Sample with vLLM, in the mode that vllm_mode sets.")
    vllm_mode: Literal["colocate", "server"] = option(
        "colocate", "Where vLLM runs: in this process (colocate), or as a server (server)."
    )
    vllm_model_impl: str = option("vllm", "model_impl in vllm_engine_args.")
    vllm_enable_sleep_mode: bool = option(False, "Newer name of vllm_sleep.")
    vllm_server_base_url: str | None = option(None, "URL of a running vllm serve.")
    vllm_server_host: str = option("0.0.0.0", "Host of vllm serve, if no URL is set.")
    vllm_server_port: Annotated[int, Interval(ge=1, le=65535)] = option(
        8000, "Port of vllm serve, if no URL is set."
    )
    vllm_server_timeout: Seconds = option(240.0, "Newer name of worker_start_timeout.")
    vllm_gpu_memory_utilization: Annotated[float, Interval(gt=0, le=1)] = option(
        0.3, "gpu_memory_utilization in vllm_engine_args."
    )
    vllm_max_model_length: Count | None = option(None, "max_model_len in vllm_engine_args.")

    overlong_prompts: Literal["drop", "truncate"] = option(
        "truncate", "Whether to truncate prompts above max_prompt_length on the left, or drop them."
    )
    length_option: ClassVar[str] = "max_completion_length"

    def _fill_defaults(self) -> None:
        config: Any = self
        _convert_sizes(self)
        _convert_vllm(self)
        config.min_p = config.min_p or 0.0
        if self.log_completions is False:
            self.num_sample_generations = 0
        kwargs = read_mapping(self.generation_kwargs)
        stop = kwargs.pop("stop", None)
        if kwargs:
            raise ConfigError(
                f"generation_kwargs={format_value(kwargs)}: sampling would use another"
                " distribution than training; only stop is supported, leave the rest out"
            )
        if stop is not None:
            config.stop_strings = [stop] if isinstance(stop, str) else list(stop)
        self.generation_kwargs = None
        super()._fill_defaults()  # type: ignore[misc]


@dataclass(repr=False)
class RLOOConfig(Dialect, GroupNames, rloo.RLOOConfig):
    """Options of ``RLOOTrainer``, in the names and with the defaults of TRL 0.22 and later."""

    NAMES: ClassVar[Mapping[str, Any]] = {
        **GROUPS,
        "beta": Alias("kl_coef"),
        "epsilon": Alias("cliprange"),
        "epsilon_high": Alias("cliprange_high"),
        "normalize_advantages": Alias("normalize_advantage", default=False),
        "whiten_rewards": Unsupported(
            "RLOO has one reward per response", False, way_out="set normalize_reward=True"
        ),
    }

    min_p: MinP = option(None, "Never sample tokens below this share of the top one.")  # type: ignore[assignment]
    learning_rate: float = option(1e-6, "Learning rate of the policy.")
    num_ppo_epochs: int = option(1, "Number of passes over each batch.")
    response_length: int = option(512, "Maximum number of tokens in a response.")
    temperature: float = option(1.0, "Sampling temperature; also divides the logits in training.")


@dataclass(repr=False)
class GRPOConfig(Dialect, GroupNames, grpo.GRPOConfig):
    """Options of ``GRPOTrainer``, in the names and with the defaults of TRL 1.16."""

    NAMES: ClassVar[Mapping[str, Any]] = {
        **GROUPS,
        "vllm_importance_sampling_cap": Alias("vllm_importance_sampling_clip_max"),
        "cast_lm_head_to_fp32": NoEffect("training logits are always float32", False, (True,)),
        **unsupported("the loss always covers every token", top_entropy_quantile=1.0),
        **unsupported(
            "the weight of the entropy bonus does not adapt",
            "set entropy_coef",
            **{"use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0},
            **{"entropy_coef_delta": 0.005, "entropy_target": 0.2},
        ),
        **unsupported(
            "sampler_correction handles off-policy responses",
            "set sampler_correction instead",
            off_policy_mask_threshold=None,
        ),
        **unsupported(
            "this loss is not implemented",
            **{"sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0},
            **{"vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
        ),
    }

    SECTION: ClassVar[str] = GroupNames.SECTION

    min_p: MinP = option(None, "Never sample tokens below this share of the top one.")  # type: ignore[assignment]
    scale_rewards: Annotated[Literal["group", "batch", "none"], Accepts(bool)] = option(
        "group", "Divide advantages by the scores' standard deviation in the group or in the batch."
    )
    vllm_importance_sampling_correction: bool = option(
        True, "Weight what vLLM sampled by the ratio of the learner's probability to vLLM's."
    )
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = option("sequence_mask", "What has one weight, and what happens beyond the bound.")
    vllm_importance_sampling_clip_max: Annotated[float, Interval(ge=0, le=math.inf)] = option(
        3.0, "Importance weights above this are truncated or masked. inf is no bound."
    )
    vllm_importance_sampling_clip_min: Annotated[float, Ge(0)] | None = option(
        None, "Importance weights below this are raised to it or masked."
    )

    def _fill_defaults(self) -> None:
        super()._fill_defaults()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        _convert_importance(self)


_VLLM = {
    f.name: default_of(f) for f in fields(GroupNames) if f.name.startswith(("use_vllm", "vllm_"))
}


GroupNames.CONVERTED = tuple(_VLLM)


def _convert_sizes(c: Any) -> None:
    steps, rows = c.steps_per_generation, c.generation_batch_size
    if steps is None and rows is None:
        return
    if steps is not None and rows is not None:
        raise ConfigError(
            f"steps_per_generation={steps} and generation_batch_size={rows} both set the size of"
            " a batch; set one of them"
        )
    name = "steps_per_generation" if rows is None else "generation_batch_size"
    accumulation, micro = c.gradient_accumulation_steps, 1
    if rows is not None:
        micro = c.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
    whole = steps if rows is None else rows
    if whole % (micro * accumulation):
        size = "" if rows is None else f"per_device_train_batch_size x world size = {micro}, x "
        raise ConfigError(
            f"{name}={whole} must be a multiple of {size}gradient_accumulation_steps={accumulation}"
        )
    c.gradient_accumulation_steps = whole // micro
    c.num_mini_batches = c.gradient_accumulation_steps // accumulation
    c.steps_per_generation = c.generation_batch_size = None


def _convert_vllm(c: Any) -> None:
    if not c.use_vllm:
        unread = [f"{n}={x!r}" for n, default in _VLLM.items() if (x := getattr(c, n)) != default]
        if unread:
            logger.warning("%s has no effect without use_vllm=True", ", ".join(unread))
        vars(c).update(_VLLM)
        return
    if c.rollout_engine != "embedded":
        raise ConfigError(
            f"use_vllm=True and rollout_engine={c.rollout_engine!r} are both set; set one of them"
        )
    if c.vllm_mode == "server":
        address = f"http://{c.vllm_server_host}:{c.vllm_server_port}"
        c.rollout_engine = c.vllm_server_base_url or address
        c.worker_start_timeout = c.vllm_server_timeout
    else:
        c.rollout_engine = "vllm"
        c.vllm_sleep = c.vllm_enable_sleep_mode
        from_trl = {
            "gpu_memory_utilization": c.vllm_gpu_memory_utilization,
            "max_model_len": c.vllm_max_model_length,
            "model_impl": None if c.vllm_model_impl == "vllm" else c.vllm_model_impl,
        }
        given = engine_args(c.vllm_engine_args)
        c.vllm_engine_args = {k: v for k, v in from_trl.items() if v is not None} | dict(given)
    vars(c).update(_VLLM)


def _convert_importance(c: Any) -> None:
    """Set ``sampler_correction`` where vLLM samples."""
    defaults = {
        f.name: default_of(f)
        for f in fields(c)
        if f.name.startswith(_IMPORTANCE) and f.name not in c.NAMES
    }
    given = {name: x for name in defaults if (x := getattr(c, name)) != defaults[name]}
    own = (c.sampler_correction_level, c.sampler_correction_high, c.sampler_correction_low)
    if not find_engine(c).vllm:
        if given:
            logger.warning("%s has no effect: vLLM does not sample", ", ".join(given))
    elif c.sampler_correction != "auto" or own != (None, None, None):
        if given:
            name, value = next(iter(given.items()))
            raise ConfigError(
                f"sampler_correction={c.sampler_correction!r} and {name}={value!r} both set the"
                " importance weights; leave out one"
            )
    elif not c.vllm_importance_sampling_correction:
        c.sampler_correction = "off"
    else:
        level, kind = c.vllm_importance_sampling_mode.split("_")
        high, low = c.vllm_importance_sampling_clip_max, c.vllm_importance_sampling_clip_min
        if kind == "truncate" and high == math.inf and low is None:
            raise ConfigError(
                f"vllm_importance_sampling_mode={c.vllm_importance_sampling_mode!r} needs a bound:"
                f" set {_IMPORTANCE}clip_max or {_IMPORTANCE}clip_min, or"
                f" {_IMPORTANCE}correction=False"
            )
        c.sampler_correction, c.sampler_correction_level = kind, level
        c.sampler_correction_high, c.sampler_correction_low = high, low or 0.0
    vars(c).update(defaults)
