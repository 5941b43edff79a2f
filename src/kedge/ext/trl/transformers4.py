"""What transformers 5 removed: names of transformers 4 that scripts still have."""

from __future__ import annotations

from typing import Any

from kedge.config.declare import NoEffect, Unsupported, format_value
from kedge.config.dialect import Alias
from kedge.records.errors import ConfigError

Names = dict[str, Any]


def unsupported(reason: str, way_out: str = "leave it at its default", /, **defaults: Any) -> Names:
    """Rows for names that are refused unless they have these defaults."""
    return {n: Unsupported(reason, default, way_out=way_out) for n, default in defaults.items()}


def no_effect(reason: str, **defaults: Any) -> Names:
    """Rows for names without effect, with the defaults that log nothing."""
    return {name: NoEffect(reason, default) for name, default in defaults.items()}


def _warmup(share: Any) -> Any:
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"warmup_ratio={format_value(share)} must be at least 0 and below 1")
    return share


# Names of transformers 4 that transformers 5 removed.
REMOVED: Names = {
    "per_gpu_train_batch_size": Alias("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Alias("per_device_eval_batch_size"),
    "evaluation_strategy": Alias("eval_strategy"),
    "warmup_ratio": Alias("warmup_steps", _warmup, 0.0),
    "no_cuda": Alias("use_cpu", default=False),
    "adafactor": Alias("optim", lambda on: "adafactor" if on else "adamw_torch_fused", False),
    "push_to_hub_model_id": Alias("hub_model_id"),
    "push_to_hub_token": Alias("hub_token"),
    "torchdynamo": Alias("torch_compile_backend"),
    **unsupported(
        "apex is not supported; mixed precision uses torch autocast",
        "set bf16=True or fp16=True",
        **{"fp16_opt_level": "O1", "half_precision_backend": "auto", "fp16_backend": "auto"},
    ),
    **unsupported("loading pickled weights can run code", save_safetensors=True),
    **unsupported(
        "it moved into fsdp_config",
        "set it there",
        **{"fsdp_min_num_params": 0, "fsdp_transformer_layer_cls_to_wrap": None},
    ),
    **unsupported(
        "it moved into accelerator_config",
        "leave it out",
        dispatch_batches=None,
        split_batches=None,
    ),
    **unsupported("rows are packed without padding instead", group_by_length=False),
    **unsupported(
        "it is part of the repository name",
        'set hub_model_id="organization/name"',
        push_to_hub_organization=None,
    ),
    **unsupported(
        "transformers 5 removed it, and Kedge does not have it",
        **{"use_mps_device": False, "jit_mode_eval": False, "tpu_num_cores": None},
        **{"tpu_metrics_debug": False, "use_legacy_prediction_loop": False, "past_index": -1},
        **{"include_inputs_for_metrics": False, "mp_parameters": "", "ray_scope": "last"},
        **{"use_ipex": False, "sharded_ddp": "", "no_deprecation_warning": False},
    ),
    "include_tokens_per_second": NoEffect("tokens per second are always logged", False, (True,)),
}
