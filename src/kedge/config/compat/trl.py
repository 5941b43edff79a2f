"""Names of the GRPO and RLOO trainers of TRL, up to 1.16."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from kedge.config.compat.training_arguments import TRANSFORMERS4
from kedge.config.declare import Alias, Foreign, NoEffect, Unsupported, default_of, option
from kedge.config.rollout import engine_args, json_object
from kedge.config.values import SECONDS
from kedge.errors import ConfigError

logger = logging.getLogger(__name__)
_LEAVE = "leave it at its default"
_SAMPLING = ("sampling would use another distribution than training", "leave it unset")
_MOVING = ("the reference is always frozen", _LEAVE)
_TORCH = "transformers does not sample here; Kedge's rollout engine or vLLM does"
_LOSS = ("this loss is not implemented", _LEAVE)

# Names that every trainer of TRL has or had.
TRL: dict[str, Foreign] = {
    **TRANSFORMERS4,
    "keep_sampling_mask": NoEffect(
        "training is always over the tokens that top_k, top_p and min_p allowed",
        default=False,
        also=(True,),
    ),
    "ds3_gather_for_generation": Unsupported(
        "responses are always sampled with full weights", "leave it True", default=True
    ),
}
# Names of RLOOTrainer and GRPOTrainer from TRL 0.22 on.
TRL_GROUPS: dict[str, Foreign] = {
    **TRL,
    "disable_dropout": Unsupported(
        "dropout would make the probability ratio random", "leave it True", default=True
    ),
    "router_aux_loss_coef": Unsupported(
        "there is no load-balancing loss for mixtures of experts", _LEAVE
    ),
    "repetition_penalty": Unsupported(*_SAMPLING, default=1.0),
    "vllm_structured_outputs_regex": Unsupported(*_SAMPLING),
    "sync_ref_model": Unsupported(*_MOVING, default=False),
    "ref_model_mixup_alpha": Unsupported(*_MOVING, default=0.6),
    "ref_model_sync_steps": Unsupported(*_MOVING, default=512),
    "pad_to_multiple_of": NoEffect("rows are packed without padding", default="auto"),
    "cache_implementation": NoEffect(_TORCH),
    "use_transformers_continuous_batching": NoEffect(_TORCH, default=False),
    "transformers_continuous_batching_config": NoEffect(_TORCH),
    "use_transformers_paged": NoEffect(_TORCH, default=False),
    "vllm_group_port": NoEffect(
        "weights are sent to a server as files (weight_sync_folder)", default=51216
    ),
    "log_multimodal": NoEffect("prompts are text only", default=True),
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
    "cast_lm_head_to_fp32": NoEffect(
        "training logits are always float32", default=False, also=(True,)
    ),
    "multi_objective_aggregation": Unsupported(
        "rewards are weighted and summed before normalization", _LEAVE, "sum_then_normalize"
    ),
    "top_entropy_quantile": Unsupported("the loss always covers every token", _LEAVE, 1.0),
    "off_policy_mask_threshold": Unsupported(
        "sampler_correction handles off-policy responses", "set sampler_correction instead"
    ),
    "sapo_temperature_neg": Unsupported(*_LOSS, default=1.05),
    "sapo_temperature_pos": Unsupported(*_LOSS, default=1.0),
    "vespo_k_pos": Unsupported(*_LOSS, default=2.0),
    "vespo_lambda_pos": Unsupported(*_LOSS, default=3.0),
    "vespo_k_neg": Unsupported(*_LOSS, default=3.0),
    "vespo_lambda_neg": Unsupported(*_LOSS, default=2.0),
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
# Options that become others when a config is built.
CONVERTED = ("steps_per_generation", "generation_batch_size", "generation_kwargs", *_VLLM)


def convert_newer(c: Any) -> None:
    """Convert options of TRL that are more than another name to those of Kedge.

    Args:
        c: all options by attribute, before the config is built.

    Raises:
        ConfigError: sizes that do not divide, or vLLM options that contradict each other.
    """
    _convert_sizes(c)
    _convert_stop(c)
    _convert_vllm(c)


def _convert_sizes(c: Any) -> None:
    steps, rows = c.steps_per_generation, c.generation_batch_size
    if steps is None and rows is None:
        return
    if steps is not None and rows is not None:
        raise ConfigError(
            f"steps_per_generation={steps} and generation_batch_size={rows} both set the size of"
            " a batch; set one of them"
        )
    accumulation = c.gradient_accumulation_steps
    name, value = "steps_per_generation", steps
    if rows is not None:
        name, value = "generation_batch_size", rows
        micro = c.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
        if rows % micro:
            raise ConfigError(
                f"generation_batch_size={rows} must be a multiple of per_device_train_batch_size x"
                f" world size = {micro}"
            )
        steps = rows // micro
    if steps < 1 or steps % accumulation:
        raise ConfigError(
            f"{name}={value} makes batches of {steps} micro-batches, which must be a multiple of"
            f" gradient_accumulation_steps={accumulation}"
        )
    c.num_mini_batches = steps // accumulation
    c.gradient_accumulation_steps = steps
    c.steps_per_generation = c.generation_batch_size = None


def _convert_stop(c: Any) -> None:
    given = dict(json_object("generation_kwargs", c.generation_kwargs))
    stop = given.pop("stop", None)
    if given:
        raise ConfigError(
            f"generation_kwargs={repr(given)[:80]}: sampling would use another distribution than"
            " training; only stop is supported, leave the rest out"
        )
    if stop is not None:
        c.stop_strings = [stop] if isinstance(stop, str) else list(stop)
    c.generation_kwargs = None


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
