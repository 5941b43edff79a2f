"""Options of asynchronous PPO, in the names of open-instruct's ``ppo_vllm_thread_ray_gtrl.py``."""

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
from kedge.errors import ConfigError
from kedge.suggestions import named

logger = logging.getLogger(__name__)

_SCRIPT = "kedge async-ppo"
_PLACES = "kedge async-ppo: which process runs where"

_CACHE = Refused(
    "prompts are tokenized at the start and not cached", "leave it at its default, or unset"
)
_FILLED = Refused("it is worked out from the other sizes", "leave it unset")
_SETTLED = Refused("nothing read it there, and nothing does here", "leave it out")
_JUDGED = Refused(
    "no language model judges during training", "score with reward_funcs, or judge afterwards"
)
_PROGRAMS = Refused(
    "programs run in Kedge's own sandbox, without a server",
    "leave it out; limits are options of kedge.verifiers.code_verifier",
)


ASYNC_SUPPORT: dict[str, Support] = {
    **FIELD_SUPPORT,
    # Names of its own for what PPOConfig has.
    "num_epochs": Moved("num_ppo_epochs"),
    "beta": Moved("kl_coef"),
    "eps": Moved("adam_epsilon"),
    "number_samples_per_prompt": Moved("num_generations"),
    "max_prompt_token_length": Moved("max_prompt_length"),
    "min_response_length": Moved("min_new_tokens"),
    "warm_up_steps": Moved("warmup_steps"),
    "hf_repo_revision": Moved("hub_revision"),
    # What is turned into several options of PPOConfig.
    **dict.fromkeys(
        (
            *("local_rollout_batch_size", "async_mode", "num_evals", "save_freq", "with_tracking"),
            *("vllm_enforce_eager", "vllm_gpu_memory_utilization", "enable_prefix_caching"),
            *("max_token_length", "hf_repo_id", "hf_entity"),
        ),
        Honored("kedge.config.async_ppo: turned into options of PPOConfig"),
    ),
    "wandb_project_name": Honored(f"{_SCRIPT}: WANDB_PROJECT"),
    "wandb_entity": Honored(f"{_SCRIPT}: WANDB_ENTITY"),
    # Read by the command.
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
        ("actor_num_gpus_per_node", "single_gpu_mode", "deepspeed_stage"), Honored(_PLACES)
    ),
    "gather_whole_model": Refused(
        "weights are always gathered whole for the engines", "leave it at its default"
    ),
    "vllm_sync_backend": Honored(f"{_PLACES}; becomes vllm_transfer"),
    # Refused.
    "dataset_transform_fn": Refused(
        "prompts are tokenized and filtered by length in one way", "prepare the dataset beforehand"
    ),
    **dict.fromkeys(
        (
            *("dataset_cache_mode", "dataset_local_cache_dir", "dataset_config_hash"),
            *("dataset_config_eval_hash",),
        ),
        _CACHE,
    ),
    "dataset_skip_cache": Honored("always: nothing is cached"),
    "local_eval_freq": Refused("num_evals says how often", "leave it unset"),
    **dict.fromkeys(
        (
            *("rollout_batch_size", "local_total_prompts", "num_training_steps"),
            *("local_dataloader_batch_size", "hf_repo_url"),
        ),
        _FILLED,
    ),
    "checkpoint_output_dir": _SETTLED,
    "save_value_model": Honored("always: the value model is saved in value_model/"),
    **dict.fromkeys(
        (
            *("llm_judge_model", "llm_judge_max_tokens", "llm_judge_max_context_length"),
            *("llm_judge_temperature", "llm_judge_timeout"),
        ),
        _JUDGED,
    ),
    **dict.fromkeys(
        (
            *("code_api_url", "code_max_execution_time", "code_pass_rate_reward_threshold"),
            *("code_apply_perf_penalty",),
        ),
        _PROGRAMS,
    ),
    **dict.fromkeys(
        (
            *("try_launch_beaker_eval_jobs", "try_launch_beaker_eval_jobs_on_weka"),
            *("try_auto_save_to_beaker", "gs_bucket_path", "oe_eval_tasks", "oe_eval_max_length"),
            "eval_priority",
        ),
        Honored(f"{_SCRIPT}: said to be of Ai2's cluster alone, then ignored"),
    ),
}


def _unread(default: Any) -> Any:
    return option(default, "Not supported.")


def _ai2(default: Any) -> Any:
    return option(default, "Of Ai2's cluster: ignored, with a note.")


@named("option")
@dataclass(repr=False)
class AsyncPPOConfig(PPOConfig):
    """Options of ``kedge.AsyncPPOTrainer``: PPO whose engines sample while the learners train.

    The names and defaults of open-instruct's asynchronous PPO, beside those of ``PPOConfig``.  Two
    names of one thing are refused where their values differ.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    SUPPORT: ClassVar[Mapping[str, Support]] = ASYNC_SUPPORT

    exp_name: str = option("async_ppo", "Name of the experiment.")
    output_dir: str | None = option("output", "Folder of the run.")
    seed: int = option(1, "Names every random draw.")

    # Other defaults.
    learning_rate: float = option(2e-5, "Learning rate of the policy.")
    adam_epsilon: float = option(1e-5, "Epsilon of Adam.")
    total_episodes: int | None = option(100_000, "Responses to generate in the whole run.")
    per_device_train_batch_size: int = option(1, "Responses of a process in one forward pass.")
    per_device_eval_batch_size: int = option(1, "The same, in evaluations.")
    gradient_checkpointing: bool | None = option(
        False, "Recompute activations in the backward pass: less memory, about a third slower."
    )
    logging_steps: float = option(1, "Log every so many updates; below 1, a fraction of the run.")
    num_sample_generations: int = option(0, "Tables of sample completions; num_evals has its own.")
    max_prompt_length: int | None = option(256, "Longer prompts are left out.")
    max_lag: int = option(1, "Updates that sampling may be ahead of training; 0 is synchronous.")
    rollout_engine: str = option("ray", "What samples; see PPOConfig.")
    stop_token: Literal["eos", "period"] | None = option(  # type: ignore[assignment]
        "eos",
        "eos: end responses at the tokenizer's EOS token and at every eos_token_id of the model's "
        "generation_config; period: at a full stop; None (none on the command line): at neither.",
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full", "kl1", "kl2", "kl3"] = option(  # type: ignore[assignment]
        "k1", "Estimator of the KL per token; kl1 is another name of k1, and so on."
    )

    # Sizes.
    local_rollout_batch_size: int = option(64, "Prompts of a process in one update.", ge=1)
    local_mini_batch_size: int | None = option(
        64, "Responses of a process in one optimizer step; all of them where there are fewer."
    )
    num_epochs: int | None = option(None, "Another name of num_ppo_epochs.")
    number_samples_per_prompt: int | None = option(None, "Another name of num_generations.")
    max_token_length: int = option(512, "Longer prompts are left out, too.", ge=1)
    max_prompt_token_length: int | None = option(None, "Another name of max_prompt_length.")
    min_response_length: int | None = option(None, "Another name of min_new_tokens.")
    beta: float | None = option(None, "Another name of kl_coef.")
    eps: float | None = option(None, "Another name of adam_epsilon.")
    warm_up_steps: int | None = option(None, "Another name of warmup_steps, in updates.")
    async_mode: bool = option(True, "False is max_lag=0: sample and train in turn.")
    num_evals: int = option(4, "Evaluations over the run, if there are evaluation prompts.", ge=1)
    save_freq: int = option(200, "Updates between checkpoints; -1 for none.", ge=-1)

    # Data, read by the command.
    dataset_mixer_list_splits: list[str] | None = option(
        None, "Split of each dataset of dataset_mixer_list, or one for all. Unset: train."
    )
    dataset_mixer_eval_list: list[str] | None = option(
        None, "Evaluation prompts: names and amounts in turn."
    )
    dataset_mixer_eval_list_splits: list[str] | None = option(None, "Their splits. Unset: test.")
    cache_dataset_only: bool = option(False, "Read and tokenize the prompts, then stop.")
    sft_messages_key: str = option("messages", "Column with chats; their last answer is left out.")
    ground_truths_key: str = option("ground_truth", "Column that verifiers compare with.")
    dataset_source_key: str = option("dataset", "Column that names the verifier.")
    remap_verifier: str | None = option(None, "old=new: rows that name old are for verifier new.")
    chat_template_name: str | None = option(
        None, "tulu, or a file with a Jinja template. Unset: the tokenizer's own."
    )
    add_bos: bool = option(False, "Begin the template with the tokenizer's begin-of-text token.")
    tokenizer_name_or_path: str | None = option(None, "Tokenizer. Unset: the model's.")
    init_value_from_scratch: bool = option(
        False, "The value model has the reward model's shape and weights of its own."
    )
    dataset_transform_fn: list[str] | None = _unread(None)
    dataset_cache_mode: str = _unread("local")
    dataset_local_cache_dir: str = _unread("local_dataset_cache")
    dataset_config_hash: str | None = _unread(None)
    dataset_config_eval_hash: str | None = _unread(None)
    dataset_skip_cache: bool = option(False, "Always so: nothing is cached.")
    local_eval_freq: int | None = _unread(None)
    rollout_batch_size: int | None = _unread(None)
    local_total_prompts: int | None = _unread(None)
    num_training_steps: int | None = _unread(None)
    local_dataloader_batch_size: int | None = _unread(None)

    # Places.
    actor_num_gpus_per_node: list[int] | None = option(
        None, "Learners on each machine, one a GPU (without GPUs: one a core). Unset: 1.", ge=1
    )
    single_gpu_mode: bool = option(False, "Learner and engine share one GPU.")
    deepspeed_stage: int = option(
        0,
        "What learners cut over ranks: 1 and 2 gradients and optimizer, 3 weights too (FSDP2).",
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
        "nccl", "nccl is vllm_transfer=auto: from GPU to GPU where that can be; gloo is host."
    )

    # Tracking.
    with_tracking: bool = option(False, "report_to=wandb.")
    wandb_project_name: str = option("kedge", "Project in Weights & Biases.")
    wandb_entity: str | None = option(None, "Entity in Weights & Biases.")
    hf_entity: str | None = option(None, "Owner of the repository on the hub.")
    hf_repo_id: str | None = option(None, "Its name; with hf_entity, hub_model_id.")
    hf_repo_revision: str | None = option(None, "Another name of hub_revision.")
    hf_repo_url: str | None = _unread(None)
    checkpoint_output_dir: str | None = _unread(None)
    save_value_model: bool = option(False, "Always so.")

    # Judges and code servers.
    llm_judge_model: str = _unread("azure/gpt-4o-mini-standard")
    llm_judge_max_tokens: int = _unread(2048)
    llm_judge_max_context_length: int = _unread(8192)
    llm_judge_temperature: float = _unread(1.0)
    llm_judge_timeout: int = _unread(60)
    code_api_url: str | None = _unread(None)
    code_max_execution_time: float = _unread(1.0)
    code_pass_rate_reward_threshold: float = _unread(0.0)
    code_apply_perf_penalty: bool = _unread(False)

    try_launch_beaker_eval_jobs: bool = _ai2(True)
    try_launch_beaker_eval_jobs_on_weka: bool = _ai2(False)
    try_auto_save_to_beaker: bool = _ai2(True)
    gs_bucket_path: str | None = _ai2(None)
    oe_eval_tasks: list[str] | None = _ai2(None)
    oe_eval_max_length: int = _ai2(4096)
    eval_priority: str = _ai2("normal")

    def __post_init__(self) -> None:
        check_fields(self)
        settle(self)
        super().__post_init__()


def settle(c: AsyncPPOConfig) -> None:
    """Turn the options that are not just another name into those of ``PPOConfig``.

    Raises:
        ConfigError: sizes that do not divide, or two options that say different things.
    """
    apply_support(c, c.SUPPORT)
    _settle_sizes(c)
    if c.kl_estimator.startswith("kl"):
        c.kl_estimator = c.kl_estimator.replace("kl", "k")  # type: ignore[assignment]
    if c.stop_token == "period":
        c.stop_token, c.stop_strings = None, [*(c.stop_strings or []), "."]
    if not c.async_mode:
        _same(c, "async_mode", "max_lag", 0, unset=1)
    if c.max_prompt_length is None or c.max_prompt_length > c.max_token_length:
        c.max_prompt_length = c.max_token_length
    _settle_cadence(c)
    _settle_engine(c)
    if c.with_tracking:
        _same(c, "with_tracking", "report_to", "wandb", unset=None)
    if c.hf_repo_id is not None:
        whole = c.hf_repo_id if c.hf_entity is None else f"{c.hf_entity}/{c.hf_repo_id}"
        _same(c, "hf_repo_id", "hub_model_id", whole, unset=None)


def _same(c: AsyncPPOConfig, name: str, target: str, value: Any, *, unset: Any) -> None:
    """Set ``target``, unless it says something else already."""
    if getattr(c, target) not in (unset, value):
        raise ConfigError(
            f"{name}={getattr(c, name)!r} means {target}={value!r}, and"
            f" {target}={getattr(c, target)!r} is set; leave one of them out"
        )
    setattr(c, target, value)


def _settle_sizes(c: AsyncPPOConfig) -> None:
    rows, micro = c.local_rollout_batch_size * c.num_generations, c.per_device_train_batch_size
    mini = min(c.local_mini_batch_size or rows, rows)
    what = (
        f"local_rollout_batch_size={c.local_rollout_batch_size} with"
        f" num_generations={c.num_generations} is {rows} responses"
    )
    if rows % mini:
        raise ConfigError(f"{what}, and local_mini_batch_size={mini} does not divide them")
    if mini % micro:
        raise ConfigError(
            f"local_mini_batch_size={mini} is no multiple of per_device_train_batch_size={micro}"
        )
    _same(c, "local_rollout_batch_size", "gradient_accumulation_steps", rows // micro, unset=1)
    _same(c, "local_mini_batch_size", "num_mini_batches", rows // mini, unset=1)
    c.local_mini_batch_size = mini


def _settle_cadence(c: AsyncPPOConfig) -> None:
    if c.save_freq == -1:
        c.save_strategy = "no"
    elif c.save_freq == 0:
        raise ConfigError(f"save_freq={c.save_freq} must be at least 1, or -1 for no checkpoints")
    else:
        _same(c, "save_freq", "save_steps", c.save_freq, unset=500)
    if c.dataset_mixer_eval_list and str(c.eval_strategy) in ("no", "IntervalStrategy.NO"):
        c.eval_strategy = "steps"
        c.eval_steps = min(1 / c.num_evals, 1 - 1e-9)  # a share of the run


def _settle_engine(c: AsyncPPOConfig) -> None:
    on_ray = c.rollout_engine == "ray" and c.ray_engine == "vllm"
    if on_ray and c.vllm_sync_backend == "gloo":
        c.vllm_transfer = "host"
    asked = {
        "enforce_eager": c.vllm_enforce_eager or None,
        "gpu_memory_utilization": c.vllm_gpu_memory_utilization,
        "enable_prefix_caching": c.enable_prefix_caching or None,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    if not asked:
        return
    ours = c.rollout_engine in ("vllm", "vllm_server")
    if not ours and not on_ray:
        logger.warning("%s: not read, for no vLLM of Kedge's samples", ", ".join(asked))
        return
    c.vllm_engine_args = asked | dict(engine_args(c.vllm_engine_args))
