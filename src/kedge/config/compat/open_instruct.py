"""Names of open-instruct's asynchronous PPO (``ppo_vllm_thread_ray_gtrl.py``)."""

from __future__ import annotations

import os
from typing import Any

from kedge.config.declare import Alias, Foreign, NoEffect, Unsupported
from kedge.errors import ConfigError

_CACHE = ("prompts are tokenized at startup and not cached", "leave it at its default, or unset")
_DERIVED = Unsupported("it is derived from the other sizes", "leave it unset")
_CODE = (
    "code runs in Kedge's sandbox, without a server",
    "leave it out; set limits with kedge.verifiers.code_verifier",
)


def _llm_judge(default: Any) -> Unsupported:
    return Unsupported(
        "LLM judges are not available during training",
        "score with reward_funcs, or run kedge judge after training",
        default,
    )


def _read_count(text: str) -> int:
    """An integer, which may end in k or m: thousands or millions."""
    number, factor = text.lower(), 1
    for suffix, value in (("k", 1_000), ("m", 1_000_000)):
        if number.endswith(suffix):
            number, factor = number[:-1], value
    if not number.isdigit():
        raise ConfigError(f"episodes={text} must be an integer such as 100000 or 100k")
    return int(number) * factor


def _ai2(default: Any) -> NoEffect:
    return NoEffect("it is specific to Ai2's cluster", default)


OPEN_INSTRUCT: dict[str, Foreign] = {
    "episodes": Alias("total_episodes", _read_count, default=""),
    "num_epochs": Alias("num_ppo_epochs"),
    "beta": Alias("kl_coef"),
    "eps": Alias("adam_epsilon"),
    "number_samples_per_prompt": Alias("num_generations"),
    "max_prompt_token_length": Alias("max_prompt_length"),
    "min_response_length": Alias("min_new_tokens"),
    "hf_repo_revision": Alias("hub_revision"),
    "tokenizer_name": Alias("tokenizer_name_or_path"),
    "use_fast": Unsupported("transformers 5 only has fast tokenizers", "leave it True", True),
    "use_slow_tokenizer": NoEffect("open-instruct does not read it either", default=False),
    "get_tokenizer_fn": Unsupported(
        "the tokenizer is loaded as it was saved, and padding needs no extra token",
        "save a tokenizer with the changes that you need, and set tokenizer_name_or_path",
        default="get_tokenizer_tulu_v2_2",
        also=("get_tokenizer_tulu_v2_1", "get_tokenizer_tulu_v1", "get_tokenizer_simple_v1"),
    ),
    "tokenizer_files_hash": _DERIVED,
    "dataset_transform_fn": Unsupported(
        "prompts are always tokenized and filtered by length",
        "transform the dataset beforehand",
        default=["rlvr_tokenize_v1", "rlvr_filter_v1"],
    ),
    "dataset_cache_mode": Unsupported(*_CACHE, default="local"),
    "dataset_local_cache_dir": Unsupported(*_CACHE, default="local_dataset_cache"),
    "dataset_config_hash": Unsupported(*_CACHE),
    "dataset_config_eval_hash": Unsupported(*_CACHE),
    "dataset_skip_cache": NoEffect("prompts are never cached", default=False, also=(True,)),
    "local_eval_freq": Unsupported("num_evals sets the interval", "set num_evals"),
    "rollout_batch_size": _DERIVED,
    "local_total_prompts": _DERIVED,
    "num_training_steps": _DERIVED,
    "local_dataloader_batch_size": _DERIVED,
    "hf_repo_url": _DERIVED,
    "gather_whole_model": NoEffect(
        "weights are gathered tensor by tensor, on the rank that sends them", default=True
    ),
    "checkpoint_output_dir": Unsupported("open-instruct does not read it either", "leave it out"),
    "save_value_model": NoEffect(
        "the value model is always saved in value_model/", default=False, also=(True,)
    ),
    "llm_judge_model": _llm_judge("azure/gpt-4o-mini-standard"),
    "llm_judge_max_tokens": _llm_judge(2048),
    "llm_judge_max_context_length": _llm_judge(8192),
    "llm_judge_temperature": _llm_judge(1.0),
    "llm_judge_timeout": _llm_judge(60),
    "code_api_url": Unsupported(
        *_CODE, default=os.environ.get("CODE_API_URL", "http://localhost:1234") + "/test_program"
    ),
    "code_max_execution_time": Unsupported(*_CODE, default=1.0),
    "code_pass_rate_reward_threshold": Unsupported(*_CODE, default=0.0),
    "code_apply_perf_penalty": Unsupported(*_CODE, default=False),
    "try_launch_beaker_eval_jobs": _ai2(True),
    "try_launch_beaker_eval_jobs_on_weka": _ai2(False),
    "try_auto_save_to_beaker": _ai2(True),
    "gs_bucket_path": _ai2(None),
    "oe_eval_tasks": _ai2(None),
    "oe_eval_max_length": _ai2(4096),
    "eval_priority": _ai2("normal"),
}
