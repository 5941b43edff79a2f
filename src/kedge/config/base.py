"""Base class of the configs: ``transformers.TrainingArguments`` with more fields and checks."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import copy
import difflib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_cuda_available

from kedge.config.common import CommonArguments
from kedge.config.declare import (
    JSONFile,
    check_fields,
    default_of,
    format_value,
    log_without_effect,
    option,
    same,
    status,
    switch,
)
from kedge.records.errors import ConfigError, OptionError
from kedge.redaction import redact
from kedge.suggestions import TRAINER_ARGUMENTS, hint

Config = TypeVar("Config", bound="OnPolicyConfig")
# What a resumed run may change: options of these sections, except _SAME, and others by name.
_FREE_SECTIONS = {
    *("batch sizes and run length", "evaluation and logs", "checkpoints and hub", "process"),
    *("command line and scripts", "asynchronous PPO", "names of TRL"),
}
_SAME = {"seed", "tf32"}
_FREE = {
    *("dataset_num_proc", "cache_trunk", "model_init_kwargs", "trust_remote_code"),
    *("reward_timeout", "environment_timeout", "environment_concurrency", "preflight"),
    *("save_rollouts", "replay_rollouts", "vllm_tolerance", "ray_address", "ray_wait_seconds"),
    *("vllm_python", "weight_sync_folder", "worker_start_timeout", "worker_heartbeat"),
    *("worker_timeout", "rollout_timeout"),
}


@dataclass(repr=False)
class OnPolicyConfig(CommonArguments, TrainingArguments):
    """The options of ``transformers.TrainingArguments`` and those common to all algorithms.

    ``max_steps``, ``logging_steps``, ``save_steps``, ``eval_steps`` and ``warmup_steps`` count
    iterations: one batch of responses, trained on for ``num_ppo_epochs`` x ``num_mini_batches``
    optimizer steps.  Values are checked on construction, and again on the copy that a trainer
    makes.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    TYPES: ClassVar[Mapping[str, Any]] = {
        **CommonArguments.TYPES,
        "accelerator_config": dict[str, Any] | JSONFile | AcceleratorConfig | None,
    }
    CONVERTED: ClassVar[Sequence[str]] = ()  # options of a dialect that become other options

    # Fields of TrainingArguments with other defaults.
    logging_steps: float = option(
        10, "Number of iterations between two rows of metrics; below 1, a fraction of the run."
    )
    gradient_checkpointing: bool | None = option(
        True, "Recompute activations in the backward pass: less memory, about a third more time."
    )
    bf16: bool | None = switch(  # type: ignore[assignment]
        None,
        "Compute in bfloat16, with float32 weights. If unset, it is on if PyTorch says that the "
        "GPU supports it. It is slow on processors without bf16 instructions.",
    )
    report_to: None | str | list[str] = option(  # noqa: RUF036  (HfArgumentParser reads this order)
        None,
        "Where to send metrics: tensorboard, wandb, trackio, others that transformers supports, "
        "or a list. If unset, they are only written to files.",
    )
    trackio_space_id: str | None = option(
        "trackio",
        "The dashboard's Hugging Face Space, with report_to=trackio. Without a login, it is local.",
    )
    run_name: str | None = option(
        None, "Name of the run in trackers. If unset, exp_name, if that is set."
    )

    def __new__(cls, *args: Any, **options: Any) -> OnPolicyConfig:
        """Refuse unknown names with a suggestion."""
        known = {f.name for f in fields(cls) if f.init}
        unknown = options.keys() - known  # perhaps arguments of a subclass's own __init__
        for name in unknown and unknown - {*inspect.signature(cls.__init__).parameters}:
            problem = hint(name, known, config=cls.__name__)
            if name in TRAINER_ARGUMENTS:
                problem = "; it is an argument of the trainer"
            raise OptionError(f"{cls.__name__} has no option {name!r}{problem}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        own = {f.name: default_of(f) for f in fields(self) if f.init}
        self.changed_options = [n for n, x in own.items() if not same(getattr(self, n), x)]
        redact({f.name: getattr(self, f.name) for f in fields(self)})  # registers secrets
        check_fields(self)
        log_without_effect(self)
        self._resolve_precision()
        self._fill_defaults()
        self._converted = {name: getattr(self, name) for name in self.CONVERTED}
        self._check()
        processes = os.environ.get("WORLD_SIZE", "1")
        if not processes.isdigit():
            raise ConfigError(
                f"the environment variable WORLD_SIZE={processes!r} must be a number; unset it"
            )
        launched = int(processes)
        if launched > 1 and not _has_gpu():
            self.use_cpu = True  # otherwise the ranks do not form a process group
        # TrainingArguments fills in DeepSpeed's settings from this value.
        self.world_size = launched
        try:
            super().__post_init__()
        except Exception as error:  # transformers, accelerate and DeepSpeed raise any type
            raise ConfigError(self._explain(error)) from error
        unset_hf_deepspeed_config()  # models are loaded in full and sharded later
        self.world_size = self.distributed_state.num_processes if self.distributed_state else 1
        if self.world_size != launched:
            raise ConfigError(
                f"{launched} processes were launched, but this one sees {self.world_size}; "
                "set use_cpu=True if they have no GPU each, or launch one process"
            )

    def _explain(self, error: Exception) -> str:
        """The error of transformers, preceded by the options it names or that were set."""
        text = " ".join(str(error).split()) or type(error).__name__
        if (self.world_size or 1) > 1 and any(
            word in text for word in ("Gloo", "NCCL", "TCPStore")
        ):
            return (
                f"the {self.world_size} processes cannot reach each other: {text}; set"
                " GLOO_SOCKET_IFNAME, with GPUs NCCL_SOCKET_IFNAME, to the network interface that"
                " connects their machines"
            )
        theirs = TrainingArguments.__dataclass_fields__
        changed = {
            f.name: f"{f.name}={format_value(value)}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != default_of(f)
            and (f.name in theirs and "token" not in f.name)
        }
        named = [setting for name, setting in changed.items() if name in text]
        return f"{', '.join(named or changed.values())} cannot be used: {text}"

    def to_dict(self) -> dict[str, Any]:
        """All fields, with secrets masked."""
        shown: dict[str, Any] = super().to_dict()
        for name in ("stop_token", "hub_token"):
            if name == "stop_token" or getattr(self, name) is None:
                shown[name] = getattr(self, name)
        masked: dict[str, Any] = redact(shown)
        return masked

    def __str__(self) -> str:
        lines = (f"    {name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __repr__ = __str__

    def checked(self: Config) -> Config:
        """A copy for a trainer, checked again: options may have been set since construction."""
        config = copy.copy(self)
        names = {f.name for f in fields(self)}
        for name in vars(self).keys() - names:
            if near := difflib.get_close_matches(name, names, n=1, cutoff=0.85):
                raise OptionError(
                    f"{type(self).__name__} has no option {name!r}; the nearest is {near[0]}"
                )
        check_fields(config)
        for name, built in self._converted.items():
            if not same(value := getattr(self, name), built):
                raise ConfigError(
                    f"{name}={format_value(value)} is only read when the config is made; pass it to"
                    f" {type(self).__name__}(...)"
                )
        config._fill_defaults()
        config._check()
        return config

    def resume_values(self) -> dict[str, Any]:
        """The options that a resumed run must share with its checkpoint, by name."""
        sections = {f.name: status(type(self), f.name) for f in fields(self)}
        return {
            name: getattr(self, name)
            for name, section in sections.items()
            if isinstance(section, str)
            and (section not in _FREE_SECTIONS or name in _SAME)
            and name not in _FREE
        }

    def _resolve_precision(self) -> None:
        self.bf16_full_eval = self.fp16_full_eval = False  # no effect here, and rejected on CPUs
        has_bf16 = is_torch_bf16_gpu_available() and not self.use_cpu
        if self.bf16 is None:
            self.bf16 = has_bf16 and not self.fp16
        elif self.bf16 and not _has_gpu():
            self.use_cpu = True  # TrainingArguments accepts bf16 without a GPU only with use_cpu
        if self.fp16 and (self.use_cpu or not is_torch_cuda_available()):
            raise ConfigError("fp16=True needs a CUDA device; set bf16=True or leave both unset")

    def _fill_defaults(self) -> None:
        super()._fill_defaults()
        # Newer transformers call the option activation_checkpointing and warn about the old name.
        if getattr(self, "activation_checkpointing", False) is None:
            self.activation_checkpointing = self.gradient_checkpointing
        if getattr(self, "activation_checkpointing_kwargs", False) is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
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
