"""Which names of TRL's modules Kedge has, by generation of its API."""

from __future__ import annotations

from types import MappingProxyType

Names = dict[str, str]  # name -> "module:attribute"
Modules = dict[str, Names]  # module -> its names

_HELPERS = "get_kbit_device_map get_peft_config get_quantization_config"
_SOURCES = {  # our modules
    "kedge": f"{_HELPERS} ModelConfig PPOv2Config RLOOConfig ScriptArguments TrlParser",
    "kedge.classic": (
        "AdaptiveKLController AutoModelForCausalLMWithValueHead BestOfNSampler FixedKLController"
        " AutoModelForSeq2SeqLMWithValueHead PreTrainedModelWrapper RunningMoments TextEnvironment"
        " SUPPORTED_ARCHITECTURES TextHistory ValueHead create_reference_model set_seed"
        " setup_chat_format unwrap_model_for_generation"
    ),
    "kedge.classic.core": (
        "LengthSampler PPODecorators WANDB_PADDING clip_by_value convert_to_scalar flatten_dict"
        " entropy_from_logits logprobs_from_logits masked_mean masked_var masked_whiten"
        " randn_tensor respond_to_batch stack_dicts stats_to_np top_k_top_p_filtering whiten"
    ),
    "kedge.classic.models.extras": "SIMPLE_CHAT_TEMPLATE",
    "kedge.compat.trl_trainers": "GRPOConfig GRPOTrainer PPOv2Trainer RLOOTrainer",
    "kedge.compat.trl_utils": (
        "batch_generation disable_dropout_in_model exact_div first_true_indices forward generate"
        " get_reward prepare_deepspeed print_rich_table truncate_response"
    ),
}
_TARGETS = {n: f"{module}:{n}" for module, names in _SOURCES.items() for n in names.split()} | {
    "OnlineTrainerState": "kedge.trainers.run.hf_callbacks:RunState"
}
_STEP = {n: f"kedge.classic:{n}" for n in ("PPOConfig", "PPOTrainer")}
_TRAIN = {"PPOConfig": "kedge:PPOConfig", "PPOTrainer": "kedge.compat.trl_trainers:PPOTrainer"}
_SWIFT = {n: f"kedge.compat.hf_trainer:{n}" for n in ("PPOConfig", "PPOTrainer")}


def _modules(targets: Names, shared: str, tables: dict[str, str]) -> Modules:
    """The modules of an API; ``shared`` are names of both ``trl`` and ``trl.trainer``."""
    tables = _MODELS | tables
    for module in ("trl", "trl.trainer"):
        tables[module] += f" {shared} ModelConfig PPOConfig PPOTrainer RLOOConfig RLOOTrainer"
    return {
        module: {name: targets[name] for name in names.split()} for module, names in tables.items()
    }


_HEADS = (
    "AutoModelForCausalLMWithValueHead AutoModelForSeq2SeqLMWithValueHead PreTrainedModelWrapper"
)
_ALL_MODELS = f"{_HEADS} SUPPORTED_ARCHITECTURES create_reference_model setup_chat_format"
_UTILS = f"{_HELPERS} {_SOURCES['kedge.compat.trl_utils']} SIMPLE_CHAT_TEMPLATE OnlineTrainerState"
_STEP_HELPERS = "AdaptiveKLController FixedKLController RunningMoments"
_MODELS = {  # modules that are the same in both APIs
    "trl.extras": "BestOfNSampler",
    "trl.extras.best_of_n_sampler": "BestOfNSampler",
    "trl.models": _ALL_MODELS,
    "trl.models.modeling_base": "PreTrainedModelWrapper create_reference_model",
    "trl.models.modeling_value_head": f"{_HEADS} ValueHead",
    "trl.models.utils": "SUPPORTED_ARCHITECTURES setup_chat_format unwrap_model_for_generation",
    "trl.trainer.model_config": "ModelConfig",
    "trl.trainer.ppo_config": "PPOConfig",
    "trl.trainer.ppo_trainer": "PPOConfig PPOTrainer",
    "trl.trainer.rloo_config": "RLOOConfig",
    "trl.trainer.rloo_trainer": "RLOOConfig RLOOTrainer",
}
STEP_API = _modules(
    _TARGETS | _STEP,
    "PPOv2Config PPOv2Trainer",
    {
        "trl": f"{_ALL_MODELS} {_HELPERS} BestOfNSampler TextEnvironment TextHistory TrlParser"
        " set_seed",
        "trl.core": f"{_SOURCES['kedge.classic.core']} set_seed",
        "trl.environment": "TextEnvironment TextHistory",
        "trl.environment.base_environment": "TextEnvironment TextHistory",
        "trl.trainer": _STEP_HELPERS,
        "trl.trainer.ppov2_config": "PPOv2Config",
        "trl.trainer.ppov2_trainer": "PPOv2Config PPOv2Trainer",
        "trl.trainer.utils": f"{_UTILS} {_STEP_HELPERS}",
    },
)
TRAINER_API = _modules(
    _TARGETS | _TRAIN,
    "GRPOConfig GRPOTrainer",
    {
        "trl": f"{_ALL_MODELS} {_HELPERS} BestOfNSampler ScriptArguments TrlParser",
        "trl.experimental": "",
        "trl.experimental.ppo": f"{_HEADS} PPOConfig PPOTrainer",
        "trl.experimental.ppo.modeling_value_head": f"{_HEADS} ValueHead",
        "trl.experimental.ppo.ppo_config": "PPOConfig",
        "trl.experimental.ppo.ppo_trainer": "PPOConfig PPOTrainer",
        "trl.scripts": "",
        "trl.scripts.utils": "ScriptArguments TrlParser",
        "trl.trainer": "",
        "trl.trainer.grpo_config": "GRPOConfig",
        "trl.trainer.grpo_trainer": "GRPOConfig GRPOTrainer",
        "trl.trainer.utils": _UTILS,
    },
)
_SWIFTS_OWN = ("GRPOConfig", "GRPOTrainer")  # it derives from TRL's and overrides the loop
APIS = MappingProxyType(
    {
        "trl-0.11": STEP_API,
        "trl-1.12": TRAINER_API,
        "ms-swift": {
            module: {k: _SWIFT.get(k, x) for k, x in names.items() if k not in _SWIFTS_OWN}
            for module, names in TRAINER_API.items()
        },
    }
)
VERSIONS = MappingProxyType({"trl-0.11": "0.11.4", "trl-1.12": "1.12.0", "ms-swift": "1.12.0"})
