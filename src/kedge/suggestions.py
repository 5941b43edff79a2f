"""Did-you-mean suggestions for unknown options and arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from kedge.records.errors import OptionError

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
    ("non_eos_penalty", "non_stop_penalty"),
    ("local_rollout_forward_batch_size", "forward_batch_size", "micro_rollout_batch_size"),
    ("report_to", "log_with"),
    ("project", "tracker_project_name"),
    ("eval_strategy", "evaluation_strategy"),
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
# Arguments of the trainers, which might be taken for options of their config.
TRAINER_ARGUMENTS = {
    *("model", "ref_model", "value_model", "reward_model", "processing_class", "peft_config"),
    *("reward_funcs", "reward_processing_class", "reward_processing_classes", "optimizers"),
    *("train_dataset", "eval_dataset", "data_collator", "callbacks", "quantization_config"),
    *("algorithm", "rollout_func", "tools", "environment_factory"),
}

Class = TypeVar("Class", bound=type)


def hint(name: str, known: Collection[str], *, dashes: str = "") -> str:
    """A suggestion for an unknown name: its alias here, or the closest known name; may be empty."""
    for names in ALIASES:
        aliases = [alias for alias in names if alias in known]
        if name in names and aliases:
            return f"; it is called {dashes}{aliases[0]} here"
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; the nearest is {dashes}{close[0]}" if close else ""


def suggest_names(
    kind: str, *, config: type | None = None, also: Collection[str] = ()
) -> Callable[[Class], Class]:
    """Class decorator: unknown keywords raise an OptionError with a suggestion.

    The class calls its keywords ``kind``, "option" or "argument"; ``config`` holds the options that
    arguments may be mistaken for, and ``also`` are accepted in addition to the signature.
    """
    options = frozenset(inspect.signature(config).parameters) if config is not None else frozenset()

    def decorate(cls: Class) -> Class:
        init: Callable[..., None] = cls.__init__  # type: ignore[misc]
        parameters = inspect.signature(init).parameters.values()
        known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"} | {*also}

        @functools.wraps(init)
        def checked(self: Any, /, *args: Any, **kwargs: Any) -> None:
            for name in kwargs.keys() - known:
                in_config = "; it is an option of the config" if name in options else ""
                problem = in_config or hint(name, known)
                raise OptionError(f"{type(self).__name__} has no {kind} {name!r}{problem}")
            if kind == "option":
                self.given = frozenset(kwargs)  # options that the caller set, even to the default
            init(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate
