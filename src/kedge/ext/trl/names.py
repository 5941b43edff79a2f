"""What other libraries call an option or an argument, for messages about unknown names."""

from __future__ import annotations

from dataclasses import fields

from kedge.config.dialect import Alias
from kedge.ext.trl.transformers4 import REMOVED

# Names of one option in Kedge and in current and older releases of other libraries.
ALIASES = (
    ("num_ppo_epochs", "ppo_epochs", "num_iterations", "noptepochs", "update_epochs"),
    ("num_generations", "rloo_k", "number_samples_per_prompt", "n_samples_per_prompt", "rollout.n"),
    ("num_train_epochs", "epochs"),
    ("learning_rate", "lr"),
    ("lora_r", "lora_rank"),
    ("total_episodes", "episodes", "steps", "num_episodes"),
    ("kl_coef", "init_kl_coef", "beta"),
    ("kl_estimator", "kl_penalty"),
    ("adaptive_kl", "adap_kl_ctrl"),
    ("kl_target", "target"),
    ("kl_horizon", "horizon"),
    ("cliprange", "epsilon", "eps_clip", "clip_range"),
    ("cliprange_high", "epsilon_high"),
    ("cliprange_value", "value_clip", "clip_range_vf"),
    ("lam", "lambd", "gae_lambda"),
    ("normalize_advantage", "normalize_advantages"),
    ("response_length", "max_completion_length", "max_new_tokens", "generate_max_len"),
    ("max_prompt_length", "max_prompt_token_length", "prompt_max_len"),
    ("min_new_tokens", "min_response_length"),
    ("stop_token_ids", "stop_token_id"),
    ("non_eos_penalty", "non_stop_penalty"),
    ("local_rollout_forward_batch_size", "forward_batch_size", "micro_rollout_batch_size"),
    ("report_to", "log_with"),
    ("project", "tracker_project_name"),
    ("torch_empty_cache_steps", "optimize_device_cache", "optimize_cuda_cache"),
    ("value_learning_rate", "critic_learning_rate", "critic_lr"),
    ("value_warmup_steps", "freezing_actor_steps"),
    ("vllm_structured_outputs_regex", "vllm_guided_decoding_regex"),
    ("processing_class", "tokenizer"),
    ("args", "config"),
    ("model", "model_name_or_path", "policy", "model_name", "model_path", "pretrain"),
    ("train_dataset", "dataset_name", "dataset", "prompt_data"),
    ("ref_model", "ref_policy"),
    ("reward_processing_class", "reward_processing_classes"),
    ("model_adapter_name", "adapter_name"),
    ("train_layers", "num_layers_unfrozen", "num_unfrozen_layers", "unfreeze_layers"),
)


# Options that earlier releases had.
GONE = {
    "log_completions_hub_repo": "tables of completions are files in completions/, for `hf upload`",
    "num_partial_batches": "engines that hold single prompts sample as completed, others in order",
    "use_adaptive_entropy": "entropy_coef is constant",
    "kl_cov": "it is a transform of your own, described in docs/own-algorithm.md",
    "clip_cov": "it is a transform of your own, described in docs/own-algorithm.md",
}


def advice(config: str, name: str) -> str:
    """Where a config takes a name that ``kedge.<config>`` does not know; "" if nowhere."""
    if not config:  # flags of a command
        return ""
    from kedge.ext.trl import options

    theirs = getattr(options, config, None)
    known = theirs is not None and name in {f.name for f in fields(theirs)}
    return "; kedge.trl takes TRL's names" if known else ""


def suggest(config: str, name: str) -> tuple[tuple[str, ...], str]:
    """All names of the option that ``name`` is one of, and where a config takes it."""
    if name in GONE:
        return (), f"; it is gone: {GONE[name]}"
    removed = REMOVED.get(name)
    if isinstance(removed, Alias):
        return (removed.target,), ""
    if removed is not None:
        return (), f"; {removed.reason}"
    return next((group for group in ALIASES if name in group), ()), advice(config, name)
