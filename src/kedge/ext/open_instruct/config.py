"""Options of asynchronous PPO, named as in open-instruct's ``ppo_vllm_thread_ray_gtrl.py``."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Interval

from kedge.config import ppo
from kedge.config.declare import (
    Count,
    Natural,
    NoEffect,
    Seconds,
    Unsupported,
    format_value,
    option,
)
from kedge.config.dialect import Alias, Dialect
from kedge.config.rollout_engines import engine_args, find_engine
from kedge.records.errors import ConfigError

logger = logging.getLogger(__name__)


def _unsupported(reason: str, way_out: str = "leave it at its default", /, **defaults: Any) -> Any:
    return {n: Unsupported(reason, default, way_out=way_out) for n, default in defaults.items()}


def _no_effect(reason: str, **defaults: Any) -> Any:
    return {name: NoEffect(reason, default) for name, default in defaults.items()}


def _read_count(text: Any) -> int:
    """An integer, which may end in k or m: thousands or millions."""
    number = re.fullmatch(r"([0-9]+)([km]?)", text.lower()) if isinstance(text, str) else None
    if number is None:
        raise ConfigError(
            f"episodes={format_value(text)} must be an integer such as '100000' or '100k'"
        )
    return int(number[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[number[2]]


# Other names in open-instruct.
_CODE = "code runs in Kedge's sandbox, without a server"
_CODE_URL = os.environ.get("CODE_API_URL", "http://localhost:1234") + "/test_program"
OPEN_INSTRUCT: dict[str, Any] = {
    "episodes": Alias("total_episodes", _read_count, default=""),
    "num_epochs": Alias("num_ppo_epochs"),
    "non_stop_penalty": Alias("non_eos_penalty", default=False),
    "stop_token_id": Alias(
        "stop_token_ids", lambda x: [int(x) if isinstance(x, str) and x.isdigit() else x]
    ),
    "beta": Alias("kl_coef"),
    "eps": Alias("adam_epsilon"),
    "number_samples_per_prompt": Alias("num_generations"),
    "max_prompt_token_length": Alias("max_prompt_length"),
    "min_response_length": Alias("min_new_tokens"),
    "hf_repo_revision": Alias("hub_revision"),
    "tokenizer_name": Alias("tokenizer_name_or_path"),
    **_unsupported("transformers 5 only has fast tokenizers", use_fast=True),
    "get_tokenizer_fn": Unsupported(
        "the tokenizer is loaded as it was saved, and padding needs no extra token",
        way_out="save a tokenizer with the changes that you need, and set tokenizer_name_or_path",
        default="get_tokenizer_tulu_v2_2",
        also=("get_tokenizer_tulu_v2_1", "get_tokenizer_tulu_v1", "get_tokenizer_simple_v1"),
    ),
    **_unsupported(
        "prompts are always tokenized and filtered by length",
        "transform the dataset beforehand",
        dataset_transform_fn=["rlvr_tokenize_v1", "rlvr_filter_v1"],
    ),
    **_unsupported("num_evals sets the interval", "set num_evals", local_eval_freq=None),
    **_unsupported(
        "it is derived from the other sizes",
        "leave it unset",
        **{"rollout_batch_size": None, "local_total_prompts": None, "num_training_steps": None},
        **{"local_dataloader_batch_size": None, "hf_repo_url": None, "tokenizer_files_hash": None},
    ),
    **_unsupported(_CODE, code_pass_rate_reward_threshold=0.0, code_apply_perf_penalty=False),
    **_no_effect(_CODE, code_api_url=_CODE_URL, code_max_execution_time=1.0),
    **_no_effect(
        "prompts are tokenized at startup and not cached",
        **{"dataset_cache_mode": "local", "dataset_local_cache_dir": "local_dataset_cache"},
        **{"dataset_config_hash": None, "dataset_config_eval_hash": None},
        dataset_skip_cache=False,
    ),
    **_no_effect(
        "LLM judges are not available during training",
        **{"llm_judge_model": "azure/gpt-4o-mini-standard", "llm_judge_max_tokens": 2048},
        **{"llm_judge_max_context_length": 8192, "llm_judge_temperature": 1.0},
        llm_judge_timeout=60,
    ),
    **_no_effect(
        "open-instruct does not read it either",
        use_slow_tokenizer=False,
        checkpoint_output_dir=None,
    ),
    **_no_effect("weights are gathered tensor by tensor", gather_whole_model=True),
    **_no_effect("the value model is always saved in value_model/", save_value_model=False),
    **_no_effect(
        "it is specific to Ai2's cluster",
        **{"try_launch_beaker_eval_jobs": True, "try_launch_beaker_eval_jobs_on_weka": False},
        **{"try_auto_save_to_beaker": True, "gs_bucket_path": None, "oe_eval_tasks": None},
        **{"oe_eval_max_length": 4096, "eval_priority": "normal"},
    ),
}


@dataclass(repr=False)
class AsyncPPOConfig(Dialect, ppo.PPOConfig):
    """Options of ``kedge.AsyncPPOTrainer``: rollout engines sample while the learners train.

    Has the names and defaults of open-instruct's asynchronous PPO in addition to those of
    ``PPOConfig``, with a learning rate for models of billions of weights (docs/recipes.md).  Two
    names of one option are refused if their values differ.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    NAMES: ClassVar[Mapping[str, Any]] = OPEN_INSTRUCT
    CONVERTED: ClassVar[Sequence[str]] = (
        *("local_rollout_batch_size", "max_token_length", "num_evals", "save_freq"),
        *("vllm_enforce_eager", "vllm_gpu_memory_utilization", "enable_prefix_caching"),
        *("vllm_sync_backend", "with_tracking", "hf_entity", "hf_repo_id", "warm_up_steps"),
    )
    SECTION: ClassVar[str] = "asynchronous PPO"

    exp_name: str = option("async_ppo", "Name of the experiment, which run_name uses by default.")
    output_dir: str | None = option("output", "Folder to which the run writes.")
    seed: int = option(1, "Seed for all random numbers.")

    # Options of PPOConfig that have other defaults here.
    learning_rate: float = option(1e-6, "Learning rate of the policy.")
    total_episodes: int | None = option(100_000, "Number of responses to generate.")
    per_device_train_batch_size: int = option(1, "Number of responses per forward pass.")
    per_device_eval_batch_size: int = option(1, "Number of prompts to evaluate at a time.")
    gradient_checkpointing: bool | None = option(
        False, "Recompute activations in the backward pass: less memory, about a third more time."
    )
    logging_steps: float = option(1, "Iterations per row of metrics; below 1, a share of the run.")
    num_sample_generations: int = option(
        0, "Number of tables of sample completions. Evaluations write their own."
    )
    max_prompt_length: int | None = option(
        256, "Maximum number of tokens in a prompt. Longer prompts are dropped."
    )
    rollout_engine: str = option("ray", "What samples: ray, or a rollout engine of PPOConfig.")
    stop_token: Literal["eos", "period"] | None = option(  # type: ignore[assignment]
        "eos",
        "With eos, responses end at the tokenizer's EOS token and every eos_token_id of the "
        "model's generation_config; with period, at a period; with None (none in a command), at "
        "neither.",
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full", "kl1", "kl2", "kl3"] = option(  # type: ignore[assignment]
        "k1", "How the KL of a token is estimated; see PPOConfig. kl1 is another name of k1."
    )

    warm_up_steps: Natural = option(
        0, "Number of optimizer steps over which the learning rate rises, rounded up to iterations."
    )
    vllm_num_engines: Natural = option(
        1, "Number of rollout engines on Ray. With 0, the learner's process samples."
    )

    # Sizes.
    local_rollout_batch_size: Count = option(64, "Number of prompts per iteration on each rank.")
    local_mini_batch_size: int | None = option(
        64, "Number of responses per optimizer step on each rank, at most all of them."
    )
    max_token_length: Count = option(512, "Upper limit of max_prompt_length, in tokens.")
    async_mode: bool = option(True, "Sample while training; False means max_lag=0.")
    num_evals: Count = option(4, "Number of evaluations, if there are evaluation prompts.")
    save_freq: Annotated[int, Ge(-1)] = option(
        200, "Number of iterations between two checkpoints. -1 writes none."
    )

    # Data, read by the command line.
    dataset_mixer_list_splits: list[str] | None = option(
        None, "Split of each dataset in dataset_mixer_list, or one for all. If unset, train."
    )
    dataset_mixer_eval_list: list[str] | None = option(
        None, "Evaluation prompts: names and amounts of datasets in turn."
    )
    dataset_mixer_eval_list_splits: list[str] | None = option(
        None, "Split of each evaluation dataset. If unset, test."
    )
    cache_dataset_only: bool = option(False, "Read and tokenize the prompts, then exit.")
    sft_messages_key: str = option("messages", "Column with chats; last answers are cut off.")
    ground_truths_key: str = option("ground_truth", "Column with the right answers.")
    dataset_source_key: str = option("dataset", "Column that names the verifier.")
    remap_verifier: str | None = option(None, "Score rows of one verifier with another: old=new.")
    chat_template_name: str | None = option(
        None,
        "Chat template: tulu, zephyr, simple_chat, simple_concat_with_space, "
        "simple_concat_with_new_line, or a Jinja file. If unset, the tokenizer's.",
    )
    add_bos: bool = option(False, "Begin the chat template with the tokenizer's BOS token.")
    tokenizer_name_or_path: str | None = option(
        None, "Where the tokenizer is, if not with the model."
    )
    tokenizer_revision: str | None = option(
        None, "Branch, tag or commit of the tokenizer on the hub. If unset, model_revision."
    )
    reward_model_revision: str | None = option(
        None, "Branch, tag or commit of reward_model_path on the hub."
    )
    init_value_from_scratch: bool = option(
        False, "Start the value model from random weights, with the reward model's architecture."
    )

    # Placement.
    actor_num_gpus_per_node: Annotated[list[int] | None, Ge(1)] = option(
        None, "Number of learners on each machine, one per GPU or core. If unset, 1."
    )
    single_gpu_mode: bool = option(False, "Let the learner and the rollout engine share one GPU.")
    max_failures: Natural = option(
        0, "Number of times that the run may restart from a checkpoint after it loses a learner."
    )
    worker_stop_timeout: Seconds = option(
        3600.0,
        "Time that learners on Ray may take to write a checkpoint and exit after the iteration in "
        "which a signal stops the run, in seconds.",
    )
    deepspeed_stage: Annotated[int, Interval(ge=0, le=3)] = option(
        0, "ZeRO stage: 1 and 2 shard gradients and optimizer state, 3 also weights."
    )
    vllm_enforce_eager: bool = option(False, "enforce_eager in vllm_engine_args.")
    vllm_gpu_memory_utilization: Annotated[float | None, Interval(gt=0, le=1)] = option(
        None, "vLLM's gpu_memory_utilization. If unset, 0.9, or 0.3 in single_gpu_mode."
    )
    enable_prefix_caching: bool = option(False, "enable_prefix_caching in vllm_engine_args.")
    vllm_sync_backend: Literal["nccl", "gloo"] = option(
        "nccl", "How weights are sent to vLLM: nccl between GPUs if possible, or gloo."
    )

    # Tracking.
    with_tracking: bool = option(False, "Report to Weights & Biases (report_to=wandb).")
    wandb_project_name: str = option("kedge", "Name of the project on Weights & Biases.")
    wandb_entity: str | None = option(None, "User or team that owns the project.")
    hf_entity: str | None = option(None, "Owner of the repository on the hub.")
    hf_repo_id: str | None = option(None, "Name of the repository on the hub.")

    def _fill_defaults(self) -> None:
        """Convert options that are not plain aliases to those of ``PPOConfig``."""
        _convert_sizes(self)
        if self.warm_up_steps:
            steps = self.num_ppo_epochs * self.num_mini_batches
            _assign(self, "warm_up_steps", "warmup_steps", -(-self.warm_up_steps // steps), unset=0)
        if self.vllm_num_engines == 0:
            _assign(self, "vllm_num_engines", "rollout_engine", "embedded", unset="ray")
            self.vllm_num_engines = 1
        if not self.async_mode:
            _assign(self, "async_mode", "max_lag", 0, unset=None)
        elif self.max_lag is None and not self.in_flight_weight_updates:
            self.max_lag = 1
        if self.max_prompt_length is None or self.max_prompt_length > self.max_token_length:
            self.max_prompt_length = self.max_token_length
        _convert_schedule(self)
        _convert_engine_args(self)
        if self.with_tracking and self.report_to != ["wandb"]:
            _assign(self, "with_tracking", "report_to", "wandb", unset=None)
        if self.hf_repo_id is not None:
            entity = "" if self.hf_entity is None else f"{self.hf_entity}/"
            repo = f"{entity}{self.hf_repo_id}"
            _assign(self, "hf_repo_id", "hub_model_id", repo, unset=None)
        self.kl_estimator = self.kl_estimator.replace("kl", "k")  # type: ignore[assignment]
        if self.stop_token == "period":
            self.stop_token, self.stop_strings = None, [*(self.stop_strings or []), "."]
        super()._fill_defaults()


def _assign(c: Any, name: str, target: str, value: Any, *, unset: Any) -> None:
    """Set option ``target``; raise if it is already set to another value."""
    if getattr(c, target) not in (unset, value):
        raise ConfigError(
            f"{name}={getattr(c, name)!r} means {target}={value!r}, but"
            f" {target}={getattr(c, target)!r} is set; set only one of them"
        )
    setattr(c, target, value)


def _convert_sizes(c: Any) -> None:
    rows, micro = c.local_rollout_batch_size * c.num_generations, c.per_device_train_batch_size
    mini = min(c.local_mini_batch_size or rows, rows)
    unset = c.local_mini_batch_size in (None, AsyncPPOConfig.local_mini_batch_size)
    name, divisor = "local_mini_batch_size", mini
    if unset and c.num_mini_batches > 1:
        name, divisor = "num_mini_batches", c.num_mini_batches
        mini = rows // divisor
    if rows % divisor:
        raise ConfigError(
            f"{name}={divisor} must divide the {rows} responses of"
            f" local_rollout_batch_size={c.local_rollout_batch_size} x"
            f" num_generations={c.num_generations}"
        )
    if mini % micro:
        raise ConfigError(
            f"local_mini_batch_size={mini} must be a multiple of"
            f" per_device_train_batch_size={micro}"
        )
    _assign(c, "local_rollout_batch_size", "gradient_accumulation_steps", rows // micro, unset=1)
    _assign(c, "local_mini_batch_size", "num_mini_batches", rows // mini, unset=1)
    c.local_mini_batch_size = mini


def _convert_schedule(c: Any) -> None:
    if c.save_freq == -1:
        c.save_strategy = "no"
    elif c.save_freq == 0:
        raise ConfigError(f"save_freq={c.save_freq} must be at least 1, or -1 for no checkpoints")
    else:
        _assign(c, "save_freq", "save_steps", c.save_freq, unset=500)
    if c.dataset_mixer_eval_list and str(c.eval_strategy) in ("no", "IntervalStrategy.NO"):
        c.eval_strategy = "steps"
        c.eval_steps = min(1 / c.num_evals, 1 - 1e-9)  # as a fraction of the run


def _convert_engine_args(c: Any) -> None:
    reads = find_engine(c).reads
    if "vllm_transfer" in reads and c.vllm_sync_backend == "gloo":
        c.vllm_transfer = "host"
    options = {
        "enforce_eager": c.vllm_enforce_eager or None,
        "gpu_memory_utilization": c.vllm_gpu_memory_utilization,
        "enable_prefix_caching": c.enable_prefix_caching or None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if not options:
        return
    if "vllm_engine_args" not in reads:
        logger.warning("%s: no effect, since Kedge starts no vLLM in this run", ", ".join(options))
        return
    c.vllm_engine_args = options | engine_args(c.vllm_engine_args)
