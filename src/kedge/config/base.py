"""Options that every Trainer-style trainer has."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_cuda_available

from kedge.config.compat.transformers4 import RemovedArguments
from kedge.config.declare import check_fields, default_of, option
from kedge.config.option_status import FIELD_SUPPORT
from kedge.config.options import Support, apply_support
from kedge.config.rollout import RolloutArguments, rollout_options
from kedge.config.validate import check_values
from kedge.config.values import MOST, shown
from kedge.errors import ConfigError

KLEstimator = Literal["k1", "k2", "k3", "abs", "full"]


@dataclass(repr=False)
class OnPolicyConfig(RolloutArguments, RemovedArguments, TrainingArguments):
    """The options of ``transformers.TrainingArguments``, and those that every algorithm has.

    Every field is listed with where it acts, or why it is refused, in ``SUPPORT``.  ``max_steps``,
    ``logging_steps``, ``save_steps``, ``eval_steps`` and ``warmup_steps`` count updates: one batch
    of responses, trained on for ``num_ppo_epochs`` x ``num_mini_batches`` optimizer steps.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    SUPPORT: ClassVar[Mapping[str, Support]] = FIELD_SUPPORT
    given: ClassVar[frozenset[str]] = frozenset()  # on an instance: the options that were set
    SETTLED: ClassVar[Mapping[str, Any]] = {}  # what unset fields become, if that is no default

    # TrainingArguments with other defaults.
    logging_steps: float = option(
        10, "Log every so many updates; below 1, a fraction of the run.", ge=0
    )
    gradient_checkpointing: bool | None = option(
        True, "Recompute activations in the backward pass: less memory, about a third slower."
    )
    bf16: bool | None = option(  # type: ignore[assignment]
        None,
        "Autocast to bfloat16 over float32 weights. Unset: on a GPU that can, and off elsewhere.",
    )
    report_to: None | str | list[str] = option(  # noqa: RUF036  (HfArgumentParser reads this order)
        None, "Where metrics go: tensorboard, wandb, trackio or a list. Unset: nowhere but files."
    )
    trackio_space_id: str | None = option(
        "trackio",
        "Hugging Face Space of the trackio dashboard, with report_to=trackio. Local without login.",
    )
    run_name: str | None = option(None, "Name of the run in trackers. Unset: exp_name, if given.")

    # Batches and run length.
    exp_name: str = option("run", "Name of the experiment.")
    num_ppo_epochs: int = option(4, "Passes over each batch of responses.", ge=1)
    num_mini_batches: int = option(1, "Optimizer steps that each pass is cut into.", ge=1)
    total_episodes: int | None = option(
        None,
        "Responses to generate in the whole run. Unset: num_train_epochs or max_steps decide.",
        ge=1,
        le=MOST,
    )
    num_generations: int = option(1, "Responses per prompt.", ge=1)
    local_rollout_forward_batch_size: int = option(
        64, "Rows of one process at a time while generating, annotating and scoring.", ge=1
    )
    num_sample_generations: int = option(
        10, "Tables of sample completions shown over the run; 0 for none.", ge=0
    )
    log_token_rows: int = option(
        4,
        "Responses written token by token when metrics are logged, for kedge report; 0 for none.",
        ge=0,
    )
    log_completions_hub_repo: str | None = option(
        None,
        "Dataset repository on the hub that gets the tables of completions; private unless "
        "hub_private_repo=False.",
    )
    dataset_num_proc: int | None = option(None, "Processes that tokenize the dataset.", ge=1)
    world_size: int | None = option(None, "Filled in: processes.", ge=1)
    num_total_batches: int | None = option(None, "Filled in: updates in the run.", ge=1)
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
        "EleutherAI/pythia-160m", "Folder or name of the policy and the reference, for scripts."
    )
    reward_model_path: str = option(
        "EleutherAI/pythia-160m", "Folder or name of the reward model, for scripts."
    )
    model_adapter_name: str | None = option(None, "PEFT adapter that trains.")
    ref_adapter_name: str | None = option(
        None, "PEFT adapter that is the reference. Unset: the base model without adapter."
    )
    ds3_gather_for_generation: bool = option(
        True, "Always true: responses are sampled with whole weights."
    )
    allow_low_precision_weights: bool = option(
        False, "Train bf16 or fp16 weights, where small updates are rounded away."
    )

    # Sampling.
    response_length: int = option(53, "Most tokens of a response.", ge=1)
    min_new_tokens: int = option(0, "Stop tokens are banned before this many.", ge=0)
    temperature: float = option(
        0.7, "Logits are divided by it, in sampling and in training.", ge=1e-6, le=1000
    )
    top_k: int = option(0, "Sample among the k most likely tokens; 0 is off.", ge=0)
    top_p: float = option(
        1.0, "Sample among the most likely tokens of this mass; 1 is off.", gt=0, le=1
    )
    min_p: float = option(
        0.0,
        "Leave out tokens less likely than this share of the top; 0 is off.",
        ge=0,
        lt=1,
        accepts=float | None,
    )
    keep_sampling_mask: bool = option(
        False,
        "Record which tokens could be sampled, and train over those. For top_k, top_p, min_p.",
    )
    stop_token: Literal["eos"] | None = option(
        "eos",
        "End responses at the tokenizer's EOS token and at every eos_token_id of the model's "
        "generation_config; None (none on the command line): at neither.",
    )
    stop_token_id: int | None = option(None, "End responses at this token id, too.", ge=0)
    stop_token_ids: list[int] | None = option(
        None,
        "End responses at any of these token ids, too; for these alone set stop_token=None.",
        ge=0,
    )
    stop_strings: list[str] | None = option(None, "End responses after any of these texts, too.")

    # Rewards.
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the score of a response without stop token.", ge=0
    )
    non_eos_penalty: bool = option(
        False, "Replace the score of a response without stop token by penalty_reward_value."
    )
    non_stop_penalty: bool = option(False, "Another name of non_eos_penalty.")
    penalty_reward_value: float = option(-1.0, "The score that non_eos_penalty gives.")
    reward_weights: list[float] | None = option(
        None, "Weight of each reward source; the default is 1 each."
    )
    on_reward_error: Literal["raise", "score", "drop"] = option(
        "raise", "When a reward function fails: stop, give reward_error_score, or drop the row."
    )
    reward_error_score: float | None = option(None, "The score that on_reward_error=score gives.")

    # KL penalty.
    kl_coef: float = option(0.05, "Weight of the KL penalty in the reward.", ge=0)
    kl_estimator: KLEstimator = option("k1", "Estimator of the KL per token; full is exact.")
    adaptive_kl: bool = option(False, "Steer kl_coef toward kl_target.")
    kl_target: float = option(6.0, "KL per response, in nats, that adaptive_kl aims at.", gt=0)
    kl_horizon: float = option(10000.0, "Responses over which adaptive_kl acts.", gt=0)
    # Prompts.
    max_prompt_length: int | None = option(None, "Most tokens of a prompt.", ge=1)
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "What the chat template is given beside the messages, as JSON on the command line."
    )
    overlong_prompts: Literal["drop", "truncate"] = option(
        "drop", "Longer prompts are left out, or cut at the left."
    )
    shuffle_dataset: bool = option(True, "Shuffle the prompts anew on every pass.")

    # Evaluation.
    num_generations_eval: int | None = option(
        None,
        "Completions of each evaluation prompt, sampled as in training. Unset: one, nearly greedy.",
        ge=1,
    )
    eval_success_score: float | None = option(
        None, "A score at least this solves a prompt: logs eval_accuracy and eval_pass@k."
    )
    eval_against_start: bool = option(
        False, "Evaluate before training, and log the win rate against those completions."
    )

    # Engine.
    save_rollouts: str | None = option(None, "Folder that gets everything each update reads.")
    replay_rollouts: str | None = option(None, "Folder of save_rollouts to train from.")
    preflight: bool = option(True, "Check models, rewards and masks on one batch at the start.")
    max_lag: int = option(
        0, "Updates that sampling may be ahead of training; 0 is synchronous.", ge=0
    )
    rollout_schedule: Literal["in_order", "as_completed"] = option(
        "in_order",
        "With max_lag: whole batches in their order, or pieces of them as they are done, which is "
        "faster where lengths differ much and depends on timing.",
    )
    rollout_pieces: int | None = option(
        None, "Pieces of a batch, with as_completed. Unset: up to four for each engine.", ge=1
    )
    sampler_correction: Literal["auto", "off", "truncate", "mask"] | None = option(
        "auto",
        "Weigh tokens by learner against sampler: truncate or mask large weights, or off. auto: "
        "truncate from max_lag=2, in GRPO with vLLM what vllm_importance_sampling_* say, else off.",
    )
    sampler_correction_level: Literal["token", "sequence", "sequence_mean"] | None = option(
        None,
        "Weight of the token, of the response, or its geometric mean. Unset: token, or sequence "
        "where the ratio is that of whole responses (RLOO).",
    )
    sampler_correction_high: float | None = option(
        None,
        "Weights above it are lowered or masked. Unset: 2 for tokens, 5 for responses, 1.01 for "
        "sequence_mean.",
        gt=0,
        le=math.inf,
    )
    sampler_correction_low: float = option(0.0, "Weights below it are raised or masked.", ge=0)

    def __post_init__(self) -> None:
        check_fields(self)
        apply_support(self, self.SUPPORT)
        self._settle_precision()
        self._settle_defaults()
        check_values(self)
        rollout_options(self)
        given, launched = self.world_size, int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and not _has_gpu():
            self.use_cpu = True  # or the processes would not find one another
        # DeepSpeed's settings are filled in from it while TrainingArguments sets itself up.
        self.world_size = launched
        try:
            super().__post_init__()
        except Exception as error:  # of transformers, accelerate and DeepSpeed, of any kind
            raise ConfigError(self._blame(error)) from error
        unset_hf_deepspeed_config()  # models are loaded whole and cut later, whoever launched us
        self.world_size = self.distributed_state.num_processes if self.distributed_state else 1
        if self.world_size != launched:
            raise ConfigError(
                f"{launched} processes were launched, but this one is one of {self.world_size}; "
                "set use_cpu=True if they share no GPU, or launch one process"
            )
        if given not in (None, self.world_size):
            raise ConfigError(
                f"world_size={given} but {self.world_size} processes are running; leave it unset"
            )

    def _blame(self, error: Exception) -> str:
        """What transformers says, after the options that it names or that were changed."""
        text = " ".join(str(error).split()) or type(error).__name__
        changed = {
            f.name: f"{f.name}={shown(getattr(self, f.name))}"
            for f in fields(self)
            if f.name in TrainingArguments.__dataclass_fields__
            and "token" not in f.name
            and getattr(self, f.name) != default_of(f)
        }
        named = [each for name, each in changed.items() if name in text]
        return f"{', '.join(named or changed.values())} cannot work: {text}"

    def to_dict(self) -> dict[str, Any]:
        """Every field, with access tokens hidden; ``stop_token`` and what is unset are not."""
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
        """What this config's users call ``response_length``, for messages."""
        return "response_length"

    def validate(self) -> None:
        """Check every field again, for values that were set after construction.

        Raises:
            ConfigError: a value or a combination that cannot work.
        """
        apply_support(self, self.SUPPORT)
        check_values(self)
        rollout_options(self)

    def _settle_precision(self) -> None:
        gpu = is_torch_bf16_gpu_available() and not self.use_cpu
        if self.bf16 is None:
            self.bf16 = gpu and not self.fp16
        elif self.bf16 and not _has_gpu():
            self.use_cpu = True  # TrainingArguments wants bf16 on a CPU said in so many words
        if self.fp16 and (self.use_cpu or not is_torch_cuda_available()):
            raise ConfigError("fp16=True needs a CUDA device; set bf16=True or leave both unset")

    def _settle_defaults(self) -> None:
        # Newer transformers have another name for it, and warn about this one.
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
