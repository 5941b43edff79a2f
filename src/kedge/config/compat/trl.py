"""Options of the GRPO and RLOO trainers of TRL 0.22 and later, and their status."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from kedge.config.compat.trl_vllm import NEWER_VLLM, settle_vllm
from kedge.config.declare import option
from kedge.config.options import Honored, Ignored, Moved, Refused, Support
from kedge.config.values import SECONDS
from kedge.errors import ConfigError


def _refused(default: Any) -> Any:
    return option(default, "Not supported.")


def _ignored(default: Any) -> Any:
    return option(default, "Accepted; no effect.")


@dataclass
class NewerArguments:
    """The newer names with the defaults of TRL 1.16: its scripts run, or an error says why not."""

    max_completion_length: int | None = option(None, "Newer name of response_length.")
    num_iterations: int | None = option(None, "Newer name of num_ppo_epochs.")
    steps_per_generation: int | None = option(
        None,
        "Micro-batches per rank in one iteration: per_device_train_batch_size x this responses, in "
        "this / gradient_accumulation_steps mini-batches.",
        ge=1,
    )
    generation_batch_size: int | None = option(
        None, "Responses per iteration over all ranks; replaces steps_per_generation.", ge=1
    )
    disable_dropout: bool = option(True, "Always true.")
    log_completions: bool | None = option(
        None, "False: no tables of completions. Otherwise num_sample_generations of them."
    )

    model_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Extra arguments of from_pretrained for policy and reference given by name; JSON on the "
        "command line.",
    )
    trust_remote_code: bool = option(False, "Run the custom code of a model given by name.")
    router_aux_loss_coef: float | None = _refused(None)
    pad_to_multiple_of: int | str | None = _ignored("auto")
    generation_kwargs: str | None = _refused(None)
    repetition_penalty: float = _refused(1.0)
    cache_implementation: str | None = _ignored(None)
    use_vllm: bool = option(False, "Sample with vLLM; see vllm_mode.")
    vllm_mode: Literal["colocate", "server"] = option(
        "colocate", "colocate: vLLM in this process; server: a running vLLM server."
    )
    vllm_model_impl: str = option("vllm", "model_impl of vllm_engine_args.")
    vllm_enable_sleep_mode: bool = option(False, "Newer name of vllm_sleep.")
    vllm_structured_outputs_regex: str | None = _refused(None)
    vllm_server_base_url: str | None = option(None, "URL of a running vllm serve.")
    vllm_server_host: str = option("0.0.0.0", "Host of vllm serve, if no URL is set.")
    vllm_server_port: int = option(8000, "Port of vllm serve, if no URL is set.", ge=1, le=65535)
    vllm_server_timeout: float = option(
        240.0, "Newer name of worker_start_timeout.", gt=0, le=SECONDS
    )
    vllm_group_port: int = _ignored(51216)
    vllm_gpu_memory_utilization: float = option(
        0.3, "gpu_memory_utilization of vllm_engine_args.", gt=0, le=1
    )
    vllm_max_model_length: int | None = option(None, "max_model_len of vllm_engine_args.", ge=1)
    sync_ref_model: bool = _refused(False)
    ref_model_mixup_alpha: float = _refused(0.6)
    ref_model_sync_steps: int = _refused(512)
    log_multimodal: bool = _ignored(True)
    num_completions_to_print: int | None = option(
        None, "Rows of each printed table of completions. Unset: 5.", ge=1
    )
    log_unique_prompts: bool = option(
        False, "Show one response per prompt in tables of completions."
    )
    use_transformers_continuous_batching: bool = _ignored(False)
    transformers_continuous_batching_config: str | None = _ignored(None)
    use_transformers_paged: bool = _ignored(False)


_SAMPLING = Refused("sampling would use another distribution than training", "leave it unset")
_MOVING = Refused("the reference is always frozen", "leave it at its default")
_TABLES = Honored("tables of completions")
_TORCH = Ignored("transformers does not sample here; Kedge's rollout engine or vLLM does")
_SIZES = Refused(
    "it is only read on construction of the config", "pass it to the constructor", typed=True
)

NEWER: dict[str, Support] = {
    "max_completion_length": Moved("response_length"),
    "num_iterations": Moved("num_ppo_epochs"),
    "steps_per_generation": _SIZES,
    "generation_batch_size": _SIZES,
    "disable_dropout": Refused("dropout would make the probability ratio random", "leave it True"),
    "log_completions": Honored("schedule: False shows no tables"),
    "model_init_kwargs": Honored("loading of the policy and a reference given by name"),
    "trust_remote_code": Honored("loading of models and tokenizers given by name"),
    "router_aux_loss_coef": Refused(
        "there is no load-balancing loss for mixtures of experts", "leave it at its default"
    ),
    "pad_to_multiple_of": Ignored("rows are packed without padding"),
    "generation_kwargs": _SAMPLING,
    "repetition_penalty": _SAMPLING,
    "cache_implementation": _TORCH,
    "use_transformers_continuous_batching": _TORCH,
    "transformers_continuous_batching_config": _TORCH,
    "use_transformers_paged": _TORCH,
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _MOVING),
    **dict.fromkeys(("num_completions_to_print", "log_unique_prompts"), _TABLES),
    "log_multimodal": Ignored("prompts are text only"),
    **NEWER_VLLM,
}


def settle_newer(config: Any) -> None:
    """Convert newer options that are more than another name to Kedge's, in place.

    Raises:
        ConfigError: sizes that do not divide.
    """
    if config.log_completions is False:
        config.num_sample_generations = 0
    _convert_sizes(config)
    settle_vllm(config)


def _convert_sizes(config: Any) -> None:
    steps, rows = config.steps_per_generation, config.generation_batch_size
    if steps is None and rows is None:
        return
    if steps is not None and rows is not None:
        raise ConfigError(
            f"steps_per_generation={steps} and generation_batch_size={rows} both set the size of"
            " a batch; set one of them"
        )
    accumulation = config.gradient_accumulation_steps
    name, value = "steps_per_generation", steps
    if rows is not None:
        name, value = "generation_batch_size", rows
        world = int(os.environ.get("WORLD_SIZE", "1"))
        micro = config.per_device_train_batch_size * world
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
    config.num_mini_batches = steps // accumulation
    config.gradient_accumulation_steps = steps
    config.steps_per_generation = config.generation_batch_size = None
