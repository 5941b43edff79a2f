"""Options of asynchronous PPO, named as in open-instruct's ``ppo_vllm_thread_ray_gtrl.py``."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kedge.config.declare import check_fields, option
from kedge.config.option_status import FIELD_SUPPORT
from kedge.config.options import Honored, Moved, Refused, Support, apply_support
from kedge.config.ppo import PPOConfig
from kedge.config.rollout import engine_args
from kedge.config.rollout_engines import find_engine
from kedge.errors import ConfigError
from kedge.suggestions import named

logger = logging.getLogger(__name__)

_SCRIPT = "kedge async-ppo"
_PLACEMENT = "kedge async-ppo: placement of processes"

_CACHE = Refused(
    "prompts are tokenized at startup and not cached", "leave it at its default, or unset"
)
_DERIVED = Refused("it is derived from the other sizes", "leave it unset")
_UNUSED = Refused("open-instruct does not read it either", "leave it out")
_LLM_JUDGE = Refused(
    "LLM judges are not available during training",
    "score with reward_funcs, or run kedge judge after training",
)
_CODE_SERVER = Refused(
    "code runs in Kedge's sandbox, without a server",
    "leave it out; set limits with kedge.verifiers.code_verifier",
)


ASYNC_SUPPORT: dict[str, Support] = {
    **FIELD_SUPPORT,
    # Other names of options of PPOConfig.
    "num_epochs": Moved("num_ppo_epochs"),
    "beta": Moved("kl_coef"),
    "eps": Moved("adam_epsilon"),
    "number_samples_per_prompt": Moved("num_generations"),
    "max_prompt_token_length": Moved("max_prompt_length"),
    "min_response_length": Moved("min_new_tokens"),
    "warm_up_steps": Moved("warmup_steps"),
    "hf_repo_revision": Moved("hub_revision"),
    # Converted to one or more options of PPOConfig.
    **dict.fromkeys(
        (
            *("local_rollout_batch_size", "async_mode", "num_evals", "save_freq", "with_tracking"),
            *("vllm_enforce_eager", "vllm_gpu_memory_utilization", "enable_prefix_caching"),
            *("max_token_length", "hf_repo_id", "hf_entity"),
        ),
        Honored("kedge.config.async_ppo: converted to options of PPOConfig"),
    ),
    "wandb_project_name": Honored(f"{_SCRIPT}: WANDB_PROJECT"),
    "wandb_entity": Honored(f"{_SCRIPT}: WANDB_ENTITY"),
    # Read by the command line.
    **dict.fromkeys(
        (
            *("dataset_mixer_list_splits", "dataset_mixer_eval_list"),
            *("dataset_mixer_eval_list_splits", "cache_dataset_only", "remap_verifier"),
            *("chat_template_name", "add_bos", "tokenizer_name_or_path", "init_value_from_scratch"),
            *("sft_messages_key", "ground_truths_key", "dataset_source_key"),
        ),
        Honored(_SCRIPT),
    ),
    **dict.fromkeys(
        ("actor_num_gpus_per_node", "single_gpu_mode", "deepspeed_stage"), Honored(_PLACEMENT)
    ),
    "gather_whole_model": Refused(
        "full weights are always gathered for the rollout engines", "leave it at its default"
    ),
    "vllm_sync_backend": Honored(f"{_PLACEMENT}; becomes vllm_transfer"),
    # Refused.
    "dataset_transform_fn": Refused(
        "prompts are always tokenized and filtered by length", "transform the dataset beforehand"
    ),
    **dict.fromkeys(
        (
            *("dataset_cache_mode", "dataset_local_cache_dir", "dataset_config_hash"),
            *("dataset_config_eval_hash",),
        ),
        _CACHE,
    ),
    "dataset_skip_cache": Honored("always: nothing is cached"),
    "local_eval_freq": Refused("num_evals sets the interval", "set num_evals"),
    **dict.fromkeys(
        (
            *("rollout_batch_size", "local_total_prompts", "num_training_steps"),
            *("local_dataloader_batch_size", "hf_repo_url"),
        ),
        _DERIVED,
    ),
    "checkpoint_output_dir": _UNUSED,
    "save_value_model": Honored("always: the value model is saved in value_model/"),
    **dict.fromkeys(
        (
            *("llm_judge_model", "llm_judge_max_tokens", "llm_judge_max_context_length"),
            *("llm_judge_temperature", "llm_judge_timeout"),
        ),
        _LLM_JUDGE,
    ),
    **dict.fromkeys(
        (
            *("code_api_url", "code_max_execution_time", "code_pass_rate_reward_threshold"),
            *("code_apply_perf_penalty",),
        ),
        _CODE_SERVER,
    ),
    **dict.fromkeys(
        (
            *("try_launch_beaker_eval_jobs", "try_launch_beaker_eval_jobs_on_weka"),
            *("try_auto_save_to_beaker", "gs_bucket_path", "oe_eval_tasks", "oe_eval_max_length"),
            "eval_priority",
        ),
        Honored(f"{_SCRIPT}: specific to Ai2's cluster; ignored with a note"),
    ),
}


def _refused(default: Any) -> Any:
    return option(default, "Not supported.")


def _ignored(default: Any) -> Any:
    return option(default, "Specific to Ai2's cluster: ignored, with a note.")


@named("option")
@dataclass(repr=False)
class AsyncPPOConfig(PPOConfig):
    """Options of ``kedge.AsyncPPOTrainer``: rollout engines sample while the learners train.

    Has the names and defaults of open-instruct's asynchronous PPO in addition to those of
    ``PPOConfig``.  Two names of one option are refused if their values differ.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    SUPPORT: ClassVar[Mapping[str, Support]] = ASYNC_SUPPORT

    exp_name: str = option("async_ppo", "Name of the experiment.")
    output_dir: str | None = option("output", "Output folder of the run.")
    seed: int = option(1, "Seed of every random number generator.")

    # Options of PPOConfig with other defaults.
    learning_rate: float = option(2e-5, "Learning rate of the policy.")
    adam_epsilon: float = option(1e-5, "Epsilon of Adam.")
    total_episodes: int | None = option(100_000, "Responses to generate over the whole run.")
    per_device_train_batch_size: int = option(1, "Responses per rank in one forward pass.")
    per_device_eval_batch_size: int = option(1, "Evaluation prompts per rank at a time.")
    gradient_checkpointing: bool | None = option(
        False, "Recompute activations in the backward pass: less memory, about a third slower."
    )
    logging_steps: float = option(1, "Iterations between log rows; below 1, a fraction of the run.")
    num_sample_generations: int = option(
        0, "Tables of sample completions over the run; evaluations write their own."
    )
    max_prompt_length: int | None = option(
        256, "Longest prompt, in tokens; longer ones are dropped."
    )
    max_lag: int = option(
        1, "Iterations that sampling may run ahead of training; 0 is synchronous."
    )
    rollout_engine: str = option("ray", "Rollout engine; see PPOConfig.")
    stop_token: Literal["eos", "period"] | None = option(  # type: ignore[assignment]
        "eos",
        "eos: end responses at the tokenizer's EOS token and every eos_token_id of the model's "
        "generation_config; period: at a period; None (none on the command line): at neither.",
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full", "kl1", "kl2", "kl3"] = option(  # type: ignore[assignment]
        "k1", "Estimator of the KL per token; kl1 is the same as k1, and so on."
    )

    # Sizes.
    local_rollout_batch_size: int = option(64, "Prompts per rank in one iteration.", ge=1)
    local_mini_batch_size: int | None = option(
        64, "Responses per rank in one optimizer step; capped at those of an iteration."
    )
    num_epochs: int | None = option(None, "Another name of num_ppo_epochs.")
    number_samples_per_prompt: int | None = option(None, "Another name of num_generations.")
    max_token_length: int = option(512, "Upper bound of max_prompt_length, in tokens.", ge=1)
    max_prompt_token_length: int | None = option(None, "Another name of max_prompt_length.")
    min_response_length: int | None = option(None, "Another name of min_new_tokens.")
    beta: float | None = option(None, "Another name of kl_coef.")
    eps: float | None = option(None, "Another name of adam_epsilon.")
    warm_up_steps: int | None = option(None, "Another name of warmup_steps, in iterations.")
    async_mode: bool = option(True, "False is max_lag=0: sample and train alternately.")
    num_evals: int = option(4, "Evaluations over the run, given evaluation prompts.", ge=1)
    save_freq: int = option(200, "Iterations between checkpoints; -1 for none.", ge=-1)

    # Data, read by the command line.
    dataset_mixer_list_splits: list[str] | None = option(
        None, "Split of each dataset of dataset_mixer_list, or one for all. Unset: train."
    )
    dataset_mixer_eval_list: list[str] | None = option(
        None, "Evaluation prompts: dataset names and amounts, alternating."
    )
    dataset_mixer_eval_list_splits: list[str] | None = option(
        None, "Split of each evaluation dataset. Unset: test."
    )
    cache_dataset_only: bool = option(False, "Read and tokenize the prompts, then exit.")
    sft_messages_key: str = option("messages", "Column with chats; the last answer is removed.")
    ground_truths_key: str = option("ground_truth", "Column with the answers that verifiers check.")
    dataset_source_key: str = option("dataset", "Column with the name of the verifier.")
    remap_verifier: str | None = option(None, "old=new: send rows of verifier old to verifier new.")
    chat_template_name: str | None = option(
        None, "tulu, or a file with a Jinja template. Unset: the tokenizer's."
    )
    add_bos: bool = option(False, "Start the chat template with the tokenizer's BOS token.")
    tokenizer_name_or_path: str | None = option(None, "Tokenizer. Unset: the model's.")
    init_value_from_scratch: bool = option(
        False, "Initialize the value model randomly with the reward model's architecture."
    )
    dataset_transform_fn: list[str] | None = _refused(None)
    dataset_cache_mode: str = _refused("local")
    dataset_local_cache_dir: str = _refused("local_dataset_cache")
    dataset_config_hash: str | None = _refused(None)
    dataset_config_eval_hash: str | None = _refused(None)
    dataset_skip_cache: bool = option(False, "Always true: nothing is cached.")
    local_eval_freq: int | None = _refused(None)
    rollout_batch_size: int | None = _refused(None)
    local_total_prompts: int | None = _refused(None)
    num_training_steps: int | None = _refused(None)
    local_dataloader_batch_size: int | None = _refused(None)

    # Placement.
    actor_num_gpus_per_node: list[int] | None = option(
        None, "Learners on each machine, one per GPU (without GPUs: per core). Unset: 1.", ge=1
    )
    single_gpu_mode: bool = option(False, "Learner and rollout engine share one GPU.")
    deepspeed_stage: int = option(
        0,
        "Sharding over ranks: 1 and 2 gradients and optimizer state, 3 also weights (FSDP2).",
        ge=0,
        le=3,
    )
    gather_whole_model: bool = option(True, "Always true.")
    vllm_enforce_eager: bool = option(False, "enforce_eager of vllm_engine_args.")
    vllm_gpu_memory_utilization: float | None = option(
        None,
        "gpu_memory_utilization of vllm_engine_args. Unset: 0.9, 0.3 in single_gpu_mode.",
        gt=0,
        le=1,
    )
    enable_prefix_caching: bool = option(False, "enable_prefix_caching of vllm_engine_args.")
    vllm_sync_backend: Literal["nccl", "gloo"] = option(
        "nccl", "nccl is vllm_transfer=auto: from GPU to GPU if possible; gloo is host."
    )

    # Tracking.
    with_tracking: bool = option(False, "report_to=wandb.")
    wandb_project_name: str = option("kedge", "Weights & Biases project.")
    wandb_entity: str | None = option(None, "Weights & Biases entity.")
    hf_entity: str | None = option(None, "Owner of the repository on the Hub.")
    hf_repo_id: str | None = option(None, "Name of the repository; with hf_entity, hub_model_id.")
    hf_repo_revision: str | None = option(None, "Another name of hub_revision.")
    hf_repo_url: str | None = _refused(None)
    checkpoint_output_dir: str | None = _refused(None)
    save_value_model: bool = option(False, "Always true.")

    # LLM judges and code servers.
    llm_judge_model: str = _refused("azure/gpt-4o-mini-standard")
    llm_judge_max_tokens: int = _refused(2048)
    llm_judge_max_context_length: int = _refused(8192)
    llm_judge_temperature: float = _refused(1.0)
    llm_judge_timeout: int = _refused(60)
    code_api_url: str | None = _refused(None)
    code_max_execution_time: float = _refused(1.0)
    code_pass_rate_reward_threshold: float = _refused(0.0)
    code_apply_perf_penalty: bool = _refused(False)

    try_launch_beaker_eval_jobs: bool = _ignored(True)
    try_launch_beaker_eval_jobs_on_weka: bool = _ignored(False)
    try_auto_save_to_beaker: bool = _ignored(True)
    gs_bucket_path: str | None = _ignored(None)
    oe_eval_tasks: list[str] | None = _ignored(None)
    oe_eval_max_length: int = _ignored(4096)
    eval_priority: str = _ignored("normal")

    def __post_init__(self) -> None:
        check_fields(self)
        settle(self)
        super().__post_init__()


def settle(c: AsyncPPOConfig) -> None:
    """Convert options that are more than another name to those of ``PPOConfig``, in place.

    Raises:
        ConfigError: sizes that do not divide, or two options that contradict each other.
    """
    apply_support(c, c.SUPPORT)
    _convert_sizes(c)
    if c.kl_estimator.startswith("kl"):
        c.kl_estimator = c.kl_estimator.replace("kl", "k")  # type: ignore[assignment]
    if c.stop_token == "period":
        c.stop_token, c.stop_strings = None, [*(c.stop_strings or []), "."]
    if not c.async_mode:
        _assign(c, "async_mode", "max_lag", 0, unset=1)
    if c.max_prompt_length is None or c.max_prompt_length > c.max_token_length:
        c.max_prompt_length = c.max_token_length
    _convert_schedule(c)
    _convert_engine_args(c)
    if c.with_tracking:
        _assign(c, "with_tracking", "report_to", "wandb", unset=None)
    if c.hf_repo_id is not None:
        repo = c.hf_repo_id if c.hf_entity is None else f"{c.hf_entity}/{c.hf_repo_id}"
        _assign(c, "hf_repo_id", "hub_model_id", repo, unset=None)


def _assign(c: AsyncPPOConfig, name: str, target: str, value: Any, *, unset: Any) -> None:
    """Set option ``target``; raise if it is already set to another value."""
    if getattr(c, target) not in (unset, value):
        raise ConfigError(
            f"{name}={getattr(c, name)!r} means {target}={value!r}, but"
            f" {target}={getattr(c, target)!r} is set; set only one of them"
        )
    setattr(c, target, value)


def _convert_sizes(c: AsyncPPOConfig) -> None:
    rows, micro = c.local_rollout_batch_size * c.num_generations, c.per_device_train_batch_size
    mini = min(c.local_mini_batch_size or rows, rows)
    if rows % mini:
        raise ConfigError(
            f"local_mini_batch_size={mini} must divide the {rows} responses of"
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


def _convert_schedule(c: AsyncPPOConfig) -> None:
    if c.save_freq == -1:
        c.save_strategy = "no"
    elif c.save_freq == 0:
        raise ConfigError(f"save_freq={c.save_freq} must be at least 1, or -1 for no checkpoints")
    else:
        _assign(c, "save_freq", "save_steps", c.save_freq, unset=500)
    if c.dataset_mixer_eval_list and str(c.eval_strategy) in ("no", "IntervalStrategy.NO"):
        c.eval_strategy = "steps"
        c.eval_steps = min(1 / c.num_evals, 1 - 1e-9)  # a fraction of the run


def _convert_engine_args(c: AsyncPPOConfig) -> None:
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
