"""Base class of the configs: builds, checks and shows them."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_cuda_available

from kedge.config.common import CommonArguments
from kedge.config.compat.training_arguments import INHERITED
from kedge.config.compat.trl import TRL
from kedge.config.declare import (
    Alias,
    Foreign,
    Inherited,
    Unsupported,
    default_of,
    flags,
    option,
)
from kedge.config.options import ConfigType, fields_of, foreign, take
from kedge.config.rollout import check_rollout
from kedge.config.validate import check_combinations
from kedge.config.values import shown
from kedge.errors import ConfigError
from kedge.redaction import redact

Config = TypeVar("Config", bound="OnPolicyConfig")


@dataclass(repr=False)
class OnPolicyConfig(CommonArguments, TrainingArguments, metaclass=ConfigType):
    """The options of ``transformers.TrainingArguments`` and those common to all algorithms.

    ``max_steps``, ``logging_steps``, ``save_steps``, ``eval_steps`` and ``warmup_steps`` count
    iterations: one batch of responses, trained on for ``num_ppo_epochs`` x ``num_mini_batches``
    optimizer steps.  Names of other libraries are accepted as keywords (``FOREIGN``), and plain
    aliases can also be read and set.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """

    INHERITED: ClassVar[Mapping[str, Inherited]] = INHERITED
    FOREIGN: ClassVar[Mapping[str, Foreign]] = TRL
    UNSET: ClassVar[Mapping[str, Any]] = {}  # values of unset fields that differ from the default
    ON_CONSTRUCTION: ClassVar[Sequence[str]] = ()  # options that become others
    given: ClassVar[frozenset[str]] = frozenset()  # on an instance: the options that were set
    changed: ClassVar[bool] = False  # on an instance: options were set since they were checked

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

    def __post_init__(self) -> None:
        redact({f.name: getattr(self, f.name) for f in fields(self)})  # remembers secrets
        self._resolve_precision()
        self._fill_defaults()
        self._check()
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

    @property
    def length_option(self) -> str:
        """The name of ``response_length`` to use in messages."""
        return "response_length"

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL in the loss, in addition to ``kl_coef`` in the reward."""
        return 0.0

    def __getattr__(self, name: str) -> Any:
        entry = foreign(type(self)).get(name)
        if isinstance(entry, Alias) and entry.convert is None:
            return getattr(self, entry.target)
        if isinstance(entry, Unsupported):
            return entry.default
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        made = "given" in vars(self)  # until then, values come from `translate` or transformers
        if not made or (name not in fields_of(type(self)) and _is_attribute(self, name)):
            super().__setattr__(name, value)
            return
        target, taken = take(type(self), name, value)
        if target is None:
            return
        if target in self.ON_CONSTRUCTION and taken != getattr(self, target):
            raise ConfigError(
                f"{name}={shown(value)} is only read on construction of the config; pass it to the"
                " constructor"
            )
        super().__setattr__(target, taken)
        vars(self)["changed"] = True

    @classmethod
    def convert(cls, c: Any, given: Mapping[str, Any]) -> None:
        """Convert options whose meaning depends on others, before the config is built.

        Args:
            c: all options by attribute, under the names of the fields.
            given: keyword arguments under the names that the caller used.
        """

    def checked(self: Config) -> Config:
        """A copy for a trainer; combinations are checked again if an option was set since.

        Raises:
            ConfigError: a combination that cannot work.
        """
        config = copy.copy(self)
        if self.changed:
            config._fill_defaults()
            config._check()
            vars(config)["changed"] = False
        return config

    def validate(self) -> None:
        """Check combinations of options that were set after construction.

        Raises:
            ConfigError: a value or a combination that cannot work.
        """
        self.checked()

    def _check(self) -> None:
        """Check values and combinations, on construction and when a trainer gets the config."""
        check_combinations(self)
        check_rollout(self)

    def _resolve_precision(self) -> None:
        self.bf16_full_eval = self.fp16_full_eval = False  # without effect, and refused on CPUs
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


def _is_attribute(config: Any, name: str) -> bool:
    """Whether transformers or a subclass uses a name for something else than an option."""
    return name.startswith("_") or name in vars(config) or hasattr(type(config), name)


def _has_gpu() -> bool:
    return is_torch_cuda_available() or is_torch_bf16_gpu_available()


def _flag_aliases() -> None:
    """Let ``HfArgumentParser`` take the plain aliases of inherited fields as flags."""
    own = OnPolicyConfig.__dataclass_fields__
    for name, entry in TRL.items():
        if isinstance(entry, Alias) and entry.convert is None:
            field = own[entry.target] = copy.copy(own[entry.target])
            field.metadata = MappingProxyType({**field.metadata, "aliases": flags(name)})


_flag_aliases()
