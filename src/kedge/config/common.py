"""Options of every config, in groups: each class is what one part of a run reads."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Interval

from kedge.config import inherited
from kedge.config.declare import (
    MOST,
    Bound,
    Count,
    Natural,
    NonNegative,
    Positive,
    Seconds,
    format_value,
    option,
)
from kedge.config.rollout_engines import RolloutArguments, check_rollout
from kedge.records.errors import ConfigError

KLEstimator = Literal["k1", "k2", "k3", "abs", "full"]
SamplerCorrection = Literal["auto", "off", "truncate", "mask", "mask_old", "ratio"]
IN_FLIGHT_LAG = 2  # the smallest max_lag that keeps engines busy in flight (docs/async.md)
# Prefixes of options that need hooks in layers, or a switch before every evaluation.
UNSUPPORTED_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo", "schedule_free")
UNSUPPORTED_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
_NEED_END = (
    *("missing_eos_penalty", "non_eos_penalty"),
    *("mask_truncated_completions", "overlong_buffer"),
)


@dataclass
class BatchArguments:
    """Sizes of a batch, and how long to train."""

    SECTION: ClassVar[str] = "batch sizes and run length"

    num_ppo_epochs: Count = option(4, "Number of passes over each batch.")
    num_mini_batches: Count = option(1, "Number of optimizer steps per pass over the batch.")
    total_episodes: Annotated[int | None, Interval(ge=1, le=MOST)] = option(
        None,
        "Number of responses to generate. If unset, num_train_epochs or max_steps ends the run.",
    )
    num_generations: Count = option(1, "Number of responses sampled per prompt.")
    max_tokens_per_micro_batch: Count | None = option(
        None,
        "Maximum number of tokens, with padding, in a forward and backward pass. Micro-batches "
        "then have as many rows of similar length as fit, instead of per_device_train_batch_size "
        "rows. This does not change the gradient.",
    )
    local_rollout_forward_batch_size: Count = option(
        64, "Number of rows that a process samples, scores or passes through a model at a time."
    )
    world_size: Count | None = option(None, "Set by Kedge: the number of training processes.")
    num_total_batches: Count | None = option(
        None, "Set by Kedge: the number of iterations in the run."
    )
    micro_batch_size: Count | None = option(
        None, "Set by Kedge: per_device_train_batch_size x world_size."
    )
    local_batch_size: Count | None = option(
        None, "Set by Kedge: per_device_train_batch_size x gradient_accumulation_steps."
    )
    batch_size: Count | None = option(
        None, "Set by Kedge: the number of responses per iteration, over all processes."
    )
    local_mini_batch_size: Count | None = option(
        None, "Set by Kedge: local_batch_size / num_mini_batches."
    )
    mini_batch_size: Count | None = option(
        None, "Set by Kedge: the number of responses per optimizer step."
    )


@dataclass
class ModelArguments:
    """The models and how they are loaded."""

    SECTION: ClassVar[str] = "models"

    model_adapter_name: str | None = option(None, "Name of the PEFT adapter to train.")
    ref_adapter_name: str | None = option(
        None,
        "Name of the PEFT adapter that serves as the reference. If unset, the reference is the "
        "base model for a new adapter, or a frozen copy of an adapter that was trained before.",
    )
    allow_low_precision_weights: bool = option(
        False,
        "Keep bf16 or fp16 weights in that type while they are trained. By default they are "
        "trained in float32, because bf16 and fp16 round small changes away.",
    )
    train_layers: Count | None = option(
        None,
        "Train only this many of the top transformer layers of the policy and the value model, "
        "with the final norm and the output layer (unless it is tied to the embedding). If unset, "
        "all layers are trained.",
    )
    cache_trunk: bool = option(
        True,
        "If the lower layers are frozen, compute their output once per batch and use it in all "
        "epochs and in all models that share these layers.",
    )
    model_init_kwargs: dict[str, Any] | str | None = option(
        None, "Extra arguments of from_pretrained for policy and reference; JSON in a command."
    )
    trust_remote_code: bool = option(
        False, "Run the custom code that comes with models given by name."
    )


@dataclass
class SamplingArguments:
    """How responses are sampled, and where they end."""

    SECTION: ClassVar[str] = "sampling"

    response_length: Count = option(53, "Maximum number of tokens in a response.")
    min_new_tokens: Natural = option(
        0, "Minimum number of tokens in a response. Until then, stop tokens are not sampled."
    )
    temperature: Annotated[float, Interval(ge=1e-6, le=1000)] = option(
        0.7, "Sampling temperature. The logits are also divided by it in training."
    )
    top_k: Natural = option(0, "Sample only from this many most likely tokens. 0 is off.")
    top_p: Annotated[float, Interval(gt=0, le=1)] = option(
        1.0,
        "Sample only from the most likely tokens that together have this probability. 1 is off.",
    )
    min_p: Annotated[float, Interval(ge=0, lt=1)] = option(
        0.0,
        "Do not sample tokens whose probability is below this share of the highest one. 0 is off.",
    )
    stop_token: Literal["eos"] | None = option(
        "eos",
        "With eos, responses end at the tokenizer's EOS token and at every eos_token_id in the "
        "model's generation_config. With None (none on the command line), they do not.",
    )
    stop_token_ids: Annotated[list[int] | None, Ge(0)] = option(
        None, "Also end responses at these token ids; with stop_token=None, only at these."
    )
    stop_strings: list[str] | None = option(None, "Also end responses after any of these strings.")


@dataclass
class PromptArguments:
    """How prompts are read."""

    SECTION: ClassVar[str] = "prompts"

    max_prompt_length: Count | None = option(
        None, "Maximum number of tokens in a prompt. If unset, only the models' context limits it."
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "Extra keyword arguments for the chat template; JSON in a command."
    )
    overlong_prompts: Literal["drop", "truncate"] = option(
        "drop",
        "Whether to drop prompts longer than max_prompt_length, or truncate them on the left.",
    )
    shuffle_dataset: bool = option(True, "Reshuffle the prompts before every pass over them.")
    dataset_num_proc: Count | None = option(None, "Number of processes that tokenize the dataset.")


@dataclass
class RewardArguments:
    """How responses are scored."""

    SECTION: ClassVar[str] = "rewards"

    missing_eos_penalty: NonNegative | None = option(
        None, "Penalty subtracted from the score of a response that does not end with a stop token."
    )
    non_eos_penalty: bool = option(
        False, "Score responses that do not end with a stop token penalty_reward_value instead."
    )
    penalty_reward_value: float = option(-1.0, "Score that non_eos_penalty gives.")
    reward_adapter: str | None = option(
        None,
        "Folder or hub name of a reward model that is an adapter on the policy's base model. The "
        "policy must be an adapter, too. In reward_weights, it counts as the last reward model.",
    )
    reward_weights: list[float] | None = option(
        None, "Weight of each reward, in the order of the rewards. If unset, every weight is 1."
    )
    on_reward_error: Literal["raise", "score", "drop"] = option(
        "raise",
        "What to do if a reward function raises: raise ends the run, score gives the response "
        "reward_error_score, and drop leaves the response out.",
    )
    reward_error_score: float | None = option(None, "Score that on_reward_error=score gives.")
    reward_timeout: Seconds | None = option(
        None,
        "Time limit for a call of a reward function, in seconds. Responses that take longer are "
        "dropped, or scored with on_reward_error=score. If unset, there is no limit.",
    )


@dataclass
class KLArguments:
    """The KL penalty in the reward, and the entropy bonus, in the names of TRL."""

    SECTION: ClassVar[str] = "KL and entropy"

    kl_coef: NonNegative = option(
        0.05,
        "Weight of the KL penalty in the reward, which keeps the policy close to the reference.",
    )
    adaptive_kl: bool = option(
        False, "Adapt kl_coef during training so that the KL approaches kl_target."
    )
    kl_target: Positive = option(6.0, "KL that adaptive_kl aims for, in nats per response.")
    kl_horizon: Positive = option(
        10000.0,
        "Number of responses over which adaptive_kl adapts kl_coef; larger values adapt more "
        "slowly.",
    )
    entropy_coef: NonNegative = option(0.0, "Weight of the entropy bonus in the loss, per token.")


@dataclass
class EstimatorArguments:
    """What every built-in algorithm reads."""

    SECTION: ClassVar[str] = "algorithm"

    kl_estimator: KLEstimator = option(
        "k1",
        "How to estimate a token's KL from log-probabilities: k1, k2, k3 or abs. full computes it "
        "exactly over the vocabulary.",
    )


@dataclass
class EnvironmentArguments:
    """Options that apply if the policy plays in an environment."""

    SECTION: ClassVar[str] = "environments"

    environment: str | None = option(
        None, "Class or function that makes an environment, as module:Class or file.py:Class."
    )
    environment_kwargs: dict[str, Any] | str | None = option(
        None, "Keyword arguments for that class or function; JSON in a command."
    )
    max_turns: Count | None = option(
        None, "Maximum number of turns in an episode. If unset, only response_length limits them."
    )
    max_turn_tokens: Count | None = option(
        None, "Maximum number of tokens in a turn. If unset, what is left of response_length."
    )
    max_observation_tokens: Count | None = option(
        None,
        "Maximum number of tokens in an observation, with the template. Longer ones are cut in "
        "the middle.",
    )
    drop_reasoning: bool = option(
        False,
        "Drop the reasoning from earlier turns if the chat template does. The next turn then "
        "begins a new context.",
    )
    max_episode_seconds: Seconds | None = option(
        None, "Time limit for one episode's environment, in seconds, summed over its turns."
    )
    max_tool_calling_iterations: Count | None = option(
        None,
        "Maximum number of turns with tool calls; later calls are not executed. Default: no limit.",
    )
    environment_timeout: Seconds = option(60.0, "Time limit for one environment call, in seconds.")
    environment_concurrency: Count = option(
        256, "Maximum number of environment calls that run at the same time."
    )
    on_env_error: Literal["raise", "drop", "score"] = option(
        "raise",
        "What to do if an environment raises or times out: raise ends the run, drop leaves the "
        "episode out, and score gives it env_error_score.",
    )
    env_error_score: float = option(
        0.0, "Reward of the last turn if the environment fails, with on_env_error=score."
    )


@dataclass
class EngineArguments:
    """The loop: how far sampling runs ahead, and corrections for stale samples."""

    SECTION: ClassVar[str] = "engine"

    max_lag: Natural | None = option(
        None,
        "Maximum number of iterations that sampling may run ahead of training. At 0, sampling and "
        "training take turns. If unset: 0; 1 in AsyncPPOConfig; 2 with in_flight_weight_updates.",
    )
    rollout_schedule: Literal["in_order", "as_completed"] = option(
        "in_order",
        "With max_lag above 0, in_order trains on whole batches in order, and as_completed trains "
        "on responses as soon as they are finished. as_completed is faster if lengths vary a lot, "
        "but results then depend on timing.",
    )
    in_flight_weight_updates: bool = option(
        False,
        "With as_completed, send new weights to the engines while they sample; unfinished "
        "responses continue with them. Tokens can then be older than max_lag, and each token has "
        "its own importance weight.",
    )
    sampler_correction: SamplerCorrection | None = option(
        "auto",
        "How training corrects for responses from another policy, using importance weights "
        "between learner and rollout engine. truncate limits large weights, mask rejects them, "
        "and off uses none. auto is truncate with vLLM, with max_lag of 2 or more, in "
        "flight, or if an option below is set, and off otherwise. mask_old (in flight) truncates "
        "and leaves out tokens older than max_lag. ratio uses no weights: the loss takes its "
        "ratio to the rollout engine.",
    )
    sampler_correction_level: Literal["token", "sequence", "sequence_mean"] | None = option(
        None,
        "What gets one importance weight: a token, a response (sequence), or a response with the "
        "geometric mean of its tokens (sequence_mean). If unset, token.",
    )
    sampler_correction_high: Bound | None = option(
        None,
        "Importance weights above this are truncated or rejected. If unset: 2 for token, 5 for "
        "sequence, 1.01 for sequence_mean.",
    )
    sampler_correction_low: NonNegative | None = option(
        None,
        "Importance weights below this are raised to it or rejected. If unset: 1 / "
        "sampler_correction_high for mask, and no bound for truncate.",
    )
    save_rollouts: str | None = option(
        None, "Folder in which to record the responses of each iteration."
    )
    replay_rollouts: str | None = option(
        None, "Instead of sampling, train on the responses that save_rollouts wrote to this folder."
    )
    preflight: bool = option(True, "Check models, rewards and masks on one batch before training.")


@dataclass
class LogArguments:
    """Evaluation, tables, logs and folders."""

    SECTION: ClassVar[str] = "evaluation and logs"

    overwrite_output_dir: bool = option(
        False,
        "Start over in an output_dir that has another run's checkpoints, and delete them. Without "
        "this option, such a folder is an error.",
    )
    logging_dir: str | None = option(
        None, "Folder for TensorBoard. If unset, a folder in output_dir."
    )
    exp_name: str = option("run", "Name of the experiment, which run_name uses by default.")
    num_sample_generations: Natural = option(
        10, "Number of tables of sample completions over the run. 0 turns this off."
    )
    num_completions_to_print: Count | None = option(
        None, "Number of rows to print of each table of completions. If unset, 5."
    )
    log_unique_prompts: bool = option(
        False, "Show only one response per prompt in tables of completions."
    )
    log_token_rows: Natural = option(
        4, "Number of responses logged token by token per row, for kedge report. 0 is off."
    )
    num_generations_eval: Count | None = option(
        None,
        "Number of responses sampled per prompt in an evaluation. If unset, one, nearly greedy.",
    )
    eval_success_score: float | None = option(
        None, "Score from which a response solves its prompt; logs eval_accuracy and eval_pass@k."
    )
    eval_against_start: bool = option(
        False,
        "Also evaluate the policy before training; later evaluations log a win rate against it.",
    )
    stop_on_finding: bool = option(
        False,
        "Save a checkpoint and end the run if kedge doctor finds a problem from which runs rarely "
        "recover: a dead reward, a falling score, a collapsed entropy, or a policy far from the "
        "reference. A resumed run ignores earlier findings.",
    )


@dataclass
class ScriptArguments:
    """Read by commands and scripts, not by trainers."""

    SECTION: ClassVar[str] = "command line and scripts"

    sft_model_path: str = option(
        "EleutherAI/pythia-160m",
        "Folder or hub name of the policy and the reference, for commands and scripts.",
    )
    reward_model_path: str = option(
        "EleutherAI/pythia-160m",
        "Folder or hub name of the reward model, for commands and scripts.",
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
    """Options of every config, besides those of ``transformers.TrainingArguments``, and checks."""

    STATUS: ClassVar[Mapping[str, Any]] = inherited.STATUS  # of transformers' fields
    TYPES: ClassVar[Mapping[str, Any]] = inherited.TYPES
    length_option: ClassVar[str] = "response_length"  # its name in messages

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL in the loss, in addition to ``kl_coef`` in the reward."""
        return 0.0

    def _check(self) -> None:
        """Check values and combinations, on construction and when a trainer gets the config."""
        _check_responses(self)
        _check_schedule(self)
        _check_learner(self)
        check_rollout(self)

    def _fill_defaults(self) -> None:
        if self.max_lag is None:
            self.max_lag = IN_FLIGHT_LAG if self.in_flight_weight_updates else 0


@dataclass(repr=False)
class GroupArguments:
    """Options of the trainers without value model."""

    SECTION: ClassVar[str] = "reference"

    sync_ref_model: bool = option(
        False, "Move the reference toward the policy every ref_model_sync_steps iterations."
    )
    ref_model_mixup_alpha: Annotated[float, Interval(gt=0, le=1)] = option(
        0.6, "Share of the policy in the new reference; the rest is the old reference."
    )
    ref_model_sync_steps: Count = option(
        512, "Number of iterations between two updates of the reference by sync_ref_model."
    )


def _check_responses(c: Any) -> None:
    check_end(c, has_eos=True)  # the tokenizer is only known later
    if c.min_new_tokens > c.response_length:
        raise ConfigError(
            f"min_new_tokens={c.min_new_tokens} must be at most response_length={c.response_length}"
        )
    if c.non_eos_penalty and c.missing_eos_penalty is not None:
        raise ConfigError(
            "non_eos_penalty=True replaces the score, but"
            f" missing_eos_penalty={c.missing_eos_penalty} is subtracted from it; set one of them"
        )
    if c.on_reward_error == "score" and c.reward_error_score is None:
        raise ConfigError("on_reward_error='score' needs reward_error_score, the score to give")
    if c.adaptive_kl and c.kl_coef == 0:
        raise ConfigError(
            "adaptive_kl=True multiplies kl_coef, so kl_coef=0 would stay 0; set kl_coef=0.05"
        )
    if c.ref_adapter_name is not None and c.ref_adapter_name == c.model_adapter_name:
        raise ConfigError(
            f"ref_adapter_name and model_adapter_name are both {c.ref_adapter_name!r}, so the"
            " reference would be the policy; name another adapter or leave ref_adapter_name unset"
        )


def check_end(config: Any, *, has_eos: bool) -> None:
    """Refuse options that treat truncated responses differently if nothing ends a response."""
    if config.stop_token_ids or config.stop_strings:
        return
    if config.stop_token is not None and has_eos:
        return
    reason = "neither the tokenizer nor the model's generation_config has an EOS token"
    fix = "stop_token_ids or stop_strings"
    if config.stop_token is None:
        reason = "stop_token=None and no stop_token_ids or stop_strings are set"
        fix = 'stop_token="eos"'
    for name in _NEED_END:
        if value := getattr(config, name, None):
            raise ConfigError(
                f"{name}={value!r} treats truncated responses differently, but nothing can end a"
                f" response: {reason}. Set {fix}, or leave {name} out"
            )


def _check_schedule(c: Any) -> None:
    if c.rollout_schedule == "in_order" and c.in_flight_weight_updates:
        raise ConfigError(
            'in_flight_weight_updates=True needs rollout_schedule="as_completed"; set it, or leave'
            " in_flight_weight_updates out"
        )
    if c.sampler_correction == "mask_old" and not c.in_flight_weight_updates:
        raise ConfigError(
            "sampler_correction='mask_old' leaves out tokens older than max_lag, which only"
            " in_flight_weight_updates=True samples; set it, or sampler_correction='truncate'"
        )
    if c.rollout_schedule == "as_completed" and c.max_lag == 0:
        raise ConfigError(
            'rollout_schedule="as_completed" trains on what is done while the rest is sampled,'
            " but max_lag=0 does not sample during training; set max_lag=1 or more"
        )
    if c.replay_rollouts is None:
        return
    replay = f"replay_rollouts={format_value(c.replay_rollouts)}"
    if c.max_lag > 0:
        raise ConfigError(f"{replay} samples nothing: max_lag={c.max_lag} has no effect; set 0")
    if not os.path.isdir(c.replay_rollouts):
        raise ConfigError(f"{replay} is not a folder; give a folder written by save_rollouts")


def _check_learner(c: Any) -> None:
    optim = str(getattr(c.optim, "value", c.optim))
    if optim.startswith(UNSUPPORTED_OPTIMIZERS):
        raise ConfigError(
            f"optim={optim!r} is not supported: it needs hooks in the layers or a switch around"
            " every forward pass; use adamw_torch_fused, adamw_torch, adafactor, sgd, rmsprop,"
            " adagrad or a bitsandbytes optimizer"
        )
    schedule = str(getattr(c.lr_scheduler_type, "value", c.lr_scheduler_type))
    if schedule in UNSUPPORTED_SCHEDULES:
        raise ConfigError(
            f"lr_scheduler_type={schedule!r} is not supported: it needs a validation loss;"
            " use linear, cosine or constant_with_warmup"
        )
    pairs = (c.optim_args or "name=value").split(",")
    if any(pair.count("=") != 1 or pair.strip().startswith("=") for pair in pairs):
        raise ConfigError(
            f"optim_args={format_value(c.optim_args)} must be comma-separated name=value pairs,"
            " such as 'momentum=0.9'"
        )
