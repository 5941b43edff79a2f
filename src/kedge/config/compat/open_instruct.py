"""Names of open-instruct's asynchronous PPO (``ppo_vllm_thread_ray_gtrl.py``)."""

from __future__ import annotations

import os

from kedge.config.declare import Alias, Foreign, Unsupported, no_effect, unsupported
from kedge.errors import ConfigError


def _read_count(text: str) -> int:
    """An integer, which may end in k or m: thousands or millions."""
    number, factor = text.lower(), 1
    for suffix, value in (("k", 1_000), ("m", 1_000_000)):
        if number.endswith(suffix):
            number, factor = number[:-1], value
    if not number.isdigit():
        raise ConfigError(f"episodes={text} must be an integer such as 100000 or 100k")
    return int(number) * factor


_CODE = "code runs in Kedge's sandbox, without a server"
_CODE_URL = os.environ.get("CODE_API_URL", "http://localhost:1234") + "/test_program"
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
    **unsupported("transformers 5 only has fast tokenizers", use_fast=True),
    "get_tokenizer_fn": Unsupported(
        "the tokenizer is loaded as it was saved, and padding needs no extra token",
        "save a tokenizer with the changes that you need, and set tokenizer_name_or_path",
        default="get_tokenizer_tulu_v2_2",
        also=("get_tokenizer_tulu_v2_1", "get_tokenizer_tulu_v1", "get_tokenizer_simple_v1"),
    ),
    **unsupported(
        "prompts are always tokenized and filtered by length",
        "transform the dataset beforehand",
        dataset_transform_fn=["rlvr_tokenize_v1", "rlvr_filter_v1"],
    ),
    **unsupported("num_evals sets the interval", "set num_evals", local_eval_freq=None),
    **unsupported(
        "it is derived from the other sizes",
        "leave it unset",
        **{"rollout_batch_size": None, "local_total_prompts": None, "num_training_steps": None},
        **{"local_dataloader_batch_size": None, "hf_repo_url": None, "tokenizer_files_hash": None},
    ),
    **unsupported(_CODE, code_pass_rate_reward_threshold=0.0, code_apply_perf_penalty=False),
    **no_effect(_CODE, code_api_url=_CODE_URL, code_max_execution_time=1.0),
    **no_effect(
        "prompts are tokenized at startup and not cached",
        **{"dataset_cache_mode": "local", "dataset_local_cache_dir": "local_dataset_cache"},
        **{"dataset_config_hash": None, "dataset_config_eval_hash": None},
        dataset_skip_cache=False,
    ),
    **no_effect(
        "LLM judges are not available during training",
        **{"llm_judge_model": "azure/gpt-4o-mini-standard", "llm_judge_max_tokens": 2048},
        **{"llm_judge_max_context_length": 8192, "llm_judge_temperature": 1.0},
        llm_judge_timeout=60,
    ),
    **no_effect(
        "open-instruct does not read it either",
        use_slow_tokenizer=False,
        checkpoint_output_dir=None,
    ),
    **no_effect("weights are gathered tensor by tensor", gather_whole_model=True),
    **no_effect("the value model is always saved in value_model/", save_value_model=False),
    **no_effect(
        "it is specific to Ai2's cluster",
        **{"try_launch_beaker_eval_jobs": True, "try_launch_beaker_eval_jobs_on_weka": False},
        **{"try_auto_save_to_beaker": True, "gs_bucket_path": None, "oe_eval_tasks": None},
        **{"oe_eval_max_length": 4096, "eval_priority": "normal"},
    ),
}
