"""The constructor arguments of a trainer, and checks of their types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from kedge import verifiers
from kedge.algorithms import Algorithm
from kedge.backends.data.table import read_table
from kedge.config.base import OnPolicyConfig
from kedge.errors import ConfigError
from kedge.protocols import RolloutEngine
from kedge.trainers.spec import TrainerSpec
from kedge.verifiers.base import Verifier
from kedge.verifiers.by_column import ByColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInputs:
    """The constructor arguments of a trainer; see ``kedge.PPOTrainer``."""

    spec: TrainerSpec
    args: OnPolicyConfig  # the trainer's checked copy
    processing_class: Any = None
    model: str | nn.Module | None = None
    ref_model: str | nn.Module | None = None
    reward_model: Any = None
    train_dataset: Any = None
    value_model: str | nn.Module | None = None
    data_collator: Any = None
    eval_dataset: Any = None
    optimizers: tuple[Any, Any] = (None, None)
    callbacks: list[Any] | None = None
    peft_config: Any = None
    reward_funcs: Any = None
    reward_weights: Sequence[float] | None = None
    reward_processing_classes: Any = None
    rollout_engine: RolloutEngine | None = None
    algorithm: Any = None
    quantization_config: Any = None
    environment: Any = None
    tools: Sequence[Any] | None = None
    environment_factory: Any = None
    rollout_func: Any = None
    trainer: Any = None  # that these arguments were passed to

    def __post_init__(self) -> None:
        check_kinds(self)
        check_verifiers(self)

    @classmethod
    def of(cls, spec: TrainerSpec, arguments: Mapping[str, Any]) -> TrainerInputs:
        """The arguments by name; names that are not arguments of a trainer are left out."""
        names = {f.name for f in fields(cls)}
        args = spec.checked_args(arguments["args"])
        values = {name: x for name, x in arguments.items() if name in names}
        return cls(**values | {"spec": spec, "args": args, "trainer": arguments.get("self")})

    def build_algorithm(self) -> Algorithm:
        """The algorithm; see ``TrainerSpec.build_algorithm``."""
        return self.spec.build_algorithm(
            self.args, self.algorithm, ref_model=self.ref_model, value_model=self.value_model
        )


def check_kinds(inputs: TrainerInputs) -> None:
    """Check the type of each argument before anything is loaded."""
    pair = inputs.optimizers
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ConfigError(
            f"optimizers={_shown(pair)} must be a pair (optimizer, scheduler), each may be None"
        )
    for name, value, methods in (
        ("optimizers[0]", pair[0], ("param_groups", "step")),
        ("optimizers[1]", pair[1], ("step", "state_dict")),
        (
            "rollout_engine",
            inputs.rollout_engine,
            ("shares_weights", "logprobs", "generate", "load_weights"),
        ),
        ("peft_config", inputs.peft_config, ("peft_type",)),
        ("data_collator", inputs.data_collator, ("__call__",)),
    ):
        missing = [method for method in methods if not hasattr(value, method)]
        if value is not None and (missing or isinstance(value, type)):
            lacks = f" (missing: {', '.join(missing)})" if missing else ""
            raise ConfigError(f"{name}={_shown(value)} must be {_WANTED[name]}{lacks}")
    if not isinstance(inputs.callbacks, list | tuple | None):
        raise ConfigError(f"callbacks={_shown(inputs.callbacks)} must be a list of callbacks")
    task = getattr(inputs.peft_config, "task_type", None)
    task = getattr(task, "value", task)
    if task not in (None, "CAUSAL_LM"):
        raise ConfigError(f"peft_config must have task_type='CAUSAL_LM', got {task!r}")


def check_verifiers(inputs: TrainerInputs) -> None:
    """Check that verifiers can run here, and that all verifiers named by dataset rows exist."""
    functions = inputs.reward_funcs
    functions = functions if isinstance(functions, list | tuple) else [functions]
    for function in functions:
        builtin = isinstance(function, str) and function.startswith("kedge.verifiers:")
        verifier = getattr(verifiers, function.rpartition(":")[2], None) if builtin else function
        if isinstance(verifier, Verifier):
            verifier.prepare()
    for verifier in (f for f in functions if isinstance(f, ByColumn)):
        for dataset in (inputs.train_dataset, inputs.eval_dataset):
            named = isinstance(dataset, Mapping) and verifier.column not in dataset
            for part in dataset.values() if named else [dataset]:
                table = None if part is None else read_table(part)
                if table is not None and verifier.column in table.names:
                    rows = table.take(range(len(table)), [verifier.column])
                    verifier.check(rows[verifier.column])


_WANTED = {
    "optimizers[0]": "a torch.optim.Optimizer instance, not its class",
    "optimizers[1]": "a torch learning-rate scheduler",
    "rollout_engine": "a kedge.protocols.RolloutEngine: an object with the properties"
    " shares_weights and logprobs and the methods generate(prompts, sampling=, seed=) and"
    " load_weights(weights, version); to choose an engine by name, set it in the config:"
    " rollout_engine='vllm'",
    "peft_config": "a PEFT configuration, such as peft.LoraConfig(...)",
    "data_collator": "a function of a list of {'input_ids', 'attention_mask'}",
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"
