"""Estimated memory of a run, from model configurations only.

Bytes per process, before any sharding (FSDP, DeepSpeed ZeRO).  Weights, gradients and optimizer
state follow from parameter counts; activations and caches are approximate, and
``benchmarks/plan_memory.py`` compares them with what runs take.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kedge.algorithms import Algorithm
from kedge.cli.arguments import Options
from kedge.cli.train.ppo import Names
from kedge.errors import ConfigError
from kedge.loop.batch_sizes import BatchSizes
from kedge.models.freezing import train_top_layers
from kedge.models.load import configuration_source
from kedge.models.value_head import ScalarHead
from kedge.trl_scripts import get_peft_config

# Bytes of optimizer state per trained parameter, by the start of the optimizer's name.
OPTIMIZER_BYTES = {
    "adamw_bnb_8bit": 2.0, "adamw_8bit": 2.0, "adamw_torch_8bit": 2.0, "adamw_torch_4bit": 1.0,
    "paged_adamw_8bit": 2.0, "lion_8bit": 1.0, "paged_lion_8bit": 1.0, "ademamix_8bit": 3.0,
    "ademamix": 12.0, "lion": 4.0, "paged_lion": 4.0, "rmsprop_bnb_8bit": 1.0, "rmsprop": 4.0,
    "adagrad": 4.0, "adafactor": 0.1,  # one row and one column per matrix
    "sgd": 0.0,
}  # fmt: skip
ADAM_BYTES = 8.0  # two moments in float32
PAGE = 4096  # bytes
TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # of logits that exist at a time
KEPT_BYTES = 128 << 20  # of logits that wait for the backward pass, at most
HEAP_SHARE = 0.45  # of all activations, by which a CPU's heap fragments in checkpointed LoRA passes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """Dimensions of a decoder, from which the size of activations and caches follows."""

    hidden: int
    layers: int
    intermediate: int
    cache: int  # numbers per token and layer: keys and values
    vocab: int

    def training_bytes(self, tokens: int, *, width: int, checkpointing: bool) -> float:
        """Activations that the backward pass needs, approximately.

        A block keeps about 10 hidden-sized and 4 intermediate-sized vectors per token; with
        checkpointing only one block's exist at a time, and the input of each.
        """
        block = 10 * self.hidden + 4 * self.intermediate
        per_token = self.layers * self.hidden + block if checkpointing else self.layers * block
        return float(tokens * (per_token + 4 * self.hidden) * width)

    def forward_bytes(self, tokens: int, *, width: int) -> float:
        """Activations of a pass without gradient, approximately: those of one block."""
        return float(tokens * (6 * self.hidden + 3 * self.intermediate) * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of a model, an adapter or a head, and of what FSDP gathers at a time."""

    total: int
    trained: int = 0
    layer: int = 0  # of the largest layer
    root: int = 0  # outside of layers: embedding and head
    largest: int = 0  # of the largest weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Memory of one model, in bytes; trained weights and gradients are float32."""

    role: str
    count: Parameters
    frozen_width: float = 4.0  # bytes of a weight that does not train
    optimizer_width: float = 0.0  # bytes of optimizer state of one that does
    training: float = 0.0  # activations and logits of one micro-batch
    generation: float = 0.0  # cache and logits while responses are sampled
    forward: float = 0.0  # activations of one pass without gradient

    @property
    def weights(self) -> float:
        """All weights."""
        frozen = self.count.total - self.count.trained
        return frozen * self.frozen_width + self.count.trained * 4.0

    @property
    def gradients(self) -> float:
        """Gradients of the trained weights."""
        return self.count.trained * 4.0

    @property
    def optimizer(self) -> float:
        """State of the optimizer."""
        return self.count.trained * self.optimizer_width

    @property
    def resident(self) -> float:
        """What stays for the whole run."""
        return self.weights + self.gradients + self.optimizer


def optimizer_bytes(optim: str) -> float:
    """Bytes of optimizer state per trained parameter."""
    names = [name for name in OPTIMIZER_BYTES if optim.startswith(name)]
    return OPTIMIZER_BYTES[max(names, key=len)] if names else ADAM_BYTES


def read_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """A model's configuration, without its weights."""
    from transformers import AutoConfig

    try:
        base, _ = configuration_source(name)
        return AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the model {name!r} has no configuration to plan with: {error}"
        ) from error


def read_dims(config: Any) -> ModelDims:
    """The dimensions of a decoder, whatever names its configuration has for them."""
    text = config.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    return ModelDims(
        hidden=hidden,
        layers=int(text.num_hidden_layers),
        intermediate=int(inner),
        cache=2 * int(kv_heads) * int(head_dim),
        vocab=int(text.vocab_size),
    )


def count_parameters(
    config: Any, *, head: str, adapter: Any = None, train_layers: int | None = None
) -> Parameters:
    """Parameters of a model that is never built.

    Args:
        config: the model's configuration.
        head: "causal" or "score" (one logit per sequence).
        adapter: a PEFT configuration, with which nothing but the adapter trains.
        train_layers: top layers that train; None: all.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.modeling_layers import GradientCheckpointingLayer

    def size(module: Any) -> int:
        return sum(p.numel() for p in module.parameters())

    with torch.device("meta"):
        if head == "causal":
            model: Any = AutoModelForCausalLM.from_config(config)
        else:
            config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(config)
        layers = [size(m) for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        root, largest = size(model) - sum(layers), max(p.numel() for p in model.parameters())
        if train_layers is not None:
            backbone = getattr(model, model.base_model_prefix)
            train_top_layers(backbone, train_layers, what="the policy")
        if adapter is not None:
            from peft import get_peft_model

            with warnings.catch_warnings():
                # peft asks transformers for a name that is going away.
                warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
                model = get_peft_model(model, adapter)
    return Parameters(
        total=size(model),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        layer=max(layers, default=0),
        root=root,
        largest=largest,
    )


def count_saved_adapter(config: Any, source: str) -> int:
    """Parameters of a saved reward adapter and its head, on a base with this configuration."""
    from peft import PeftConfig

    try:
        adapter = PeftConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapter {source!r} cannot be read: {error}") from error
    adapter.inference_mode, adapter.modules_to_save = False, None
    count = count_parameters(config, head="causal", adapter=adapter)
    return count.trained + read_dims(config).hidden


class Estimate:
    """The memory of the models of a run.

    Args:
        options: of the run.
        batches: its sizes.
        names: its models.
        prompt: tokens of the longest prompt.
    """

    def __init__(self, options: Options, batches: BatchSizes, names: Names, prompt: int) -> None:
        config = self.config = options.config
        self.options, self.names = options, names
        trust = options.model.trust_remote_code
        self.read = partial(read_config, trust_remote_code=trust)
        self.policy_config = self.read(names.policy)
        self.dims, self.adapter = read_dims(self.policy_config), get_peft_config(options.model)
        self.state = optimizer_bytes(str(getattr(config.optim, "value", config.optim)))
        self.width = 2 if config.bf16 or config.fp16 else 4
        self.length, self.local_rows = prompt + config.response_length, batches.local_rows
        self.tokens = batches.micro_rows * self.length  # of a micro-batch
        if batches.max_tokens_per_micro_batch is not None:
            most = min(batches.local_mini_rows * self.length, batches.max_tokens_per_micro_batch)
            self.tokens = max(most, self.length)  # one row at least
        # without gradient:
        self.rows = min(batches.local_rows, config.local_rollout_forward_batch_size)
        self.logits = self.tokens * config.response_length // self.length * self.dims.vocab * 4
        self.tile = min(TILE_BYTES["cpu" if config.device.type == "cpu" else "cuda"], self.logits)

    def models(self, algorithm: Algorithm) -> list[ModelMemory]:
        """Every model of the run, the policy first."""
        policy, layers = self.policy(), self.config.train_layers
        models = [policy]
        if self.config.kl_coef + self.config.loss_kl_coef > 0 and self.adapter is None:
            own = policy.count.total if layers is None else policy.count.trained  # shares the rest
            count = replace(policy.count, total=own, trained=0)
            frozen = {"training": 0.0, "generation": 0.0}
            models.append(replace(policy, role="reference", count=count, **frozen))
        if algorithm.needs_values:
            models.append(self.value(policy))
        return models + self.rewards()

    def training(self, dims: ModelDims) -> float:
        """Activations of a micro-batch, with gradient."""
        layers, checkpointing = self.config.train_layers, bool(self.config.gradient_checkpointing)
        if layers is not None:
            dims = replace(dims, layers=min(layers, dims.layers))
        return dims.training_bytes(self.tokens, width=self.width, checkpointing=checkpointing)

    def forward(self, dims: ModelDims) -> float:
        """Activations of a pass without gradient."""
        return dims.forward_bytes(self.rows * self.length, width=self.width)

    def policy(self) -> ModelMemory:
        """The policy, with its adapter."""
        config, flags, dims = self.config, self.options.model, self.dims
        layers, frozen = config.train_layers, 4.0
        if flags.load_in_4bit or flags.load_in_8bit:
            frozen = 0.56 if flags.load_in_4bit else 1.0  # 4 bits and scales
        elif flags.dtype in ("bfloat16", "float16") or (
            flags.use_peft and config.bf16 and "dtype" not in self.options.given
        ):
            frozen = 2.0
        training = self.training(dims) + 2 * self.tile + min(KEPT_BYTES, self.logits)
        if config.cache_trunk and layers is not None and layers < dims.layers:
            training += 4 * self.local_rows * self.length * dims.hidden  # states below those layers
        if self.adapter and config.gradient_checkpointing and config.device.type == "cpu":
            whole = dims.training_bytes(self.tokens, width=self.width, checkpointing=False)
            training += HEAP_SHARE * whole
        cache = self.length * dims.layers * dims.cache * self.width
        return ModelMemory(
            role="policy",
            count=count_parameters(
                self.policy_config, head="causal", adapter=self.adapter, train_layers=layers
            ),
            frozen_width=frozen,
            optimizer_width=self.state,
            training=training,
            generation=self.rows * (cache + dims.vocab * 8.0),
            forward=self.forward(dims) + self.tile,
        )

    def value(self, policy: ModelMemory) -> ModelMemory:
        """The value model, or the adapter or head on the policy."""
        source, dims = self.options.script.value_model_path, self.dims
        if source is None and getattr(self.config, "value_source", "policy") != "policy":
            source = self.names.reward
        if getattr(self.config, "value_adapter", False):
            own = policy.count.trained + dims.hidden
            role, count = "value adapter", Parameters(total=own, trained=own)
        elif source is not None:
            config, layers = self.read(source), self.config.train_layers
            dims = read_dims(config)
            top = None if layers is None else min(layers, dims.layers)
            role, count = "value", count_parameters(config, head="score", train_layers=top)
        else:  # which reads the policy's passes
            own = sum(p.numel() for p in ScalarHead(dims.hidden).parameters())
            head = Parameters(total=own, trained=own)
            return ModelMemory(role="value head", count=head, optimizer_width=self.state)
        return ModelMemory(
            role=role,
            count=count,
            optimizer_width=self.state,
            training=self.training(dims),
            forward=self.forward(dims),
        )

    def rewards(self) -> list[ModelMemory]:
        """The reward model, and the reward adapter."""
        models, name, adapter = [], self.names.reward, self.config.reward_adapter
        if name is not None:
            config = self.read(name)
            kinds = ", ".join(getattr(config, "architectures", None) or [])
            whole = configuration_source(name)[0] == name  # an adapter has the head
            if "ForCausalLM" in kinds and whole and not self.options.script.dummy_reward:
                raise ConfigError(f"reward model {name!r} has no score head (it is {kinds})")
            count = replace(count_parameters(config, head="score"), trained=0)
            forward = self.forward(read_dims(config))
            models.append(ModelMemory(role="reward", count=count, forward=forward))
        if adapter is not None:
            count = Parameters(total=count_saved_adapter(self.policy_config, adapter))
            forward = self.forward(self.dims)
            models.append(ModelMemory(role="reward adapter", count=count, forward=forward))
        return models


def process_bytes() -> float:
    """What a process holds before it loads a model: Python, libraries and the tokenizer.

    Measured on this process, which has loaded them for the plan; 0 where the system does not tell.
    """
    status = Path("/proc/self/statm")
    return float(int(status.read_text().split()[1]) * PAGE) if status.exists() else 0.0


def peaks(models: list[ModelMemory], process: float = 0.0) -> dict[str, float]:
    """Peak memory of each phase of an iteration: what stays, and what the phase adds to it.

    Args:
        models: all models of the run.
        process: bytes besides models, if they are in the memory of the process.
    """
    resident = process + sum(m.resident for m in models)
    return {
        "sampling": resident + sum(m.generation for m in models),
        "scoring": resident + max((m.forward for m in models if "reward" in m.role), default=0.0),
        "log-probabilities": resident + max(m.forward for m in models),
        "training": resident + sum(m.training for m in models),
    }
