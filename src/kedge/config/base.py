"""Options common to all Trainer-style trainers."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar

from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_cuda_available

from kedge.config.compat.transformers4 import RemovedArguments
from kedge.config.declare import check_fields, default_of, option
from kedge.config.option_status import FIELD_SUPPORT
from kedge.config.options import Support, apply_support
from kedge.config.rollout import RolloutArguments, check_rollout
from kedge.config.validate import check_values
from kedge.config.values import MOST, shown
from kedge.errors import ConfigError

Config = TypeVar("Config", bound="OnPolicyConfig")
KLEstimator = Literal["k1", "k2", "k3", "abs", "full"]


@dataclass(repr=False)
class OnPolicyConfig(RolloutArguments, RemovedArguments, TrainingArguments):
    """The options of ``transformers.TrainingArguments`` and those common to all algorithms.

    ``SUPPORT`` says for every field where it acts or why it is refused.  ``max_steps``,
    ``logging_steps``, ``save_steps``, ``eval_steps`` and ``warmup_steps`` count iterations: one
    batch of responses, trained on for ``num_ppo_epochs`` x ``num_mini_batches`` optimizer steps.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    SUPPORT: ClassVar[Mapping[str, Support]] = FIELD_SUPPORT
    given: ClassVar[frozenset[str]] = frozenset()  # on an instance: the options that were set
    SETTLED: ClassVar[Mapping[str, Any]] = {}  # values of unset fields that differ from the default

    # TrainingArguments with other defaults.
    logging_steps: float = option(
        10, "Iterations between log rows; below 1, a fraction of the run.", ge=0
    )
    gradient_checkpointing: bool | None = option(
        True, "Recompute activations in the backward pass: less memory, about a third slower."
    )
    bf16: bool | None = option(  # type: ignore[assignment]
        None,
        "Autocast to bfloat16 over float32 weights. Unset: on if the GPU supports it.",
    )
    report_to: None | str | list[str] = option(  # noqa: RUF036  (HfArgumentParser reads this order)
        None, "Trackers for metrics: tensorboard, wandb, trackio or a list. Unset: only files."
    )
    trackio_space_id: str | None = option(
        "trackio",
        "Hugging Face Space of the dashboard, with report_to=trackio. Local if not logged in.",
    )
    run_name: str | None = option(None, "Name of the run in trackers. Unset: exp_name, if given.")

    # Batches and run length.
    exp_name: str = option("run", "Name of the experiment.")
    num_ppo_epochs: int = option(4, "Passes over each batch of responses.", ge=1)
    num_mini_batches: int = option(1, "Optimizer steps per pass over the batch.", ge=1)
    total_episodes: int | None = option(
        None,
        "Responses to generate over the whole run. Unset: num_train_epochs or max_steps decide.",
        ge=1,
        le=MOST,
    )
    num_generations: int = option(1, "Responses per prompt.", ge=1)
    local_rollout_forward_batch_size: int = option(
        64, "Rows per rank at a time when sampling, scoring and computing log-probabilities.", ge=1
    )
    num_sample_generations: int = option(
        10, "Tables of sample completions shown over the run; 0 for none.", ge=0
    )
    log_token_rows: int = option(
        4,
        "Responses logged token by token with each log row, for kedge report; 0 for none.",
        ge=0,
    )
    log_completions_hub_repo: str | None = option(
        None,
        "Dataset repository on the Hub to upload the tables of completions to; private unless "
        "hub_private_repo=False.",
    )
    dataset_num_proc: int | None = option(None, "Processes that tokenize the dataset.", ge=1)
    world_size: int | None = option(None, "Filled in: number of ranks.", ge=1)
    num_total_batches: int | None = option(None, "Filled in: iterations of the run.", ge=1)
    micro_batch_size: int | None = option(
        None, "Filled in: per_device_train_batch_size x world_size.", ge=1
    )
    local_batch_size: int | None = option(
        None, "Filled in: per_device_train_batch_size x gradient_accumulation_steps.", ge=1
    )
    batch_size: int | None = option(None, "Filled in: local_batch_size x world_size.", ge=1)
    local_mini_batch_size: int | None = option(
        None, "Filled in: local_batch_size / num_mini_batches.", ge=1
    )
    mini_batch_size: int | None = option(None, "Filled in: batch_size / num_mini_batches.", ge=1)

    # Models.
    sft_model_path: str = option(
        "EleutherAI/pythia-160m", "Folder or Hub name of the policy and the reference, for scripts."
    )
    reward_model_path: str = option(
        "EleutherAI/pythia-160m", "Folder or Hub name of the reward model, for scripts."
    )
    model_adapter_name: str | None = option(None, "PEFT adapter to train.")
    ref_adapter_name: str | None = option(
        None, "PEFT adapter used as the reference. Unset: the base model without adapter."
    )
    ds3_gather_for_generation: bool = option(
        True, "Always true: responses are sampled with full weights."
    )
    allow_low_precision_weights: bool = option(
        False, "Allow training bf16 or fp16 weights, which round small weight changes away."
    )

    # Sampling.
    response_length: int = option(53, "Maximum length of a response, in tokens.", ge=1)
    min_new_tokens: int = option(
        0, "Minimum tokens of a response: stop tokens are banned before.", ge=0
    )
    temperature: float = option(
        0.7, "Sampling temperature; divides the logits in training too.", ge=1e-6, le=1000
    )
    top_k: int = option(0, "Sample among the k most likely tokens; 0 is off.", ge=0)
    top_p: float = option(
        1.0,
        "Sample among the most likely tokens with this total probability; 1 is off.",
        gt=0,
        le=1,
    )
    min_p: float = option(
        0.0,
        "Exclude tokens less likely than this fraction of the top probability; 0 is off.",
        ge=0,
        lt=1,
        accepts=float | None,
    )
    keep_sampling_mask: bool = option(
        False,
        "Record which tokens top_k, top_p and min_p allowed, and train over those only.",
    )
    stop_token: Literal["eos"] | None = option(
        "eos",
        "End responses at the tokenizer's EOS token and every eos_token_id of the model's "
        "generation_config; None (none on the command line): at neither.",
    )
    stop_token_id: int | None = option(None, "Also end responses at this token id.", ge=0)
    stop_token_ids: list[int] | None = option(
        None,
        "Also end responses at any of these token ids; for only these set stop_token=None.",
        ge=0,
    )
    stop_strings: list[str] | None = option(None, "Also end responses after any of these strings.")

    # Rewards.
    missing_eos_penalty: float | None = option(
        None, "Penalty subtracted from the score of a response without stop token.", ge=0
    )
    non_eos_penalty: bool = option(
        False, "Replace the score of a response without stop token by penalty_reward_value."
    )
    non_stop_penalty: bool = option(False, "Another name of non_eos_penalty.")
    penalty_reward_value: float = option(-1.0, "Score given by non_eos_penalty.")
    reward_weights: list[float] | None = option(
        None, "Weight of each reward source. Unset: 1 each."
    )
    on_reward_error: Literal["raise", "score", "drop"] = option(
        "raise", "If a reward function fails: stop, use reward_error_score, or drop the row."
    )
    reward_error_score: float | None = option(None, "Score given by on_reward_error=score.")

    # KL penalty.
    kl_coef: float = option(0.05, "Weight of the KL penalty in the reward.", ge=0)
    kl_estimator: KLEstimator = option("k1", "Estimator of the KL per token; full is exact.")
    adaptive_kl: bool = option(False, "Adapt kl_coef so that the KL approaches kl_target.")
    kl_target: float = option(6.0, "Target KL of adaptive_kl, in nats per response.", gt=0)
    kl_horizon: float = option(10000.0, "Horizon of adaptive_kl, in responses.", gt=0)
    # Prompts.
    max_prompt_length: int | None = option(None, "Maximum length of a prompt, in tokens.", ge=1)
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "Extra arguments of the chat template; JSON on the command line."
    )
    overlong_prompts: Literal["drop", "truncate"] = option(
        "drop", "Drop prompts above max_prompt_length, or truncate them on the left."
    )
    shuffle_dataset: bool = option(True, "Reshuffle the prompts on every pass.")

    # Evaluation.
    num_generations_eval: int | None = option(
        None,
        "Completions of each evaluation prompt, sampled as in training. Unset: one, nearly greedy.",
        ge=1,
    )
    eval_success_score: float | None = option(
        None, "Lowest score that solves a prompt; logs eval_accuracy and eval_pass@k."
    )
    eval_against_start: bool = option(
        False, "Evaluate before training; later evaluations log the win rate against it."
    )

    # Engine.
    save_rollouts: str | None = option(None, "Folder to record the rollouts of each iteration in.")
    replay_rollouts: str | None = option(None, "Folder written by save_rollouts to train from.")
    preflight: bool = option(True, "Check models, rewards and masks on one batch before training.")
    max_lag: int = option(
        0, "Iterations that sampling may run ahead of training; 0 is synchronous.", ge=0
    )
    rollout_schedule: Literal["in_order", "as_completed"] = option(
        "in_order",
        "With max_lag: train on whole batches in order, or on partial batches as they complete, "
        "which is faster if lengths differ much, but depends on timing.",
    )
    num_partial_batches: int | None = option(
        None,
        "Partial batches per iteration, for as_completed. Unset: up to 4 per engine.",
        ge=1,
    )
    sampler_correction: Literal["auto", "off", "truncate", "mask"] | None = option(
        "auto",
        "Importance weights of the learner against the rollout engine: truncate or mask large "
        "ones, or off. auto: truncate if max_lag >= 2; in GRPO with vLLM as set by "
        "vllm_importance_sampling_*; else off.",
    )
    sampler_correction_level: Literal["token", "sequence", "sequence_mean"] | None = option(
        None,
        "Weights per token, per response, or their geometric mean per response. Unset: token, or "
        "sequence where the ratio is that of whole responses (RLOO).",
    )
    sampler_correction_high: float | None = option(
        None,
        "Weights above this are truncated or masked. Unset: 2 for token, 5 for sequence, 1.01 "
        "for sequence_mean.",
        gt=0,
        le=math.inf,
    )
    sampler_correction_low: float = option(0.0, "Weights below this are raised or masked.", ge=0)

    def __post_init__(self) -> None:
        check_fields(self)
        apply_support(self, self.SUPPORT)
        self._resolve_precision()
        self._fill_defaults()
        check_values(self)
        check_rollout(self)
        requested, launched = self.world_size, int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and not _has_gpu():
            self.use_cpu = True  # otherwise the ranks would not form a process group
        # TrainingArguments fills in DeepSpeed's settings from it.
        self.world_size = launched
        try:
            super().__post_init__()
        except Exception as error:  # of transformers, accelerate and DeepSpeed, of any kind
            raise ConfigError(self._explain(error)) from error
        unset_hf_deepspeed_config()  # models are loaded in full and sharded later
        self.world_size = self.distributed_state.num_processes if self.distributed_state else 1
        if self.world_size != launched:
            raise ConfigError(
                f"{launched} processes were launched, but this one sees {self.world_size}; "
                "set use_cpu=True if they have no GPU each, or launch one process"
            )
        if requested not in (None, self.world_size):
            raise ConfigError(
                f"world_size={requested}, but {self.world_size} processes run; leave it unset"
            )

    def _explain(self, error: Exception) -> str:
        """The error of transformers, after the options that it names or that were changed."""
        text = " ".join(str(error).split()) or type(error).__name__
        changed = {
            f.name: f"{f.name}={shown(getattr(self, f.name))}"
            for f in fields(self)
            if f.name in TrainingArguments.__dataclass_fields__
            and "token" not in f.name
            and getattr(self, f.name) != default_of(f)
        }
        named = [setting for name, setting in changed.items() if name in text]
        return f"{', '.join(named or changed.values())} cannot be used: {text}"

    def to_dict(self) -> dict[str, Any]:
        """All fields, with access tokens that are set masked."""
        shown: dict[str, Any] = super().to_dict()
        for name in ("stop_token", "hub_token", "push_to_hub_token"):
            if name == "stop_token" or getattr(self, name) is None:
                shown[name] = getattr(self, name)
        return shown

    def __str__(self) -> str:
        lines = (f"    {name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __repr__ = __str__

    @property
    def length_option(self) -> str:
        """The name of ``response_length`` to use in messages."""
        return "response_length"

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL in the loss, in addition to ``kl_coef`` in the reward."""
        return 0.0

    def validate(self) -> None:
        """Check every field again, since values may have been set after construction.

        Raises:
            ConfigError: a value or a combination that cannot work.
        """
        apply_support(self, self.SUPPORT)
        check_values(self)
        check_rollout(self)

    def checked(self: Config) -> Config:
        """A checked copy; the config itself is never changed.

        Raises:
            ConfigError: a value or a combination that cannot work.
        """
        config = copy.copy(self)
        config.validate()
        return config

    def _resolve_precision(self) -> None:
        has_bf16 = is_torch_bf16_gpu_available() and not self.use_cpu
        if self.bf16 is None:
            self.bf16 = has_bf16 and not self.fp16
        elif self.bf16 and not _has_gpu():
            self.use_cpu = True  # TrainingArguments accepts bf16 without a GPU only with use_cpu
        if self.fp16 and (self.use_cpu or not is_torch_cuda_available()):
            raise ConfigError("fp16=True needs a CUDA device; set bf16=True or leave both unset")

    def _fill_defaults(self) -> None:
        # Newer transformers call it activation_checkpointing and warn about the old name.
        if getattr(self, "activation_checkpointing", False) is None:
            self.activation_checkpointing = self.gradient_checkpointing
        if getattr(self, "activation_checkpointing_kwargs", False) is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        if self.min_p is None:
            self.min_p = 0.0
        if self.report_to is None:
            self.report_to = "none"
        if self.run_name is None and self.exp_name != type(self).exp_name:
            self.run_name = self.exp_name
        wants_best = self.load_best_model_at_end or self.save_strategy == "best"
        if wants_best and self.metric_for_best_model is None:
            self.metric_for_best_model = "objective/scores"
            self.greater_is_better = True


def _has_gpu() -> bool:
    return is_torch_cuda_available() or is_torch_bf16_gpu_available()
