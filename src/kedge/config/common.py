"""Options of every config, in groups: each class is what one part of a run reads."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Interval

from kedge.config.declare import (
    MOST,
    Bound,
    Count,
    Natural,
    NonNegative,
    Positive,
    Seconds,
    option,
)
from kedge.config.rollout_engines import RolloutArguments

KLEstimator = Literal["k1", "k2", "k3", "abs", "full"]
SamplerCorrection = Literal["auto", "off", "truncate", "mask", "mask_old", "ratio"]
IN_FLIGHT_LAG = 2  # the smallest max_lag that keeps engines busy in flight (docs/async.md)


@dataclass
class BatchArguments:
    """Sizes of a batch, and how long to train."""

    SECTION: ClassVar[str] = "batch sizes and run length"

    num_ppo_epochs: Count = option(4, "Passes over each batch of responses.")
    num_mini_batches: Count = option(1, "Optimizer steps per pass over the batch.")
    total_episodes: Annotated[int | None, Interval(ge=1, le=MOST)] = option(
        None,
        "Responses to generate over the whole run. Unset: num_train_epochs or max_steps decide.",
    )
    num_generations: Count = option(1, "Responses per prompt.")
    max_tokens_per_micro_batch: Count | None = option(
        None,
        "Most tokens of one forward and backward pass, padding included: rows sorted by length are "
        "cut by tokens instead of per_device_train_batch_size rows, with the same gradient. A "
        "longer row is a pass by itself.",
    )
    local_rollout_forward_batch_size: Count = option(
        64, "Rows per rank at a time when sampling, scoring and computing log-probabilities."
    )
    world_size: Count | None = option(None, "Filled in: number of ranks.")
    num_total_batches: Count | None = option(None, "Filled in: iterations of the run.")
    micro_batch_size: Count | None = option(
        None, "Filled in: per_device_train_batch_size x world_size."
    )
    local_batch_size: Count | None = option(
        None, "Filled in: per_device_train_batch_size x gradient_accumulation_steps."
    )
    batch_size: Count | None = option(None, "Filled in: local_batch_size x world_size.")
    local_mini_batch_size: Count | None = option(
        None, "Filled in: local_batch_size / num_mini_batches."
    )
    mini_batch_size: Count | None = option(None, "Filled in: batch_size / num_mini_batches.")


@dataclass
class ModelArguments:
    """The models and how they are loaded."""

    SECTION: ClassVar[str] = "models"

    model_adapter_name: str | None = option(None, "PEFT adapter to train.")
    ref_adapter_name: str | None = option(
        None,
        "PEFT adapter used as the reference. Unset: the base model under a new adapter, a frozen "
        "copy of an adapter that the model has.",
    )
    allow_low_precision_weights: bool = option(
        False, "Allow training bf16 or fp16 weights, which round small weight changes away."
    )
    train_layers: Count | None = option(
        None,
        "Train only the top k transformer layers of policy and value model, with final norm and "
        "output layer (unless it is tied to the embedding). Unset: all layers.",
    )
    cache_trunk: bool = option(
        True,
        "Where the lower layers are frozen (train_layers, adapters on the top layers only), "
        "compute their output once per batch for all epochs and models that share them.",
    )
    model_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Extra arguments of from_pretrained for policy and reference given by name; JSON on the "
        "command line.",
    )
    trust_remote_code: bool = option(False, "Run the custom code of a model given by name.")


@dataclass
class SamplingArguments:
    """How responses are sampled, and where they end."""

    SECTION: ClassVar[str] = "sampling"

    response_length: Count = option(53, "Maximum length of a response, in tokens.")
    min_new_tokens: Natural = option(
        0, "Minimum tokens of a response: stop tokens are banned before."
    )
    temperature: Annotated[float, Interval(ge=1e-6, le=1000)] = option(
        0.7, "Sampling temperature; divides the logits in training too."
    )
    top_k: Natural = option(0, "Sample among the k most likely tokens; 0 is off.")
    top_p: Annotated[float, Interval(gt=0, le=1)] = option(
        1.0, "Sample among the most likely tokens with this total probability; 1 is off."
    )
    min_p: Annotated[float, Interval(ge=0, lt=1)] = option(
        0.0, "Exclude tokens less likely than this fraction of the top probability; 0 is off."
    )
    stop_token: Literal["eos"] | None = option(
        "eos",
        "End responses at the tokenizer's EOS token and every eos_token_id of the model's "
        "generation_config; None (none on the command line): at neither.",
    )
    stop_token_id: Natural | None = option(None, "Also end responses at this token id.")
    stop_token_ids: Annotated[list[int] | None, Ge(0)] = option(
        None, "Also end responses at any of these token ids; for only these set stop_token=None."
    )
    stop_strings: list[str] | None = option(None, "Also end responses after any of these strings.")


@dataclass
class PromptArguments:
    """How prompts are read."""

    SECTION: ClassVar[str] = "prompts"

    max_prompt_length: Count | None = option(None, "Maximum length of a prompt, in tokens.")
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "Extra arguments of the chat template; JSON on the command line."
    )
    overlong_prompts: Literal["drop", "truncate"] = option(
        "drop", "Drop prompts above max_prompt_length, or truncate them on the left."
    )
    shuffle_dataset: bool = option(True, "Reshuffle the prompts on every pass.")
    dataset_num_proc: Count | None = option(None, "Processes that tokenize the dataset.")


@dataclass
class RewardArguments:
    """How responses are scored."""

    SECTION: ClassVar[str] = "rewards"

    missing_eos_penalty: NonNegative | None = option(
        None, "Penalty subtracted from the score of a response without stop token."
    )
    non_eos_penalty: bool = option(
        False, "Replace the score of a response without stop token by penalty_reward_value."
    )
    penalty_reward_value: float = option(-1.0, "Score given by non_eos_penalty.")
    reward_adapter: str | None = option(
        None,
        "Folder or Hub name of a reward model that is an adapter on the policy's base model. Needs "
        "an adapter on the policy too; counts as the last reward model.",
    )
    reward_weights: list[float] | None = option(
        None, "Weight of each reward source. Unset: 1 each."
    )
    on_reward_error: Literal["raise", "score", "drop"] = option(
        "raise", "If a reward function fails: stop, use reward_error_score, or drop the row."
    )
    reward_error_score: float | None = option(None, "Score given by on_reward_error=score.")
    reward_timeout: Seconds | None = option(
        None,
        "Seconds that a call of a reward function may take. Rows that take longer are dropped, or "
        "scored with on_reward_error=score. Unset: no limit.",
    )


@dataclass
class KLArguments:
    """The KL penalty in the reward, and the entropy bonus, in the names of TRL."""

    SECTION: ClassVar[str] = "KL and entropy"

    kl_coef: NonNegative = option(0.05, "Weight of the KL penalty in the reward.")
    adaptive_kl: bool = option(False, "Adapt kl_coef so that the KL approaches kl_target.")
    kl_target: Positive = option(6.0, "Target KL of adaptive_kl, in nats per response.")
    kl_horizon: Positive = option(10000.0, "Horizon of adaptive_kl, in responses.")
    entropy_coef: NonNegative = option(0.0, "Weight of the entropy bonus in the loss, per token.")


@dataclass
class EstimatorArguments:
    """What every built-in algorithm reads."""

    SECTION: ClassVar[str] = "algorithm"

    kl_estimator: KLEstimator = option("k1", "Estimator of the KL per token; full is exact.")


@dataclass
class EnvironmentArguments:
    """They act if the policy plays in an environment."""

    SECTION: ClassVar[str] = "environments"

    environment: str | None = option(
        None, "Class or function that makes an environment: module:Class or file.py:Class."
    )
    environment_kwargs: dict[str, Any] | str | None = option(
        None, "Arguments of environment by name; JSON on the command line."
    )
    max_turns: Count | None = option(
        None, "Turns per episode. Unset: as many as response_length has room for."
    )
    max_turn_tokens: Count | None = option(
        None, "Tokens per turn. Unset: what is left of response_length."
    )
    max_observation_tokens: Count | None = option(
        None, "Tokens of an answer to a turn, with the template's; its middle is cut above."
    )
    drop_reasoning: bool = option(
        False,
        "Read earlier turns without their reasoning where the chat template renders them so; the "
        "next turn then begins a new context.",
    )
    max_episode_seconds: Seconds | None = option(
        None, "Seconds that an episode's environment may work, all turns."
    )
    max_tool_calling_iterations: Count | None = option(
        None, "Turns of an episode whose tool calls are made. Unset: no limit."
    )
    environment_timeout: Seconds = option(60.0, "Seconds that a call of an environment may take.")
    environment_concurrency: Count = option(256, "Calls of environments that run at the same time.")
    on_env_error: Literal["raise", "drop", "score"] = option(
        "raise",
        "What an exception or timeout of an environment does: stop, drop the episode, or score it.",
    )
    env_error_score: float = option(
        0.0, "Reward of the last turn of an episode whose environment failed, with score."
    )


@dataclass
class EngineArguments:
    """The loop: how far sampling runs ahead, and what corrects for it."""

    SECTION: ClassVar[str] = "engine"

    max_lag: Natural | None = option(
        None,
        "Iterations that sampling may run ahead of training; 0 is synchronous. Unset: 0, or 1 for "
        "AsyncPPOConfig; with in_flight_weight_updates 2.",
    )
    rollout_schedule: Literal["in_order", "as_completed"] = option(
        "in_order",
        "With max_lag: train on whole batches in order, or on responses as they complete, "
        "which is faster if lengths differ much, but depends on timing.",
    )
    in_flight_weight_updates: bool = option(
        False,
        "With as_completed: engines get new weights while they sample, and responses continue with "
        "them. Tokens may be older than max_lag; each has its own importance weight.",
    )
    sampler_correction: SamplerCorrection | None = option(
        "auto",
        "Importance weights of the learner against the rollout engine: truncate or mask large "
        "ones, or off. auto: truncate with vLLM, from max_lag=2, in flight, and if an option below "
        "is set; else off. mask_old: in flight, truncate, and leave out tokens older than max_lag. "
        "ratio: no weights; the loss takes its ratio to the rollout engine.",
    )
    sampler_correction_level: Literal["token", "sequence", "sequence_mean"] | None = option(
        None, "Weights per token, per response, or their geometric mean per response. Unset: token."
    )
    sampler_correction_high: Bound | None = option(
        None,
        "Weights above this are truncated or masked. Unset: 2 for token, 5 for sequence, 1.01 "
        "for sequence_mean.",
    )
    sampler_correction_low: NonNegative | None = option(
        None,
        "Weights below this are raised or masked. Unset: 1 / sampler_correction_high for mask, no "
        "bound for truncate.",
    )
    save_rollouts: str | None = option(None, "Folder to record the rollouts of each iteration in.")
    replay_rollouts: str | None = option(None, "Folder written by save_rollouts to train from.")
    preflight: bool = option(True, "Check models, rewards and masks on one batch before training.")


@dataclass
class LogArguments:
    """Evaluation, tables, logs and folders."""

    SECTION: ClassVar[str] = "evaluation and logs"

    overwrite_output_dir: bool = option(
        False,
        "Start over in an output_dir with checkpoints of another run and delete them. Without it "
        "such a folder is refused.",
    )
    logging_dir: str | None = option(None, "TensorBoard folder. Unset: a folder in output_dir.")
    exp_name: str = option("run", "Name of the experiment.")
    num_sample_generations: Natural = option(
        10, "Tables of sample completions shown over the run; 0 for none."
    )
    num_completions_to_print: Count | None = option(
        None, "Rows of each printed table of completions. Unset: 5."
    )
    log_unique_prompts: bool = option(
        False, "Show one response per prompt in tables of completions."
    )
    log_token_rows: Natural = option(
        4, "Responses logged token by token with each log row, for kedge report; 0 for none."
    )
    num_generations_eval: Count | None = option(
        None,
        "Completions of each evaluation prompt, sampled as in training. Unset: one, nearly greedy.",
    )
    eval_success_score: float | None = option(
        None, "Lowest score that solves a prompt; logs eval_accuracy and eval_pass@k."
    )
    eval_against_start: bool = option(
        False, "Evaluate before training; later evaluations log the win rate against it."
    )


@dataclass
class ScriptArguments:
    """Read by commands and scripts, not by trainers."""

    SECTION: ClassVar[str] = "command line and scripts"

    sft_model_path: str = option(
        "EleutherAI/pythia-160m", "Folder or Hub name of the policy and the reference, for scripts."
    )
    reward_model_path: str = option(
        "EleutherAI/pythia-160m", "Folder or Hub name of the reward model, for scripts."
    )


@dataclass
class CommonArguments(
    BatchArguments,
    ModelArguments,
    SamplingArguments,
    PromptArguments,
    RewardArguments,
    KLArguments,
    EstimatorArguments,
    EnvironmentArguments,
    EngineArguments,
    LogArguments,
    ScriptArguments,
    RolloutArguments,
):
    """Options of every config, besides those of ``transformers.TrainingArguments``."""


@dataclass(repr=False)
class GroupArguments:
    """Options of the trainers without value model."""

    SECTION: ClassVar[str] = "reference"

    sync_ref_model: bool = option(
        False, "Move the reference towards the policy every ref_model_sync_steps iterations."
    )
    ref_model_mixup_alpha: Annotated[float, Interval(gt=0, le=1)] = option(
        0.6, "Share of the policy in the new reference; the rest is the old one."
    )
    ref_model_sync_steps: Count = option(512, "See sync_ref_model.")
