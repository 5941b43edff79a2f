"""Memory of a run in bytes per process, estimated from the configurations of its models.

Weights, gradients and optimizer state follow from parameter counts; activations and caches are
approximate: ``kedge plan --measure`` measures a run, and ``benchmarks/plan_memory.py`` compares.
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
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import find_engine
from kedge.errors import ConfigError
from kedge.loop.batch_sizes import BatchSizes
from kedge.models.freezing import train_top_layers
from kedge.models.load import configuration_source
from kedge.models.value_head import ScalarHead
from kedge.trl_scripts import get_peft_config

# Bytes of optimizer state per trained parameter, by the first of these that the name contains; ""
# is Adam, with two moments in float32.
OPTIMIZER_BYTES = {
    **{"4bit": 1.0, "lion_8bit": 1.0, "rmsprop_bnb_8bit": 1.0, "ademamix_8bit": 3.0, "8bit": 2.0},
    **{"sgd": 0.0, "adafactor": 0.1, "ademamix": 12.0},
    **{"lion": 4.0, "rmsprop": 4.0, "adagrad": 4.0, "": 8.0},
}
TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # of logits that exist at a time
KEPT_BYTES = 128 << 20  # of logits that wait for the backward pass, at most
PAGE = 4096  # bytes
SEND_BYTES = 2 << 30  # of the two buffers of vLLM's broadcast from GPU to GPU
SHARDED = ("policy", "reference", "value")  # by FSDP


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """Dimensions of a decoder, from which the size of activations and caches follows."""

    hidden: int
    layers: int
    intermediate: int
    cache: int  # numbers per token and layer: keys and values
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Parameters of a model, an adapter or a head, and its memory in bytes."""

    role: str
    total: int
    trained: int = 0
    layer: int = 0  # parameters of the largest layer
    root: int = 0  # parameters outside of layers: embedding and head
    frozen_width: float = 4.0  # bytes of a weight that does not train
    optimizer_width: float = 0.0  # bytes of optimizer state of a weight that trains
    activations: float = 0.0  # with the logits, of one micro-batch
    cache: float = 0.0  # keys, values and logits while responses are sampled

    @property
    def whole(self) -> bool:
        """Whether all weights train."""
        return self.trained == self.total

    @property
    def weights(self) -> float:
        """All weights; those that train are float32, and so are their gradients."""
        return (self.total - self.trained) * self.frozen_width + self.gradients

    @property
    def gradients(self) -> float:
        """Gradients of the trained weights."""
        return self.trained * 4.0

    @property
    def optimizer(self) -> float:
        """State of the optimizer."""
        return self.trained * self.optimizer_width

    @property
    def resident(self) -> float:
        """What stays for the whole run."""
        return self.weights + self.gradients + self.optimizer


def optimizer_bytes(optim: str) -> float:
    """Bytes of optimizer state per trained parameter."""
    return next(size for name, size in OPTIMIZER_BYTES.items() if name in optim)


def size_of(module: Any) -> int:
    """Number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


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
    config: Any, *, head: str = "score", adapter: Any = None, train_layers: int | None = None
) -> dict[str, int]:
    """``total``, ``trained``, ``layer`` and ``root`` of a model that is built on ``meta``.

    Args:
        config: the model's configuration.
        head: "causal" or "score" (one logit per sequence).
        adapter: a PEFT configuration, with which nothing but the adapter trains.
        train_layers: top layers that train; None: all.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.modeling_layers import GradientCheckpointingLayer

    with torch.device("meta"):
        if head == "causal":
            model: Any = AutoModelForCausalLM.from_config(config)
        else:
            config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(config)
        layers = [size_of(m) for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        root = size_of(model) - sum(layers)
        if train_layers is not None:
            backbone = getattr(model, model.base_model_prefix)
            if head == "score":  # a value model, which may have fewer than the policy
                train_layers = min(train_layers, int(config.get_text_config().num_hidden_layers))
            train_top_layers(backbone, train_layers, what="the policy")
        if adapter is not None:
            from peft import get_peft_model

            with warnings.catch_warnings():
                # peft asks transformers for a name that is going away.
                warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
                model = get_peft_model(model, adapter)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        **{"total": size_of(model), "trained": trained},
        **{"layer": max(layers, default=0), "root": root},
    }


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
        self.options, self.batches, self.names = options, batches, names
        self.read = partial(read_config, trust_remote_code=options.model.trust_remote_code)
        self.policy_config = self.read(names.policy)
        self.dims, self.adapter = read_dims(self.policy_config), get_peft_config(options.model)
        self.state = optimizer_bytes(str(getattr(config.optim, "value", config.optim)))
        self.width = 2 if config.bf16 or config.fp16 else 4
        self.length = prompt + config.response_length
        self.tokens = batches.micro_rows * self.length  # of a micro-batch
        if batches.max_tokens_per_micro_batch is not None:
            most = min(batches.local_mini_rows * self.length, batches.max_tokens_per_micro_batch)
            self.tokens = max(most, self.length)  # one row at least

    def models(self, algorithm: Algorithm) -> list[ModelMemory]:
        """Every model of the run, the policy first."""
        models = [policy := self.policy()]
        if self.config.kl_coef + self.config.loss_kl_coef > 0 and self.adapter is None:
            whole = self.config.train_layers is None  # else it shares the frozen weights
            own = {"total": policy.total if whole else policy.trained, "trained": 0}
            models.append(replace(policy, role="reference", **own, activations=0.0, cache=0.0))
        if algorithm.needs_values:
            models.append(self.value(policy))
        return models + self.rewards()

    def activations(self, dims: ModelDims) -> float:
        """Activations of a micro-batch that the backward pass needs, approximately.

        A block keeps about 10 hidden-sized and 4 intermediate-sized vectors per token; with
        checkpointing only one block's exist at a time, and the input of each.
        """
        block = 10 * dims.hidden + 4 * dims.intermediate
        depth = min(self.config.train_layers or dims.layers, dims.layers)
        kept = depth * dims.hidden + block if self.config.gradient_checkpointing else depth * block
        return float(self.tokens * (kept + 4 * dims.hidden) * self.width)

    def policy(self) -> ModelMemory:
        """The policy, with its adapter."""
        config, flags, dims = self.config, self.options.model, self.dims
        layers, frozen, activations = config.train_layers, 4.0, self.activations(dims)
        if flags.load_in_4bit or flags.load_in_8bit:
            frozen = 0.56 if flags.load_in_4bit else 1.0  # 4 bits and scales
        elif flags.dtype in ("bfloat16", "float16") or (
            flags.use_peft and config.bf16 and "dtype" not in self.options.given
        ):
            frozen = 2.0
        logits = self.tokens * config.response_length // self.length * dims.vocab * 4
        tile = TILE_BYTES["cpu" if config.device.type == "cpu" else "cuda"]
        activations += 2 * min(tile, logits) + min(KEPT_BYTES, logits)
        if config.cache_trunk and layers is not None and layers < dims.layers:
            activations += 4 * self.batches.local_rows * self.length * dims.hidden  # their input
        rows = min(self.batches.local_rows, config.local_rollout_forward_batch_size)
        return ModelMemory(
            role="policy",
            **count_parameters(
                self.policy_config, head="causal", adapter=self.adapter, train_layers=layers
            ),
            frozen_width=frozen,
            optimizer_width=self.state,
            activations=activations,
            cache=rows * (self.length * dims.layers * dims.cache * self.width + dims.vocab * 8.0),
        )

    def value(self, policy: ModelMemory) -> ModelMemory:
        """The value model, or the adapter or head on the policy."""
        source, count, activations = self.options.script.value_model_path, {}, 0.0
        start = getattr(self.config, "value_source", "policy")
        if source is None and start != "policy":
            source = self.names.policy if start == "copy" else self.names.reward
        if getattr(self.config, "value_adapter", False):
            role, own = "value adapter", policy.trained + self.dims.hidden
            activations = self.activations(self.dims)
        elif source is None:  # it reads the policy's passes
            role, own = "value head", size_of(ScalarHead(self.dims.hidden))
        else:
            role, own, config = "value", 0, self.read(source)
            count = count_parameters(config, train_layers=self.config.train_layers)
            activations = self.activations(read_dims(config))
        return ModelMemory(
            role=role,
            **count or {"total": own, "trained": own},
            optimizer_width=self.state,
            activations=activations,
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
            models.append(ModelMemory(role="reward", total=count_parameters(config)["total"]))
        if adapter is not None:
            from peft import PeftConfig

            try:
                saved = PeftConfig.from_pretrained(adapter)
            except (OSError, ValueError) as error:
                raise ConfigError(f"the adapter {adapter!r} cannot be read: {error}") from error
            saved.inference_mode, saved.modules_to_save = False, None
            count = count_parameters(self.policy_config, head="causal", adapter=saved)
            total = count["trained"] + self.dims.hidden
            models.append(ModelMemory(role="reward adapter", total=total))
        return models


def process_bytes() -> float:
    """What a process holds before it loads a model: Python, libraries and the tokenizer.

    Measured on this process, which has loaded them for the plan; 0 where the system does not tell.
    """
    status = Path("/proc/self/statm")
    return float(int(status.read_text().split()[1]) * PAGE) if status.exists() else 0.0


def peaks(
    models: list[ModelMemory],
    config: OnPolicyConfig,
    *,
    process: float = 0.0,
    ranks: int = 1,
    stage: int = 0,
) -> dict[str, float]:
    """Peak memory of each phase in bytes: what stays, and what the phase adds to it.

    With a ``stage``, of the first rank of a sharded run, which sends the weights.

    Args:
        models: all models of the run, unsharded, the policy first.
        config: of the run.
        process: bytes besides models, if they are in the memory of the process.
        ranks: number of learners.
        stage: of ZeRO: 1 and 2 leave weights gathered from the forward to the backward pass; 0:
            without sharding.
    """
    sampling = sum(m.cache for m in models)
    training = sum(m.activations for m in models)
    if not stage:
        resident = process + sum(m.resident for m in models)
        return {"sampling": resident + sampling, "training": resident + training}
    policy, sharded = models[0], [m for m in models if m.role in SHARDED]  # ranks hold others whole
    resident = sum(m.resident / (ranks if m in sharded else 1) for m in models)
    sync, sampling = 0.0, sampling + policy.weights
    if find_engine(config).copies_weights:
        # A layer and the root of the policy come back from the engines to be verified.
        sync, sampling = (policy.root + policy.layer) * 4.0 + SEND_BYTES, 0.0
    for m in sharded:
        if m.trained:  # gathered weights: at stage 3 the root, the layer that runs and the next
            training += m.weights * ((m.root + 2 * m.layer) / m.total if stage >= 3 else 1.0)
            training += (m.root + m.layer) * 4.0 if m.whole else 0.0  # gradients of a layer
    meanwhile = resident + (sync if config.max_lag else 0.0)  # engines load during training
    return {
        "sampling": meanwhile + sampling,
        "training": meanwhile + training,
        "weight sync": resident + sync,
    }
