"""Names that TRL 0.22 and later has for trainers of groups, and what becomes of each."""

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
    """The newer names, at the defaults that TRL 1.16 prints, so that its scripts run or say why."""

    max_completion_length: int | None = option(None, "Newer name of response_length.")
    num_iterations: int | None = option(None, "Newer name of num_ppo_epochs.")
    steps_per_generation: int | None = option(
        None,
        "Micro-batches of one batch of responses. The batch is per_device_train_batch_size x this, "
        "cut into this / gradient_accumulation_steps mini-batches.",
        ge=1,
    )
    generation_batch_size: int | None = option(
        None, "The same, in responses over all processes. Set one of the two.", ge=1
    )
    disable_dropout: bool = option(True, "Always true.")
    log_completions: bool | None = option(
        None, "False: no tables of completions. Else num_sample_generations says how many."
    )

    model_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Further arguments of from_pretrained for a policy and a reference given by name, as JSON "
        "on the command line.",
    )
    trust_remote_code: bool = option(False, "Run code that comes with a model given by name.")
    router_aux_loss_coef: float | None = _refused(None)
    pad_to_multiple_of: int | str | None = _ignored("auto")
    generation_kwargs: str | None = _refused(None)
    repetition_penalty: float = _refused(1.0)
    cache_implementation: str | None = _ignored(None)
    use_vllm: bool = option(False, "Sample with vLLM: vllm_mode says where.")
    vllm_mode: Literal["colocate", "server"] = option(
        "colocate", "colocate: in this process; server: one that runs."
    )
    vllm_model_impl: str = option("vllm", "model_impl of vllm_engine_args.")
    vllm_enable_sleep_mode: bool = option(False, "Newer name of vllm_sleep.")
    vllm_structured_outputs_regex: str | None = _refused(None)
    vllm_server_base_url: str | None = option(None, "Where a vllm serve runs.")
    vllm_server_host: str = option("0.0.0.0", "Its host, without a URL.")
    vllm_server_port: int = option(8000, "Its port, without a URL.", ge=1, le=65535)
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
        None, "Rows of each table of completions on screen. Unset: 5.", ge=1
    )
    log_unique_prompts: bool = option(
        False, "Tables of completions show one response to each prompt."
    )
    use_transformers_continuous_batching: bool = _ignored(False)
    transformers_continuous_batching_config: str | None = _ignored(None)
    use_transformers_paged: bool = _ignored(False)


_SAMPLING = Refused(
    "it would sample from another distribution than the one that is trained", "leave it unset"
)
_MOVING = Refused("the reference does not move", "leave it at its default")
_TABLES = Honored("tables of completions")
_TORCH = Ignored("it chooses how transformers samples, and Kedge's engine or vLLM samples here")
_SIZES = Refused(
    "it is read together with the sizes of a batch", "set it when the config is made", typed=True
)

NEWER: dict[str, Support] = {
    "max_completion_length": Moved("response_length"),
    "num_iterations": Moved("num_ppo_epochs"),
    "steps_per_generation": _SIZES,
    "generation_batch_size": _SIZES,
    "disable_dropout": Refused(
        "two passes over the same text would disagree, and with them the ratio", "leave it True"
    ),
    "log_completions": Honored("cadence: False shows no tables"),
    "model_init_kwargs": Honored("loading of the policy and a reference given by name"),
    "trust_remote_code": Honored("loading of models and tokenizers given by name"),
    "router_aux_loss_coef": Refused(
        "mixtures of experts get no balancing loss", "leave it at its default"
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
    "log_multimodal": Ignored("prompts are text"),
    **NEWER_VLLM,
}


def settle_newer(config: Any) -> None:
    """Turn newer options that are not just another name into Kedge's.

    Raises:
        ConfigError: sizes that do not divide.
    """
    if config.log_completions is False:
        config.num_sample_generations = 0
    _settle_sizes(config)
    settle_vllm(config)


def _settle_sizes(config: Any) -> None:
    steps, rows = config.steps_per_generation, config.generation_batch_size
    if steps is None and rows is None:
        return
    if steps is not None and rows is not None:
        raise ConfigError(
            f"steps_per_generation={steps} and generation_batch_size={rows} both give the size of"
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
                f"generation_batch_size={rows} is no multiple of per_device_train_batch_size x"
                f" processes = {micro}"
            )
        steps = rows // micro
    if steps < 1 or steps % accumulation:
        raise ConfigError(
            f"{name}={value} makes batches of {steps} micro-batches, and"
            f" gradient_accumulation_steps={accumulation} does not divide that: an optimizer step"
            " would need several batches"
        )
    config.num_mini_batches = steps // accumulation
    config.gradient_accumulation_steps = steps
    config.steps_per_generation = config.generation_batch_size = None
