"""Names that TrainingArguments had before transformers 5."""

from __future__ import annotations

from dataclasses import fields

from transformers import TrainingArguments

from kedge.config.declare import Alias, Foreign, NoEffect, Unsupported
from kedge.config.values import Range

_APEX = "apex is not supported; mixed precision uses torch autocast"
_PRECISION = "set bf16=True or fp16=True"
_TPU = "TPUs are not supported"
_METRICS = "evaluation scores responses with the reward, not with a metric function"

REMOVED: dict[str, Foreign] = {
    "per_gpu_train_batch_size": Alias("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Alias("per_device_eval_batch_size"),
    "warmup_ratio": Alias("warmup_steps", default=0.0, limits=Range(ge=0, lt=1)),
    "no_cuda": Alias("use_cpu", default=False),
    "adafactor": Alias("optim", lambda on: "adafactor" if on else "adamw_torch_fused", False),
    "push_to_hub_model_id": Alias("hub_model_id"),
    "push_to_hub_token": Alias("hub_token"),
    "torchdynamo": Alias("torch_compile_backend"),
    "save_safetensors": Unsupported(
        "loading pickled weights can run code", "leave it True", default=True
    ),
    "use_mps_device": Unsupported(
        "MPS is used automatically if available", "leave it unset", default=False
    ),
    "jit_mode_eval": Unsupported(
        "tracing for evaluation was removed", "set torch_compile=True", default=False
    ),
    "fp16_opt_level": Unsupported(_APEX, _PRECISION, default="O1"),
    "half_precision_backend": Unsupported(_APEX, _PRECISION, default="auto"),
    "fp16_backend": Unsupported(_APEX, _PRECISION, default="auto"),
    "tpu_num_cores": Unsupported(_TPU, "leave it unset"),
    "tpu_metrics_debug": Unsupported(_TPU, "leave it unset", default=False),
    "past_index": Unsupported(
        "it is for models that return past states", "leave it unset", default=-1
    ),
    "fsdp_min_num_params": Unsupported(
        "it moved into fsdp_config", 'set fsdp_config={"min_num_params": ...}', default=0
    ),
    "fsdp_transformer_layer_cls_to_wrap": Unsupported(
        "it moved into fsdp_config", 'set fsdp_config={"transformer_layer_cls_to_wrap": ...}'
    ),
    "group_by_length": Unsupported(
        "lengths of sampled responses are not known beforehand; rows are packed without padding"
        " instead",
        "leave it unset",
        default=False,
    ),
    "use_legacy_prediction_loop": Unsupported(
        "there is no prediction loop", "leave it unset", default=False
    ),
    "include_inputs_for_metrics": Unsupported(_METRICS, "leave it unset", default=False),
    "push_to_hub_organization": Unsupported(
        "it is now part of the repository name", 'set hub_model_id="organization/name"'
    ),
    "mp_parameters": Unsupported(
        "SageMaker model parallelism is not supported", "leave it unset", default=""
    ),
    "ray_scope": Unsupported(
        "hyperparameter search is not part of Kedge", "leave it unset", default="last"
    ),
    "include_tokens_per_second": NoEffect(
        "tokens per second are always logged", default=False, also=(True,)
    ),
}
_STILL_FIELDS = {f.name for f in fields(TrainingArguments)}  # of the installed release
TRANSFORMERS4 = {name: entry for name, entry in REMOVED.items() if name not in _STILL_FIELDS}
