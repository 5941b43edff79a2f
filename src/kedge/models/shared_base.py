"""One frozen base for several models: value and reward as adapters next to the policy's.

Policy, value, reference and reward model differ in small adapters and heads only, so that PPO holds
one base instead of four models.  Each forward pass activates one adapter; the reference is the base
without any, or a copy of an adapter that was trained before (``AdapterReference``).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kedge.models.backbone import read_backbone
from kedge.models.model import causal_parts, eval_mode
from kedge.models.packing import JoinedInput
from kedge.models.peft import (
    REFERENCE_ADAPTER,
    REWARD_ADAPTER,
    VALUE_ADAPTER,
    AdapterSwitch,
    adapter_parameters,
    without_notices,
)
from kedge.models.score_head import SHIFT, adapter_shift, save_adapter_shift
from kedge.models.value_head import ScalarHead
from kedge.ops.kernels import Kernels
from kedge.records.errors import ConfigError

logger = logging.getLogger(__name__)

_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # beginnings of init_lora_weights
_SCORE = ("score.weight", "score.modules_to_save.weight", "classifier.weight")
_SAVED_SCORE = "base_model.model.score.weight"


class AdapterValue(nn.Module):
    """A value model: the adapter ``VALUE_ADAPTER`` on the policy's base, and a head.

    ``shift`` is added to every value, as to the scores of the reward adapter it started from.
    """

    def __init__(self, policy: Any, head: ScalarHead, shift: float = 0.0) -> None:
        super().__init__()
        self.head, self.shift = head, shift
        self.switch = AdapterSwitch(policy)
        self._policy = (policy,)  # a tuple hides it: the policy is registered elsewhere
        self._backbone = (causal_parts(policy, verify=False).backbone,)

    @property
    def policy(self) -> Any:
        """The model that holds the adapter."""
        return self._policy[0]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The head's weights, then the adapter's under their names in the policy."""
        yield from super().named_parameters(*args, **kwargs)
        yield from adapter_parameters(self.policy, VALUE_ADAPTER).items()

    def forward(self, packed: JoinedInput, states: Tensor) -> Tensor:
        """Float32 [n]: the value of each of the flat ``states`` of packed rows."""
        with self.switch.active(VALUE_ADAPTER):
            hidden = read_backbone(self._backbone[0], packed).flatten(0, 1).index_select(0, states)
        return self.head(hidden).sum(1) + self.shift  # a single column

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the adapter with its head, as PEFT saves one of a sequence classifier.

        ``state`` has the full tensors of a sharded policy.
        """
        from peft import get_peft_model_state_dict

        tensors = get_peft_model_state_dict(
            self.policy, state, adapter_name=VALUE_ADAPTER, save_embedding_layers=False
        )
        tensors[_SAVED_SCORE] = self.head.summary.weight
        config = copy.deepcopy(self.policy.peft_config[VALUE_ADAPTER])
        config.task_type, config.modules_to_save, config.inference_mode = "SEQ_CLS", ["score"], True
        config.base_model_name_or_path = self.policy.get_base_model().name_or_path or None
        config.save_pretrained(folder)
        tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        save_adapter_shift(folder, self.shift)


def checkpointing_options(
    options: Mapping[str, Any] | None, value: nn.Module | None
) -> Mapping[str, Any] | None:
    """Options of activation checkpointing; a value adapter is recomputed with its own weights."""
    if not isinstance(value, AdapterValue):
        return options
    options = {"use_reentrant": False} | dict(options or {})
    if options["use_reentrant"]:
        raise ConfigError(
            "gradient_checkpointing_kwargs sets use_reentrant=True, which would recompute the"
            " value's activations with the policy's adapter; set use_reentrant=False with"
            " value_adapter"
        )
    return options | {"context_fn": value.switch.at_recompute}


def value_adapter(policy: Any, source: str | None = None) -> AdapterValue:
    """Add a trainable value adapter to a policy that is a PEFT model.

    ``source`` is the folder or hub name of an adapter with a score head to start from.  None: a new
    adapter with the settings of the policy's, and a head of zeros.
    """
    check_adapted(policy, "value_adapter=True")
    shift = 0.0
    if source is not None:
        shift = adapter_shift(source)
        weight = load_adapter(policy, source, VALUE_ADAPTER)
        if weight.shape[0] != 1:
            raise ConfigError(
                f"the adapter {source!r} has {weight.shape[0]} labels, but a value model needs one;"
                ' set value_source="policy"'
            )
        head = ScalarHead(weight.shape[1], bias=False)
        head.summary.weight.data.copy_(weight)
    else:
        config = copy.deepcopy(policy.peft_config[policy.active_adapter])
        config.modules_to_save = None
        config.init_lora_weights = True  # others may change the base under the policy
        with _keep_flags(policy):
            policy.add_adapter(VALUE_ADAPTER, config)
        weight = policy.get_input_embeddings().weight
        head = ScalarHead(weight.shape[1], bias=False).to(weight.device)
    for p in adapter_parameters(policy, VALUE_ADAPTER).values():
        p.data = p.data.to(torch.float32)
        p.requires_grad_(True)
    return AdapterValue(policy, head, shift)


def copy_adapter(policy: Any) -> str | None:
    """Add a frozen copy of the policy's active adapter; returns its name.

    None, without a copy, if PEFT cannot put another adapter next to this one: not LoRA, or LoRA
    that changes more of the base than its layers.
    """
    source = policy.active_adapter
    config = copy.deepcopy(policy.peft_config[source])
    kind = getattr(config.peft_type, "value", config.peft_type)
    more = (getattr(config, name, None) for name in ("layer_replication", "target_parameters"))
    if kind != "LORA" or config.bias != "none" or any(more):
        return None
    config.init_lora_weights = True  # other initializations change the base
    with _keep_flags(policy), without_notices():
        policy.add_adapter(REFERENCE_ADAPTER, config)
    copies = adapter_parameters(policy, REFERENCE_ADAPTER)
    for name, weight in adapter_parameters(policy, source).items():
        head, _, tail = f"{name}.".rpartition(f".{source}.")
        copied = copies[f"{head}.{REFERENCE_ADAPTER}.{tail}".rstrip(".")]
        copied.data = weight.detach().clone()
        copied.requires_grad_(False)
    return REFERENCE_ADAPTER


class AdapterRewardModel(nn.Module):
    """A reward model: the adapter ``source`` on the policy's base, and a score head.

    It has the attributes of a transformers sequence classifier that ``RewardModel`` reads.
    """

    base_model_prefix = "backbone"

    def __init__(self, policy: Any, source: str) -> None:
        super().__init__()
        check_adapted(policy, f"reward_adapter={source!r}")
        weight = load_adapter(policy, source, REWARD_ADAPTER)
        self.backbone = _AdapterBackbone(policy)
        self.score = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.score.weight.data.copy_(weight)
        self.requires_grad_(False)
        self.config = copy.deepcopy(policy.get_base_model().config)
        self.config.num_labels = weight.shape[0]
        setattr(self.config, SHIFT, adapter_shift(source))
        self.name_or_path = source

    def get_input_embeddings(self) -> nn.Module:
        """The policy's input embeddings."""
        return self.backbone.policy.get_input_embeddings()


class _AdapterBackbone(nn.Module):
    """The backbone of a policy with the reward adapter active."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy: Any
        self.__dict__["policy"] = policy  # bypasses registration: the learner owns it
        self._switch = AdapterSwitch(policy)
        self._backbone = (causal_parts(policy, verify=False).backbone,)

    def forward(self, **inputs: Any) -> Any:
        kernels = Kernels([self.policy]).active()
        with self._switch.active(REWARD_ADAPTER), eval_mode(self.policy), kernels:
            return self._backbone[0](**inputs)


def check_adapted(policy: nn.Module, option: str) -> None:
    """Check that the policy has an adapter, so that its base is frozen, as ``option`` needs."""
    if not hasattr(policy, "peft_config"):
        raise ConfigError(
            f"{option} shares the policy's frozen base, so the policy must train an adapter, got a"
            f" {type(policy).__name__} without one; pass peft_config (use_peft on the command line)"
        )


def changes_base(config: Any) -> bool:
    """Whether PEFT changes the weights of the base when it adds an adapter with these settings."""
    return str(getattr(config, "init_lora_weights", True)).lower().startswith(_CHANGE_BASE)


def load_adapter(policy: Any, source: str | Path, name: str) -> Tensor:
    """Load an adapter, frozen, next to the policy's own; returns its score head [labels, H]."""
    from peft import PeftConfig
    from peft.utils.save_and_load import load_peft_weights

    source = str(source)
    device = next(policy.parameters()).device
    try:
        weights = load_peft_weights(source, device="cpu")
        config = PeftConfig.from_pretrained(source)
    except Exception as error:  # readers of damaged files may raise anything
        raise ConfigError(f"the adapter {source!r} cannot be loaded: {error}") from error
    _check_same_base(policy, config, source, name)
    try:
        with _keep_flags(policy), without_notices():
            result = policy.load_adapter(source, name, torch_device=str(device))
    except Exception as error:
        raise ConfigError(f"the adapter {source!r} cannot be loaded: {error}") from error
    heads = [x for key, x in weights.items() if key.endswith(_SCORE)]
    if len(heads) != 1:
        raise ConfigError(
            f"the adapter {source!r} must have a score head (one weight named score) to be a reward"
            " or value model; train it with task_type SEQ_CLS"
        )
    loaded = adapter_parameters(policy, name)
    missing = [key for key in result.missing_keys if key in loaded]
    if missing or not loaded:
        raise ConfigError(
            f"the adapter {source!r} lacks {len(missing) or 'all'} of the weights that its"
            f" configuration names in the policy ({', '.join(missing[:2])}); it belongs to another"
            " base model"
        )
    base, own = config.base_model_name_or_path, policy.get_base_model().name_or_path
    if base and own and base != own:
        logger.warning(
            "the adapter %s was trained on the base %s, but the policy's base is %s; its scores"
            " are only right if both have the same weights",
            *(source, base, own),
        )
    return heads[0].float()


def _check_same_base(policy: Any, config: Any, source: str, name: str) -> None:
    """Refuse an adapter if it, or the policy's own, belongs to a base with changed weights."""
    own = policy.peft_config[policy.active_adapter]
    if changes_base(config):
        raise ConfigError(
            f"the adapter {source!r} has init_lora_weights={config.init_lora_weights!r}, which"
            " changes the base that it would share with the policy; convert it to plain LoRA with"
            " PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    if changes_base(own) and name != VALUE_ADAPTER:  # a value adapter may be from such a run
        raise ConfigError(
            f"the policy's adapter has init_lora_weights={own.init_lora_weights!r}, which changed"
            f" the base that the adapter {source!r} was trained on; pass the reward as a separate"
            " model (reward_model), or set init_lora_weights=True"
        )


@contextmanager
def _keep_flags(policy: Any) -> Iterator[None]:
    """Context that keeps ``requires_grad`` of a PEFT model's weights and its active adapter."""
    active, flags = policy.active_adapter, [(p, p.requires_grad) for p in policy.parameters()]
    try:
        yield
    finally:
        policy.set_adapter(active)
        for p, flag in flags:
            p.requires_grad_(flag)
