"""Names of the GRPO and RLOO trainers of TRL, up to 1.16."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from kedge.config.compat.training_arguments import TRANSFORMERS4
from kedge.config.declare import (
    SECONDS,
    Alias,
    Foreign,
    NoEffect,
    Unsupported,
    default_of,
    format_value,
    no_effect,
    option,
    read_mapping,
    unsupported,
)
from kedge.config.rollout_engines import engine_args
from kedge.errors import ConfigError

logger = logging.getLogger(__name__)
# Names that every trainer of TRL has or had.
TRL: dict[str, Foreign] = {
    **TRANSFORMERS4,
    "keep_sampling_mask": NoEffect(
        "training is always over the tokens that top_k, top_p and min_p allowed", False, (True,)
    ),
    **unsupported("responses are always sampled with full weights", ds3_gather_for_generation=True),
}
# Names of RLOOTrainer and GRPOTrainer from TRL 0.22 on.
TRL_GROUPS: dict[str, Foreign] = {
    **TRL,
    **unsupported("dropout would make the probability ratio random", disable_dropout=True),
    **unsupported(
        "there is no load-balancing loss for mixtures of experts", router_aux_loss_coef=None
    ),
    **unsupported(
        "sampling would use another distribution than training",
        repetition_penalty=1.0,
        vllm_structured_outputs_regex=None,
    ),
    **unsupported(
        "the reference is always frozen",
        sync_ref_model=False,
        ref_model_mixup_alpha=0.6,
        ref_model_sync_steps=512,
    ),
    **no_effect("rows are packed without padding", pad_to_multiple_of="auto"),
    **no_effect(
        "transformers does not sample here; Kedge's rollout engine or vLLM does",
        cache_implementation=None,
        use_transformers_continuous_batching=False,
        transformers_continuous_batching_config=None,
        use_transformers_paged=False,
    ),
    **no_effect(
        "weights are sent to a server as files (weight_sync_folder)", vllm_group_port=51216
    ),
    **no_effect("prompts are text only", log_multimodal=True),
}
TRL_RLOO: dict[str, Foreign] = {
    **TRL_GROUPS,
    "whiten_rewards": Unsupported(
        "RLOO has one reward per response", "set normalize_reward=True", default=False
    ),
}
TRL_GRPO: dict[str, Foreign] = {
    **TRL_GROUPS,
    "vllm_importance_sampling_cap": Alias("vllm_importance_sampling_clip_max"),
    "cast_lm_head_to_fp32": NoEffect("training logits are always float32", False, (True,)),
    **unsupported(
        "rewards are weighted and summed before normalization",
        multi_objective_aggregation="sum_then_normalize",
    ),
    **unsupported("the loss always covers every token", top_entropy_quantile=1.0),
    "off_policy_mask_threshold": Unsupported(
        "sampler_correction handles off-policy responses", "set sampler_correction instead"
    ),
    **unsupported(
        "this loss is not implemented",
        **{"sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0},
        **{"vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
    ),
}

_batch = partial(option, acts_in="batch sizes and run length")
_loading = partial(option, acts_in="loading of models and tokenizers given by name")
_tables = partial(option, acts_in="tables of completions")
_vllm = partial(
    option, acts_in="rollout engine: converted to rollout_engine and its options", resume=True
)


@dataclass
class NewerArguments:
    """Options of TRL 0.22 and later that act, with the defaults of TRL 1.16."""

    steps_per_generation: int | None = _batch(
        None,
        "Micro-batches per rank in one iteration: per_device_train_batch_size x this responses, in "
        "this / gradient_accumulation_steps mini-batches.",
        ge=1,
    )
    generation_batch_size: int | None = _batch(
        None, "Responses per iteration over all ranks; replaces steps_per_generation.", ge=1
    )
    log_completions: bool | None = option(
        None,
        "False: no tables of completions. Otherwise num_sample_generations of them.",
        acts_in="schedule: False shows no tables",
    )
    num_completions_to_print: int | None = _tables(
        None, "Rows of each printed table of completions. Unset: 5.", ge=1
    )
    log_unique_prompts: bool = _tables(
        False, "Show one response per prompt in tables of completions."
    )
    model_init_kwargs: dict[str, Any] | str | None = _loading(
        None,
        "Extra arguments of from_pretrained for policy and reference given by name; JSON on the "
        "command line.",
    )
    trust_remote_code: bool = _loading(False, "Run the custom code of a model given by name.")
    generation_kwargs: dict[str, Any] | str | None = option(
        None,
        "Only {'stop': strings}, which means stop_strings.",
        acts_in="sampling: converted to stop_strings",
        resume=True,
    )
    use_vllm: bool = _vllm(False, "Sample with vLLM; see vllm_mode.")
    vllm_mode: Literal["colocate", "server"] = _vllm(
        "colocate", "colocate: vLLM in this process; server: a running vLLM server."
    )
    vllm_model_impl: str = _vllm("vllm", "model_impl of vllm_engine_args.")
    vllm_enable_sleep_mode: bool = _vllm(False, "Newer name of vllm_sleep.")
    vllm_server_base_url: str | None = _vllm(None, "URL of a running vllm serve.")
    vllm_server_host: str = _vllm("0.0.0.0", "Host of vllm serve, if no URL is set.")
    vllm_server_port: int = _vllm(8000, "Port of vllm serve, if no URL is set.", ge=1, le=65535)
    vllm_server_timeout: float = _vllm(
        240.0, "Newer name of worker_start_timeout.", gt=0, le=SECONDS
    )
    vllm_gpu_memory_utilization: float = _vllm(
        0.3, "gpu_memory_utilization of vllm_engine_args.", gt=0, le=1
    )
    vllm_max_model_length: int | None = _vllm(None, "max_model_len of vllm_engine_args.", ge=1)

    def _fill_defaults(self) -> None:
        super()._fill_defaults()  # type: ignore[misc]
        if self.log_completions is False:
            self.num_sample_generations = 0


_VLLM = {
    f.name: default_of(f)
    for f in fields(NewerArguments)
    if f.name.startswith(("use_vllm", "vllm_"))
}
# Options that are converted to others when a config is built.
CONVERTED = ("steps_per_generation", "generation_batch_size", "generation_kwargs", *_VLLM)


def convert_newer(c: Any) -> None:
    """Convert options of TRL that are not plain aliases to those of Kedge.

    Args:
        c: all options by attribute, before the config is built.
    """
    _convert_sizes(c)
    _convert_vllm(c)
    kwargs = read_mapping(c.generation_kwargs)
    stop = kwargs.pop("stop", None)
    if kwargs:
        raise ConfigError(
            f"generation_kwargs={format_value(kwargs)}: sampling would use another distribution"
            " than training; only stop is supported, leave the rest out"
        )
    if stop is not None:
        c.stop_strings = [stop] if isinstance(stop, str) else list(stop)
    c.generation_kwargs = None


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
