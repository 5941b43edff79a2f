"""Options common to all algorithms."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kedge.config.declare import MOST, SECONDS, option
from kedge.config.rollout_engines import RolloutArguments

KLEstimator = Literal["k1", "k2", "k3", "abs", "full"]
SamplerCorrection = Literal["auto", "off", "truncate", "mask", "mask_old", "ratio"]
IN_FLIGHT_LAG = 2  # the smallest max_lag that keeps engines busy in flight (docs/async.md)

_batch = partial(option, acts_in="batch sizes and run length")
_sizes = partial(option, acts_in="batch sizes: filled in; a given value must equal the derived one")
_models = partial(option, acts_in="models", resume=True)
_script = partial(option, acts_in="command line and scripts")
_sampling = partial(option, acts_in="sampling", resume=True)
_reward = partial(option, acts_in="rewards", resume=True)
_kl = partial(option, acts_in="KL controller", resume=True)
_entropy = partial(option, acts_in="entropy bonus", resume=True)
_prompts = partial(option, acts_in="prompts", resume=True)
_eval = partial(option, acts_in="evaluation")
_tracker = partial(option, acts_in="trackers")
_engine = partial(option, acts_in="engine", resume=True)
_environment = partial(option, acts_in="environments", resume=True)


@dataclass
class EnvironmentArguments:
    """Environment options of every config; they act if the policy plays in an environment."""

    environment: str | None = _environment(
        None, "Class or function that makes an environment: module:Class or file.py:Class."
    )
    environment_kwargs: dict[str, Any] | str | None = _environment(
        None, "Arguments of environment by name; JSON on the command line."
    )
    max_turns: int | None = _environment(
        None, "Turns per episode. Unset: as many as response_length has room for.", ge=1
    )
    max_turn_tokens: int | None = _environment(
        None, "Tokens per turn. Unset: what is left of response_length.", ge=1
    )
    max_observation_tokens: int | None = _environment(
        None, "Tokens of an answer to a turn, with the template's; its middle is cut above.", ge=1
    )
    drop_reasoning: bool = _environment(
        False,
        "Read earlier turns without their reasoning where the chat template renders them so; the "
        "next turn then begins a new context.",
    )
    max_episode_seconds: float | None = _environment(
        None, "Seconds that an episode's environment may work, all turns.", gt=0, le=SECONDS
    )
    max_tool_calling_iterations: int | None = _environment(
        None, "Turns of an episode whose tool calls are made. Unset: no limit.", ge=1
    )
    environment_timeout: float = _environment(
        60.0, "Seconds that a call of an environment may take.", gt=0, le=SECONDS, resume=False
    )
    environment_concurrency: int = _environment(
        256, "Calls of environments that run at the same time.", ge=1, resume=False
    )
    on_env_error: Literal["raise", "drop", "score"] = _environment(
        "raise",
        "What an exception or timeout of an environment does: stop, drop the episode, or score it.",
    )
    env_error_score: float = _environment(
        0.0, "Reward of the last turn of an episode whose environment failed, with score."
    )


@dataclass
class CommonArguments(RolloutArguments, EnvironmentArguments):
    """Options of every config, besides those of ``transformers.TrainingArguments``."""

    overwrite_output_dir: bool = option(
        False,
        "Start over in an output_dir with checkpoints of another run and delete them. Without it "
        "such a folder is refused.",
        acts_in="trainer start",
    )
    logging_dir: str | None = _tracker(None, "TensorBoard folder. Unset: a folder in output_dir.")

    # Batches and run length.
    exp_name: str = _tracker("run", "Name of the experiment.")
    num_ppo_epochs: int = _batch(4, "Passes over each batch of responses.", ge=1)
    num_mini_batches: int = _batch(1, "Optimizer steps per pass over the batch.", ge=1)
    total_episodes: int | None = _batch(
        None,
        "Responses to generate over the whole run. Unset: num_train_epochs or max_steps decide.",
        ge=1,
        le=MOST,
    )
    num_generations: int = _batch(1, "Responses per prompt.", ge=1)
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Most tokens of one forward and backward pass, padding included: rows sorted by length are "
        "cut by tokens instead of per_device_train_batch_size rows, with the same gradient. A "
        "longer row is a pass by itself.",
        ge=1,
        acts_in="batch sizes: cuts micro-batches",
    )
    local_rollout_forward_batch_size: int = option(
        64,
        "Rows per rank at a time when sampling, scoring and computing log-probabilities.",
        ge=1,
        acts_in="rows at a time",
    )
    num_sample_generations: int = option(
        10, "Tables of sample completions shown over the run; 0 for none.", ge=0, acts_in="schedule"
    )
    log_token_rows: int = _tracker(
        4, "Responses logged token by token with each log row, for kedge report; 0 for none.", ge=0
    )
    log_completions_hub_repo: str | None = _tracker(
        None,
        "Dataset repository on the Hub to upload the tables of completions to; private unless "
        "hub_private_repo=False.",
    )
    dataset_num_proc: int | None = _prompts(
        None, "Processes that tokenize the dataset.", ge=1, resume=False
    )
    world_size: int | None = _sizes(None, "Filled in: number of ranks.", ge=1)
    num_total_batches: int | None = _sizes(None, "Filled in: iterations of the run.", ge=1)
    micro_batch_size: int | None = _sizes(
        None, "Filled in: per_device_train_batch_size x world_size.", ge=1
    )
    local_batch_size: int | None = _sizes(
        None, "Filled in: per_device_train_batch_size x gradient_accumulation_steps.", ge=1
    )
    batch_size: int | None = _sizes(None, "Filled in: local_batch_size x world_size.", ge=1)
    local_mini_batch_size: int | None = _sizes(
        None, "Filled in: local_batch_size / num_mini_batches.", ge=1
    )
    mini_batch_size: int | None = _sizes(None, "Filled in: batch_size / num_mini_batches.", ge=1)

    # Models.
    sft_model_path: str = _script(
        "EleutherAI/pythia-160m", "Folder or Hub name of the policy and the reference, for scripts."
    )
    reward_model_path: str = _script(
        "EleutherAI/pythia-160m", "Folder or Hub name of the reward model, for scripts."
    )
    model_adapter_name: str | None = _models(None, "PEFT adapter to train.")
    ref_adapter_name: str | None = _models(
        None,
        "PEFT adapter used as the reference. Unset: the base model under a new adapter, a frozen "
        "copy of an adapter that the model has.",
    )
    allow_low_precision_weights: bool = _models(
        False, "Allow training bf16 or fp16 weights, which round small weight changes away."
    )
    train_layers: int | None = _models(
        None,
        "Train only the top k transformer layers of policy and value model, with final norm and "
        "output layer (unless it is tied to the embedding). Unset: all layers.",
        ge=1,
    )
    cache_trunk: bool = _models(
        True,
        "Where the lower layers are frozen (train_layers, adapters on the top layers only), "
        "compute their output once per batch for all epochs and models that share them.",
        resume=False,
    )

    # Sampling.
    response_length: int = _sampling(53, "Maximum length of a response, in tokens.", ge=1)
    min_new_tokens: int = _sampling(
        0, "Minimum tokens of a response: stop tokens are banned before.", ge=0
    )
    temperature: float = _sampling(
        0.7, "Sampling temperature; divides the logits in training too.", ge=1e-6, le=1000
    )
    top_k: int = _sampling(0, "Sample among the k most likely tokens; 0 is off.", ge=0)
    top_p: float = _sampling(
        1.0,
        "Sample among the most likely tokens with this total probability; 1 is off.",
        gt=0,
        le=1,
    )
    min_p: float = _sampling(
        0.0,
        "Exclude tokens less likely than this fraction of the top probability; 0 is off.",
        ge=0,
        lt=1,
        accepts=float | None,
    )
    stop_token: Literal["eos"] | None = _sampling(
        "eos",
        "End responses at the tokenizer's EOS token and every eos_token_id of the model's "
        "generation_config; None (none on the command line): at neither.",
    )
    stop_token_id: int | None = _sampling(None, "Also end responses at this token id.", ge=0)
    stop_token_ids: list[int] | None = _sampling(
        None,
        "Also end responses at any of these token ids; for only these set stop_token=None.",
        ge=0,
    )
    stop_strings: list[str] | None = _sampling(
        None, "Also end responses after any of these strings."
    )

    # Rewards.
    missing_eos_penalty: float | None = _reward(
        None, "Penalty subtracted from the score of a response without stop token.", ge=0
    )
    non_eos_penalty: bool = _reward(
        False,
        "Replace the score of a response without stop token by penalty_reward_value.",
        alias="non_stop_penalty",
    )
    penalty_reward_value: float = _reward(-1.0, "Score given by non_eos_penalty.")
    reward_adapter: str | None = _reward(
        None,
        "Folder or Hub name of a reward model that is an adapter on the policy's base model. Needs "
        "an adapter on the policy too; counts as the last reward model.",
    )
    reward_weights: list[float] | None = _reward(
        None, "Weight of each reward source. Unset: 1 each."
    )
    on_reward_error: Literal["raise", "score", "drop"] = _reward(
        "raise", "If a reward function fails: stop, use reward_error_score, or drop the row."
    )
    reward_error_score: float | None = _reward(None, "Score given by on_reward_error=score.")
    reward_timeout: float | None = _reward(
        None,
        "Seconds that a call of a reward function may take. Rows that take longer are dropped, or "
        "scored with on_reward_error=score. Unset: no limit.",
        gt=0,
        le=SECONDS,
        resume=False,
    )

    # KL penalty.
    kl_coef: float = _kl(0.05, "Weight of the KL penalty in the reward.", ge=0)
    kl_estimator: KLEstimator = option(
        "k1",
        "Estimator of the KL per token; full is exact.",
        acts_in="algorithm: estimate of the KL",
        resume=True,
    )
    adaptive_kl: bool = _kl(False, "Adapt kl_coef so that the KL approaches kl_target.")
    kl_target: float = _kl(6.0, "Target KL of adaptive_kl, in nats per response.", gt=0)
    kl_horizon: float = _kl(10000.0, "Horizon of adaptive_kl, in responses.", gt=0)

    # Entropy bonus, in the names of TRL.
    entropy_coef: float = _entropy(
        0.0, "Weight of the entropy bonus in the loss, per token; the first one if adaptive.", ge=0
    )
    use_adaptive_entropy: bool = _entropy(
        False, "Adapt entropy_coef so that the entropy stays above entropy_target."
    )
    entropy_coef_min: float = _entropy(0.0, "Lower bound of the adaptive entropy_coef.", ge=0)
    entropy_coef_max: float = _entropy(1.0, "Upper bound of the adaptive entropy_coef.", ge=0)
    entropy_coef_delta: float = _entropy(
        0.005, "Change of the adaptive entropy_coef per optimizer step.", ge=0
    )
    entropy_target: float = _entropy(
        0.2, "Nats per token at or below which the adaptive bonus acts.", ge=0
    )
    # Prompts.
    max_prompt_length: int | None = _prompts(None, "Maximum length of a prompt, in tokens.", ge=1)
    chat_template_kwargs: dict[str, Any] | str | None = _prompts(
        None, "Extra arguments of the chat template; JSON on the command line."
    )
    overlong_prompts: Literal["drop", "truncate"] = _prompts(
        "drop", "Drop prompts above max_prompt_length, or truncate them on the left."
    )
    shuffle_dataset: bool = _prompts(True, "Reshuffle the prompts on every pass.")

    # Evaluation.
    num_generations_eval: int | None = _eval(
        None,
        "Completions of each evaluation prompt, sampled as in training. Unset: one, nearly greedy.",
        ge=1,
    )
    eval_success_score: float | None = _eval(
        None, "Lowest score that solves a prompt; logs eval_accuracy and eval_pass@k."
    )
    eval_against_start: bool = _eval(
        False, "Evaluate before training; later evaluations log the win rate against it."
    )

    # Engine.
    save_rollouts: str | None = _engine(
        None, "Folder to record the rollouts of each iteration in.", resume=False
    )
    replay_rollouts: str | None = _engine(
        None, "Folder written by save_rollouts to train from.", resume=False
    )
    preflight: bool = _engine(
        True, "Check models, rewards and masks on one batch before training.", resume=False
    )
    max_lag: int | None = _engine(
        None,
        "Iterations that sampling may run ahead of training; 0 is synchronous. Unset: 0, or 1 for "
        "AsyncPPOConfig; with in_flight_weight_updates 2.",
        ge=0,
    )
    rollout_schedule: Literal["in_order", "as_completed"] = _engine(
        "in_order",
        "With max_lag: train on whole batches in order, or on responses as they complete, "
        "which is faster if lengths differ much, but depends on timing.",
    )
    num_partial_batches: int | None = _engine(
        None,
        "Partial batches per iteration, for as_completed with engines that sample batches as a "
        "whole: vllm_sleep, models without slots, custom engines. Unset: up to 4 per engine.",
        ge=1,
    )
    in_flight_weight_updates: bool = _engine(
        False,
        "With as_completed: engines get new weights while they sample, and responses continue with "
        "them. Tokens may be older than max_lag; each has its own importance weight.",
    )
    sampler_correction: SamplerCorrection | None = _engine(
        "auto",
        "Importance weights of the learner against the rollout engine: truncate or mask large "
        "ones, or off. auto: truncate with vLLM, from max_lag=2, in flight, and if an option below "
        "is set; else off. mask_old: in flight, truncate, and leave out tokens older than max_lag. "
        "ratio: no weights; the loss takes its ratio to the rollout engine.",
    )
    sampler_correction_level: Literal["token", "sequence", "sequence_mean"] | None = _engine(
        None, "Weights per token, per response, or their geometric mean per response. Unset: token."
    )
    sampler_correction_high: float | None = _engine(
        None,
        "Weights above this are truncated or masked. Unset: 2 for token, 5 for sequence, 1.01 "
        "for sequence_mean.",
        gt=0,
        le=math.inf,
    )
    sampler_correction_low: float | None = _engine(
        None,
        "Weights below this are raised or masked. Unset: 1 / sampler_correction_high for mask, no "
        "bound for truncate.",
        ge=0,
    )
