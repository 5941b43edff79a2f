"""Fields that TrainingArguments had before transformers 5, and their status."""

from __future__ import annotations

from dataclasses import dataclass, field

from kedge.config.options import Honored, Moved, Refused, Support
from kedge.errors import ConfigError


@dataclass
class RemovedArguments:
    """The older fields with their documented defaults, so that older scripts still run."""

    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Start over in an output_dir with checkpoints of another run and delete them. "
            "Without it such a folder is refused."
        },
    )
    per_gpu_train_batch_size: int | None = field(
        default=None, metadata={"help": "Older name of per_device_train_batch_size."}
    )
    per_gpu_eval_batch_size: int | None = field(
        default=None, metadata={"help": "Older name of per_device_eval_batch_size."}
    )
    warmup_ratio: float = field(
        default=0.0, metadata={"help": "Warmup as a fraction of the run; now warmup_steps < 1."}
    )
    logging_dir: str | None = field(
        default=None,
        metadata={"help": "TensorBoard folder. Unset: a folder in output_dir."},
    )
    save_safetensors: bool = field(
        default=True, metadata={"help": "Always true: Kedge only writes safetensors."}
    )
    no_cuda: bool = field(default=False, metadata={"help": "Older name of use_cpu."})
    use_mps_device: bool = field(
        default=False, metadata={"help": "Not needed: MPS is used if available."}
    )
    jit_mode_eval: bool = field(default=False, metadata={"help": "No longer supported."})
    fp16_opt_level: str = field(default="O1", metadata={"help": "No longer supported (apex)."})
    half_precision_backend: str = field(
        default="auto", metadata={"help": "No longer supported (apex)."}
    )
    tpu_num_cores: int | None = field(default=None, metadata={"help": "No longer supported."})
    tpu_metrics_debug: bool = field(default=False, metadata={"help": "No longer supported."})
    past_index: int = field(default=-1, metadata={"help": "No longer supported."})
    fsdp_min_num_params: int = field(
        default=0, metadata={"help": 'Now fsdp_config={"min_num_params": ...}.'}
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = field(
        default=None, metadata={"help": 'Now fsdp_config={"transformer_layer_cls_to_wrap": ...}.'}
    )
    adafactor: bool = field(default=False, metadata={"help": 'Now optim="adafactor".'})
    group_by_length: bool = field(default=False, metadata={"help": "Not supported."})
    use_legacy_prediction_loop: bool = field(default=False, metadata={"help": "Not supported."})
    include_inputs_for_metrics: bool = field(default=False, metadata={"help": "Not supported."})
    fp16_backend: str = field(default="auto", metadata={"help": "No longer supported (apex)."})
    push_to_hub_model_id: str | None = field(
        default=None, metadata={"help": "Older name of hub_model_id."}
    )
    push_to_hub_organization: str | None = field(
        default=None, metadata={"help": 'Now part of hub_model_id="organization/name".'}
    )
    push_to_hub_token: str | None = field(
        default=None, metadata={"help": "Older name of hub_token."}
    )
    mp_parameters: str = field(default="", metadata={"help": "Not supported (SageMaker)."})
    torchdynamo: str | None = field(
        default=None, metadata={"help": "Older name of torch_compile_backend."}
    )
    ray_scope: str = field(default="last", metadata={"help": "Not supported."})
    include_tokens_per_second: bool = field(
        default=False, metadata={"help": "Not needed: tokens per second are always logged."}
    )


_APEX = Refused(
    "apex is not supported; mixed precision uses torch autocast", "set bf16=True or fp16=True"
)
_TPU = Refused("TPUs are not supported", "leave it unset")


def _fraction(ratio: float) -> float:
    if not 0 <= ratio < 1:
        raise ConfigError(f"warmup_ratio={ratio!r} must be at least 0 and below 1")
    return ratio


REMOVED: dict[str, Support] = {
    "overwrite_output_dir": Honored(
        "trainer start: without it, an output_dir with checkpoints of another run is refused"
    ),
    "per_gpu_train_batch_size": Moved("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Moved("per_device_eval_batch_size"),
    "warmup_ratio": Moved("warmup_steps", convert=_fraction),
    "logging_dir": Honored("trackers: TensorBoard's folder"),
    "save_safetensors": Refused("loading pickled weights can run code", "leave it True"),
    "no_cuda": Moved("use_cpu"),
    "use_mps_device": Refused("MPS is used automatically if available", "leave it unset"),
    "jit_mode_eval": Refused("tracing for evaluation was removed", "set torch_compile=True"),
    "fp16_opt_level": _APEX,
    "half_precision_backend": _APEX,
    "fp16_backend": _APEX,
    "tpu_num_cores": _TPU,
    "tpu_metrics_debug": _TPU,
    "past_index": Refused("it is for models that return past states", "leave it unset"),
    "fsdp_min_num_params": Refused(
        "it moved into fsdp_config", 'set fsdp_config={"min_num_params": ...}'
    ),
    "fsdp_transformer_layer_cls_to_wrap": Refused(
        "it moved into fsdp_config", 'set fsdp_config={"transformer_layer_cls_to_wrap": ...}'
    ),
    "adafactor": Moved("optim", convert=lambda on: "adafactor" if on else "adamw_torch_fused"),
    "group_by_length": Refused(
        "lengths of sampled responses are not known beforehand; rows are packed without padding "
        "instead",
        "leave it unset",
    ),
    "use_legacy_prediction_loop": Refused("there is no prediction loop", "leave it unset"),
    "include_inputs_for_metrics": Refused(
        "evaluation scores responses with the reward, not with a metric function", "leave it unset"
    ),
    "push_to_hub_model_id": Moved("hub_model_id"),
    "push_to_hub_organization": Refused(
        "it is now part of the repository name", 'set hub_model_id="organization/name"'
    ),
    "push_to_hub_token": Moved("hub_token"),
    "mp_parameters": Refused("SageMaker model parallelism is not supported", "leave it unset"),
    "torchdynamo": Moved("torch_compile_backend"),
    "ray_scope": Refused("hyperparameter search is not part of Kedge", "leave it unset"),
    "include_tokens_per_second": Honored("trackers: tokens per second are always logged"),
}
