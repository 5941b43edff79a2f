"""Which names of TRL's modules Kedge has, by generation of its API."""

from __future__ import annotations

from types import MappingProxyType

Names = dict[str, str]  # name -> "module:attribute"
Modules = dict[str, Names]  # module -> its names


def _from(module: str, *names: str) -> Names:
    return {name: f"{module}:{name}" for name in names}


_VALUE_HEADS = _from(
    "kedge.classic",
    *("AutoModelForCausalLMWithValueHead", "AutoModelForSeq2SeqLMWithValueHead"),
    "PreTrainedModelWrapper",
)
_MODELS = _VALUE_HEADS | _from(
    "kedge.classic",
    *("create_reference_model", "setup_chat_format", "SUPPORTED_ARCHITECTURES"),
)
_CORE = _from(
    "kedge.classic.core",
    *("WANDB_PADDING", "LengthSampler", "PPODecorators", "clip_by_value", "convert_to_scalar"),
    *("entropy_from_logits", "flatten_dict", "logprobs_from_logits", "masked_mean", "masked_var"),
    *("masked_whiten", "randn_tensor", "respond_to_batch", "set_seed", "stack_dicts"),
    *("stats_to_np", "top_k_top_p_filtering", "whiten"),
)
_STEP = _from("kedge.classic", "PPOConfig", "PPOTrainer")
_STEP_HELPERS = _from(
    "kedge.classic", "AdaptiveKLController", "FixedKLController", "RunningMoments"
)
_V2 = _from("kedge", "PPOv2Config", "PPOv2Trainer")
_RLOO = _from("kedge", "RLOOConfig", "RLOOTrainer")
_TRAINER = _from("kedge", "PPOConfig", "PPOTrainer")
_SCRIPTS = _from(
    "kedge",
    *("ModelConfig", "get_kbit_device_map", "get_peft_config", "get_quantization_config"),
)
_SCRIPTS_12 = _SCRIPTS | _from("kedge", "ScriptArguments", "TrlParser")
_BEST_OF_N = _from("kedge.classic", "BestOfNSampler")
_ENVIRONMENT = _from("kedge.classic", "TextEnvironment", "TextHistory")
_UTILS = {
    "SIMPLE_CHAT_TEMPLATE": "kedge.classic.models.extras:SIMPLE_CHAT_TEMPLATE",
    **_from("kedge", "get_kbit_device_map", "get_peft_config", "get_quantization_config"),
}
_MODEL_UTILS = {
    **_from("kedge.classic", "setup_chat_format", "unwrap_model_for_generation"),
    "SUPPORTED_ARCHITECTURES": "kedge.classic:SUPPORTED_ARCHITECTURES",
}

STEP_API: Modules = {
    "trl": {
        **_MODELS,
        **_STEP,
        **_V2,
        **_RLOO,
        **_SCRIPTS,
        **_BEST_OF_N,
        **_ENVIRONMENT,
        **_from("kedge.classic", "set_seed"),
        **_from("kedge", "TrlParser"),
    },
    "trl.core": _CORE,
    "trl.environment": _ENVIRONMENT,
    "trl.environment.base_environment": _ENVIRONMENT,
    "trl.extras": _BEST_OF_N,
    "trl.extras.best_of_n_sampler": _BEST_OF_N,
    "trl.models": _MODELS,
    "trl.models.modeling_base": _from(
        "kedge.classic", "PreTrainedModelWrapper", "create_reference_model"
    ),
    "trl.models.modeling_value_head": {**_VALUE_HEADS, **_from("kedge.classic", "ValueHead")},
    "trl.models.utils": _MODEL_UTILS,
    "trl.trainer": {**_STEP, **_V2, **_RLOO, **_STEP_HELPERS, **_from("kedge", "ModelConfig")},
    "trl.trainer.model_config": _from("kedge", "ModelConfig"),
    "trl.trainer.ppo_config": _from("kedge.classic", "PPOConfig"),
    "trl.trainer.ppo_trainer": _STEP,
    "trl.trainer.ppov2_config": _from("kedge", "PPOv2Config"),
    "trl.trainer.ppov2_trainer": _V2,
    "trl.trainer.rloo_config": _from("kedge", "RLOOConfig"),
    "trl.trainer.rloo_trainer": _RLOO,
    "trl.trainer.utils": {**_UTILS, **_STEP_HELPERS},
}
TRAINER_API: Modules = {
    "trl": {**_TRAINER, **_RLOO, **_SCRIPTS_12, **_MODELS, **_BEST_OF_N},
    "trl.experimental": {},
    "trl.experimental.ppo": {**_TRAINER, **_VALUE_HEADS},
    "trl.experimental.ppo.modeling_value_head": STEP_API["trl.models.modeling_value_head"],
    "trl.experimental.ppo.ppo_config": _from("kedge", "PPOConfig"),
    "trl.experimental.ppo.ppo_trainer": _TRAINER,
    "trl.extras": _BEST_OF_N,
    "trl.extras.best_of_n_sampler": _BEST_OF_N,
    "trl.models": _MODELS,
    "trl.models.modeling_base": STEP_API["trl.models.modeling_base"],
    "trl.models.modeling_value_head": STEP_API["trl.models.modeling_value_head"],
    "trl.models.utils": _MODEL_UTILS,
    "trl.scripts": {},
    "trl.scripts.utils": _from("kedge", "ScriptArguments", "TrlParser"),
    "trl.trainer": {**_TRAINER, **_RLOO, **_from("kedge", "ModelConfig")},
    "trl.trainer.model_config": _from("kedge", "ModelConfig"),
    "trl.trainer.ppo_config": _from("kedge", "PPOConfig"),
    "trl.trainer.ppo_trainer": _TRAINER,
    "trl.trainer.rloo_config": _from("kedge", "RLOOConfig"),
    "trl.trainer.rloo_trainer": _RLOO,
    "trl.trainer.utils": _UTILS,
}
_SWIFT = _from("kedge.compat.hf_trainer", "PPOConfig", "PPOTrainer")
APIS = MappingProxyType(
    {
        "trl-0.11": STEP_API,
        "trl-1.12": TRAINER_API,
        "ms-swift": {
            module: names | {k: v for k, v in _SWIFT.items() if k in names}
            for module, names in TRAINER_API.items()
        },
    }
)
VERSIONS = MappingProxyType({"trl-0.11": "0.11.4", "trl-1.12": "1.12.0", "ms-swift": "1.12.0"})
