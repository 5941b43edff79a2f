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

    num_ppo_epochs: Count = option(4, "How often each batch is trained on.")
    num_mini_batches: Count = option(1, "How many optimizer steps a pass over the batch takes.")
    total_episodes: Annotated[int | None, Interval(ge=1, le=MOST)] = option(
        None,
        "How many responses the run generates. If unset, num_train_epochs or max_steps ends it.",
    )
    num_generations: Count = option(1, "How many responses are sampled for each prompt.")
    max_tokens_per_micro_batch: Count | None = option(
        None,
        "The most tokens of one forward and backward pass, padding included: rows are sorted by "
        "length and cut by tokens instead of per_device_train_batch_size rows. The gradient is "
        "the same.",
    )
    local_rollout_forward_batch_size: Count = option(
        64, "How many rows a process samples, scores and computes log-probabilities of at a time."
    )
    world_size: Count | None = option(None, "Filled in by Kedge: the processes that train.")
    num_total_batches: Count | None = option(None, "Filled in by Kedge: the iterations of the run.")
    micro_batch_size: Count | None = option(
        None, "Filled in by Kedge: per_device_train_batch_size x world_size."
    )
    local_batch_size: Count | None = option(
        None, "Filled in by Kedge: per_device_train_batch_size x gradient_accumulation_steps."
    )
    batch_size: Count | None = option(
        None, "Filled in by Kedge: responses of an iteration, all processes."
    )
    local_mini_batch_size: Count | None = option(
        None, "Filled in by Kedge: local_batch_size / num_mini_batches."
    )
    mini_batch_size: Count | None = option(
        None, "Filled in by Kedge: responses of an optimizer step."
    )


@dataclass
class ModelArguments:
    """The models and how they are loaded."""

    SECTION: ClassVar[str] = "models"

    model_adapter_name: str | None = option(None, "Which PEFT adapter trains, by name.")
    ref_adapter_name: str | None = option(
        None,
        "The name of the PEFT adapter that serves as the reference. If unset, the reference is "
        "the base model for a new adapter, and a frozen copy for an adapter that was trained "
        "before.",
    )
    allow_low_precision_weights: bool = option(
        False,
        "Train bf16 or fp16 weights as they are. They round small changes away, so by default "
        "weights train in float32.",
    )
    train_layers: Count | None = option(
        None,
        "Train only this many of the top transformer layers of policy and value model, with the "
        "final norm and the output layer (unless it is tied to the embedding). If unset, all "
        "layers train.",
    )
    cache_trunk: bool = option(
        True,
        "If the lower layers are frozen, compute their output once per batch and use it in all "
        "epochs and in all models that share them.",
    )
    model_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Extra arguments of from_pretrained for policy and reference by name; JSON in a command.",
    )
    trust_remote_code: bool = option(
        False, "Run the custom code that comes with a model given by name."
    )


@dataclass
class SamplingArguments:
    """How responses are sampled, and where they end."""

    SECTION: ClassVar[str] = "sampling"

    response_length: Count = option(53, "The most tokens that a response may have.")
    min_new_tokens: Natural = option(
        0, "The fewest tokens that a response may have. Stop tokens are banned until then."
    )
    temperature: Annotated[float, Interval(ge=1e-6, le=1000)] = option(
        0.7, "The sampling temperature. Training divides the logits by it, too."
    )
    top_k: Natural = option(0, "Sample only among this many most likely tokens. 0 is off.")
    top_p: Annotated[float, Interval(gt=0, le=1)] = option(
        1.0,
        "Sample only among the most likely tokens that together have this probability. 1 is off.",
    )
    min_p: Annotated[float, Interval(ge=0, lt=1)] = option(
        0.0, "Never sample tokens less likely than this fraction of the likeliest one. 0 is off."
    )
    stop_token: Literal["eos"] | None = option(
        "eos",
        "End responses at the tokenizer's EOS token and at every eos_token_id of the model's "
        "generation_config. With None (none on the command line) they end at neither.",
    )
    stop_token_ids: Annotated[list[int] | None, Ge(0)] = option(
        None, "End responses at these token ids as well; with stop_token=None at these alone."
    )
    stop_strings: list[str] | None = option(
        None, "End responses after any of these strings as well."
    )


@dataclass
class PromptArguments:
    """How prompts are read."""

    SECTION: ClassVar[str] = "prompts"

    max_prompt_length: Count | None = option(
        None,
        "The most tokens that a prompt may have. If unset, only the models' context limits it.",
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "Extra arguments for the chat template; JSON in a command."
    )
    overlong_prompts: Literal["drop", "truncate"] = option(
        "drop",
        "Leave prompts above max_prompt_length out (drop), or cut them on the left (truncate).",
    )
    shuffle_dataset: bool = option(True, "Shuffle the prompts again for every pass over them.")
    dataset_num_proc: Count | None = option(None, "How many processes tokenize the dataset.")


@dataclass
class RewardArguments:
    """How responses are scored."""

    SECTION: ClassVar[str] = "rewards"

    missing_eos_penalty: NonNegative | None = option(
        None, "What the score of a response that does not end with a stop token loses."
    )
    non_eos_penalty: bool = option(
        False, "Score a response that does not end with a stop token penalty_reward_value instead."
    )
    penalty_reward_value: float = option(-1.0, "The score that non_eos_penalty gives.")
    reward_adapter: str | None = option(
        None,
        "The folder or hub name of a reward model that is an adapter on the policy's base model. "
        "The policy needs an adapter, too. In reward_weights it counts as the last reward model.",
    )
    reward_weights: list[float] | None = option(
        None, "The weight of each reward, in the order of the rewards. If unset, every weight is 1."
    )
    on_reward_error: Literal["raise", "score", "drop"] = option(
        "raise",
        "What happens if a reward function raises: raise stops the run, score gives "
        "reward_error_score, drop leaves the response out.",
    )
    reward_error_score: float | None = option(None, "The score that on_reward_error=score gives.")
    reward_timeout: Seconds | None = option(
        None,
        "How many seconds a call of a reward function may take. Responses that take longer are "
        "dropped, or scored with on_reward_error=score. If unset, there is no limit.",
    )


@dataclass
class KLArguments:
    """The KL penalty in the reward, and the entropy bonus, in the names of TRL."""

    SECTION: ClassVar[str] = "KL and entropy"

    kl_coef: NonNegative = option(
        0.05,
        "The weight of the KL penalty in the reward, which keeps the policy near the reference.",
    )
    adaptive_kl: bool = option(
        False, "Change kl_coef during training so that the KL approaches kl_target."
    )
    kl_target: Positive = option(6.0, "The KL that adaptive_kl aims at, in nats per response.")
    kl_horizon: Positive = option(
        10000.0, "Over how many responses adaptive_kl changes kl_coef: the more, the more slowly."
    )
    entropy_coef: NonNegative = option(
        0.0, "The weight of the entropy bonus in the loss, per token."
    )


@dataclass
class EstimatorArguments:
    """What every built-in algorithm reads."""

    SECTION: ClassVar[str] = "algorithm"

    kl_estimator: KLEstimator = option(
        "k1",
        "How the KL of a token is estimated from log-probabilities: k1, k2, k3 or abs. full "
        "computes it exactly over the vocabulary.",
    )


@dataclass
class EnvironmentArguments:
    """Options that apply if the policy plays in an environment."""

    SECTION: ClassVar[str] = "environments"

    environment: str | None = option(
        None, "The class or function that makes an environment, as module:Class or file.py:Class."
    )
    environment_kwargs: dict[str, Any] | str | None = option(
        None, "The arguments of that class or function by name; JSON in a command."
    )
    max_turns: Count | None = option(
        None,
        "The most turns that an episode may have. If unset, response_length alone limits them.",
    )
    max_turn_tokens: Count | None = option(
        None, "The most tokens in one turn. If unset, whatever remains of response_length."
    )
    max_observation_tokens: Count | None = option(
        None,
        "The most tokens of an observation, chat template included. Longer ones lose their middle.",
    )
    drop_reasoning: bool = option(
        False,
        "Drop the reasoning of earlier turns if the chat template does. The next turn then begins "
        "a new context.",
    )
    max_episode_seconds: Seconds | None = option(
        None, "The time limit in seconds for the environment of one episode, summed over its turns."
    )
    max_tool_calling_iterations: Count | None = option(
        None,
        "In how many turns tools may be called; later calls are not executed. Default: no limit.",
    )
    environment_timeout: Seconds = option(
        60.0, "How many seconds one call of an environment may take."
    )
    environment_concurrency: Count = option(
        256, "How many calls of environments may run at the same time."
    )
    on_env_error: Literal["raise", "drop", "score"] = option(
        "raise",
        "What happens if an environment raises or times out: raise stops the run, drop leaves the "
        "episode out, score gives it env_error_score.",
    )
    env_error_score: float = option(
        0.0, "The reward of the last turn if the environment failed, with on_env_error=score."
    )


@dataclass
class EngineArguments:
    """The loop: how far sampling runs ahead, and corrections for stale samples."""

    SECTION: ClassVar[str] = "engine"

    max_lag: Natural | None = option(
        None,
        "How many iterations sampling may run ahead of training. At 0 they take turns. If unset: "
        "0, or 1 for AsyncPPOConfig, or 2 with in_flight_weight_updates.",
    )
    rollout_schedule: Literal["in_order", "as_completed"] = option(
        "in_order",
        "With max_lag above 0, in_order trains on whole batches in order; as_completed trains on "
        "responses as they are finished. That is faster if lengths differ much, but the result "
        "depends on timing.",
    )
    in_flight_weight_updates: bool = option(
        False,
        "With as_completed, give engines new weights while they sample; unfinished responses "
        "continue with them. Tokens may then be older than max_lag, and each has its own "
        "importance weight.",
    )
    sampler_correction: SamplerCorrection | None = option(
        "auto",
        "How training corrects for samples of another policy, by importance weights of the "
        "learner against the rollout engine. truncate limits large weights, mask rejects them, "
        "off has none. auto is truncate with vLLM, from max_lag=2, in flight, or if an option "
        "below is set, and else off. mask_old, in flight, truncates and leaves out tokens older "
        "than max_lag. ratio has no weights: the loss takes its ratio to the rollout engine.",
    )
    sampler_correction_level: Literal["token", "sequence", "sequence_mean"] | None = option(
        None,
        "What has one importance weight: a token, a response (sequence), or a response by the "
        "geometric mean of its tokens (sequence_mean). If unset, a token.",
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
        None, "The folder in which to record the responses of each iteration."
    )
    replay_rollouts: str | None = option(
        None, "Train on the responses that save_rollouts wrote to this folder, instead of sampling."
    )
    preflight: bool = option(True, "Check models, rewards and masks on one batch before training.")


@dataclass
class LogArguments:
    """Evaluation, tables, logs and folders."""

    SECTION: ClassVar[str] = "evaluation and logs"

    overwrite_output_dir: bool = option(
        False,
        "Start over in an output_dir that has checkpoints of another run, and delete them. "
        "Without it such a folder is refused.",
    )
    logging_dir: str | None = option(
        None, "The folder for TensorBoard. If unset, a folder in output_dir."
    )
    exp_name: str = option("run", "The name of the experiment, which run_name uses.")
    num_sample_generations: Natural = option(
        10, "How many tables of sample completions are shown over the run. 0 shows none."
    )
    num_completions_to_print: Count | None = option(
        None, "How many rows of each table of completions are printed. If unset, 5."
    )
    log_unique_prompts: bool = option(
        False, "Show only one response per prompt in tables of completions."
    )
    log_token_rows: Natural = option(
        4,
        "How many responses are logged token by token with each row, for kedge report. 0 is none.",
    )
    num_generations_eval: Count | None = option(
        None,
        "How many completions an evaluation samples of each prompt. If unset, one, nearly greedy.",
    )
    eval_success_score: float | None = option(
        None, "A response with this score solves its prompt; logs eval_accuracy and eval_pass@k."
    )
    eval_against_start: bool = option(
        False,
        "Evaluate the policy before training, too; later evaluations log a win rate against it.",
    )
    stop_on_finding: bool = option(
        False,
        "End the run with a checkpoint when kedge doctor finds what runs rarely recover from: a "
        "dead reward, a score that falls, a collapsed entropy, or a policy far from the reference. "
        "A resumed run continues past what was found before.",
    )


@dataclass
class ScriptArguments:
    """Read by commands and scripts, not by trainers."""

    SECTION: ClassVar[str] = "command line and scripts"

    sft_model_path: str = option(
        "EleutherAI/pythia-160m",
        "The folder or hub name of the policy and the reference, for commands and scripts.",
    )
    reward_model_path: str = option(
        "EleutherAI/pythia-160m",
        "The folder or hub name of the reward model, for commands and scripts.",
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
        0.6, "The share of the policy in the new reference. The rest is the old reference."
    )
    ref_model_sync_steps: Count = option(
        512, "After how many iterations sync_ref_model moves the reference."
    )
