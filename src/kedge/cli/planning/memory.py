"""Estimated memory of a run, from model configurations only.

Estimates per process, in bytes, before any sharding (FSDP, DeepSpeed ZeRO).  Weights, gradients
and optimizer state follow from parameter counts; activations and caches are approximate, and
``benchmarks/plan_memory.py`` compares them with what runs take.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kedge.errors import ConfigError
from kedge.ops.cpu.heap import WORTHWHILE

# Bytes of optimizer state per trained parameter, by the start of the optimizer's name.
OPTIMIZER_BYTES = {
    "adamw_bnb_8bit": 2.0, "adamw_8bit": 2.0, "adamw_torch_8bit": 2.0, "adamw_torch_4bit": 1.0,
    "paged_adamw_8bit": 2.0, "lion_8bit": 1.0, "paged_lion_8bit": 1.0, "ademamix_8bit": 3.0,
    "ademamix": 12.0, "lion": 4.0, "paged_lion": 4.0, "rmsprop_bnb_8bit": 1.0, "rmsprop": 4.0,
    "adagrad": 4.0, "adafactor": 0.1,  # one row and one column per matrix
    "sgd": 0.0,
}  # fmt: skip
ADAM_BYTES = 8.0  # two moments in float32
PAGE = 4096
HEAP_SHARE = 0.45
TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # of logits that exist at a time
KEPT_BYTES = 128 << 20  # of logits that wait for the backward pass at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the size of activations and caches follows from."""

    hidden: int
    layers: int
    intermediate: int
    cache: int  # numbers per token and layer: keys and values
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory of one model, in bytes."""

    role: str
    parameters: int
    trained: int
    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    training: float = 0.0  # activations and logits of one micro-batch
    generation: float = 0.0  # cache and logits while responses are sampled
    forward: float = 0.0  # activations of one pass without gradient

    @property
    def resident(self) -> float:
        """What stays for the whole run."""
        return self.weights + self.gradients + self.optimizer


def optimizer_bytes(optim: str) -> float:
    """Bytes of optimizer state per trained parameter."""
    fits = [name for name in OPTIMIZER_BYTES if optim.startswith(name)]
    return OPTIMIZER_BYTES[max(fits, key=len)] if fits else ADAM_BYTES


def read_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """A model's configuration, without its weights."""
    from transformers import AutoConfig

    from kedge.backends.hf.load import configuration_source

    try:
        base, _ = configuration_source(name)
        return AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the model {name!r} has no configuration to plan with: {error}"
        ) from error


def read_shape(config: Any) -> Shape:
    """The sizes of a decoder, whatever names its configuration has for them."""
    text = config.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    return Shape(
        hidden=hidden,
        layers=int(text.num_hidden_layers),
        intermediate=int(inner),
        cache=2 * int(kv_heads) * int(head_dim),
        vocab=int(text.vocab_size),
    )


def top_layers(shape: Shape, count: int | None) -> Shape:
    """A decoder of the last ``count`` layers; None: all."""
    return shape if count is None else replace(shape, layers=min(count, shape.layers))


def count_parameters(
    config: Any, *, head: str, adapter: Any = None, train_layers: int | None = None
) -> tuple[int, int]:
    """All and trained parameters of a model that is never built.

    Args:
        config: the model's configuration.
        head: "causal" or "score" (one logit per sequence).
        adapter: a PEFT configuration, with which nothing but the adapter trains.
        train_layers: top layers that train; None: all.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from kedge.backends.hf.freezing import train_top_layers

    with torch.device("meta"):
        if head == "causal":
            model: Any = AutoModelForCausalLM.from_config(config)
        else:
            config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(config)
        if train_layers is not None:
            backbone = getattr(model, model.base_model_prefix)
            train_top_layers(backbone, train_layers, what="the policy")
        if adapter is not None:
            from peft import get_peft_model

            with warnings.catch_warnings():
                # peft asks transformers for a name that is going away.
                warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
                model = get_peft_model(model, adapter)
    everything = list(model.parameters())
    return (
        sum(p.numel() for p in everything),
        sum(p.numel() for p in everything if p.requires_grad),
    )


def count_adapter(config: Any, source: str) -> int:
    """Parameters of a saved adapter on a base with this configuration.

    Raises:
        ConfigError: there is no such adapter.
    """
    from peft import PeftConfig

    try:
        adapter = PeftConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapter {source!r} cannot be read: {error}") from error
    adapter.inference_mode, adapter.modules_to_save = False, None
    return count_parameters(config, head="causal", adapter=adapter)[1]


def count_head(hidden: int) -> int:
    """Parameters of a value head on the policy."""
    from kedge.backends.hf.value_head import ScalarHead

    return sum(p.numel() for p in ScalarHead(hidden).parameters())


def activation_bytes(shape: Shape, tokens: int, *, width: int, checkpointing: bool) -> float:
    """Activations of one forward pass that the backward pass needs, approximately.

    A block keeps about 10 hidden-sized and 4 intermediate-sized vectors per token; with
    checkpointing only one block's exist at a time, and the input of each.
    """
    block = 10 * shape.hidden + 4 * shape.intermediate
    per_token = shape.layers * shape.hidden + block if checkpointing else shape.layers * block
    return float(tokens * (per_token + 4 * shape.hidden) * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The sizes of the forward passes of a run.

    Args:
        tokens: of a micro-batch.
        rows: at a time without gradient.
        length: tokens of the longest row.
        width: bytes of an activation.
        tile: bytes of the logits that exist at a time.
        kept_logits: bytes of the logits that wait for the backward pass.
        checkpointing: recompute activations.
    """

    tokens: int
    rows: int
    length: int
    width: int
    tile: float
    kept_logits: float
    checkpointing: bool

    def training(self, shape: Shape) -> float:
        """Activations of a micro-batch, with gradient."""
        return activation_bytes(
            shape, self.tokens, width=self.width, checkpointing=self.checkpointing
        )

    def kept(self, shape: Shape, rows: int, trained: int | None) -> float:
        """States below the trained layers, of all rows of an iteration, in float32.

        Args:
            shape: the sizes of the model.
            rows: of an iteration.
            trained: layers that train; None: all, and nothing is kept.
        """
        below = trained is not None and trained < shape.layers
        return 4.0 * rows * self.length * shape.hidden if below else 0.0

    def heap(self, shape: Shape) -> float:
        """What a CPU's heap grows by in a checkpointed pass through adapters; see ops/cpu/heap.py.

        The share of the activations was measured (``benchmarks/plan_memory.py``).
        """
        if not self.checkpointing:
            return 0.0
        whole = activation_bytes(shape, self.tokens, width=self.width, checkpointing=False)
        return HEAP_SHARE * whole

    def forward(self, shape: Shape) -> float:
        """Activations without gradient."""
        return forward_bytes(shape, self.rows * self.length, width=self.width)

    def sampling(self, shape: Shape) -> float:
        """Keys, values and logits."""
        cache = self.length * shape.layers * shape.cache * self.width
        return self.rows * (cache + shape.vocab * 8.0)


def trained(
    role: str,
    counts: tuple[int, int],
    *,
    weight_bytes: float,
    state_bytes: float,
    training: float,
    generation: float = 0.0,
    forward: float = 0.0,
) -> Need:
    """The memory of a trained model; trained weights are float32."""
    everything, learning = counts
    return Need(
        role=role,
        parameters=everything,
        trained=learning,
        weights=(everything - learning) * weight_bytes + learning * 4.0,
        gradients=learning * 4.0,
        optimizer=learning * state_bytes,
        training=training,
        generation=generation,
        forward=forward,
    )


def frozen(role: str, parameters: int, weight_bytes: float = 4.0, *, forward: float = 0.0) -> Need:
    """The memory of a frozen model."""
    return Need(
        role=role,
        parameters=parameters,
        trained=0,
        weights=parameters * weight_bytes,
        forward=forward,
    )


def process_bytes() -> float:
    """What a process holds before it loads a model: Python, libraries and the tokenizer.

    Measured on this process, which has loaded them for the plan; 0 where the system does not tell.
    """
    status = Path("/proc/self/statm")
    return float(int(status.read_text().split()[1]) * PAGE) if status.exists() else 0.0


def forward_bytes(shape: Shape, tokens: int, *, width: int) -> float:
    """Activations of one pass without gradient, approximately: those of one block."""
    return float(tokens * (6 * shape.hidden + 3 * shape.intermediate) * width)


def peaks(
    needs: list[Need], process: float = 0.0, *, checkpointing: bool = True
) -> dict[str, float]:
    """Peak memory of each phase of an iteration: what stays, and what the phase adds to it.

    Args:
        needs: of all models.
        process: bytes besides models, if they are in the memory of the process; its heap then keeps
            some of what training has freed, and all of it without ``checkpointing``.
        checkpointing: whether activations are checkpointed.
    """
    resident, training = process + sum(n.resident for n in needs), sum(n.training for n in needs)
    kept = (min(training, WORTHWHILE) if checkpointing else training) if process else 0.0
    phases = {
        "sampling": sum(n.generation for n in needs),
        "scoring": max((n.forward for n in needs if "reward" in n.role), default=0.0),
        "log-probabilities": max(n.forward for n in needs),
        "training": training,
    }
    return {name: resident + max(kept, added) for name, added in phases.items()}
