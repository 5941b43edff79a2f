"""Models of the step API: value heads, encoder-decoders, references, and what TRL adds to them."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils.hub import cached_file

from kedge.learner.reference import AdapterReference
from kedge.models.compatibility import cache_argument
from kedge.models.model import (
    LanguageModelParts,
    causal_parts,
    eval_mode,
    get_backbone,
    head_weight,
)
from kedge.models.packing import JoinedInput
from kedge.models.peft import quantization, with_adapter
from kedge.models.shared_base import check_adapted, load_adapter
from kedge.models.value_head import HEAD_FILE, ScalarHead
from kedge.ops.linear_logprob import Head
from kedge.records.errors import ConfigError
from kedge.rollout.embedded.decode import get_base_model

HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
PREFIX = "v_head."
_WHOLE = ("model.safetensors", "pytorch_model.bin")
LAYERS = (
    "transformer.h.{layer}",
    "model.decoder.layers.{layer}",
    "gpt_neox.layers.{layer}",
    "model.layers.{layer}",
    "decoder.block.{layer}",
)
SIMPLE_CHAT_TEMPLATE = (  # from trl.trainer.utils, for models without a template
    "{% for message in messages %}{{message['role'].capitalize() + ': ' + message['content']"
    " + '\n\n'}}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
HEAD_OPTIONS = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")


@contextmanager
def unwrap_model_for_generation(
    model: Any, accelerator: Any, is_peft_model: bool = False
) -> Iterator[Any]:
    """The model to call ``generate`` on; with ``is_peft_model`` without the adapter (reference)."""
    inner = accelerator.unwrap_model(model)
    with inner.pretrained_model.disable_adapter() if is_peft_model else nullcontext():
        yield inner


class ValueHead(ScalarHead):
    """A linear map from hidden states to one number, after dropout, in float32.

    The trainer runs models in evaluation mode, as TRL does: dropout would make the probability
    ratio of an unchanged policy differ from 1.  It is active if you train the model yourself.

    Args:
        config: of the model; its ``summary_dropout_prob`` takes precedence over the argument.
        summary_dropout_prob: dropout rate.
        v_head_init_strategy: "normal", or None for the usual initialization of a linear layer.
        v_head_initializer_range: standard deviation of "normal"; the bias is then 0.
    """

    def __init__(
        self,
        config: Any,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        super().__init__(hidden_size(config))
        rate = getattr(config, "summary_dropout_prob", summary_dropout_prob)
        self.dropout: nn.Module = nn.Dropout(rate) if rate else nn.Identity()
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.summary.weight, std=v_head_initializer_range)
        elif v_head_init_strategy is None:
            self.summary.reset_parameters()
        else:
            raise ConfigError(
                f'v_head_init_strategy must be "normal" or None, got {v_head_init_strategy!r}'
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """Float [..., H] -> float32 [..., 1]."""
        return super().forward(self.dropout(hidden))


class RewardAdapter:
    """A frozen reward adapter with a score head, next to a PEFT policy's own adapter."""

    def __init__(self, policy: Any, source: str | Path, name: str) -> None:
        check_adapted(policy, "reward_adapter")
        self.policy, self.weight = policy, load_adapter(policy, source, name)  # [labels, H]
        self._switch = AdapterReference(policy, name, build_parts)

    @torch.no_grad()
    def score(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Float32 [B, T, labels]: the score of each prefix of rows int64 [B, T]."""
        device = next(self.policy.parameters()).device
        with self._switch.active(), eval_mode(self.policy):
            backbone: Any = get_backbone(get_base_model(self.policy))
            hidden: Tensor = backbone(
                input_ids=ids.to(device),
                attention_mask=None if mask is None else mask.to(device),
                use_cache=False,
            ).last_hidden_state
        return hidden.float() @ self.weight.to(device).T


class PreTrainedModelWrapper(nn.Module):
    """A transformers or PEFT model with a value head; ``kwargs`` are those of ``ValueHead``."""

    transformers_parent_class: ClassVar[Any] = None
    lm_head_namings: ClassVar[tuple[str, ...]] = ("lm_head", "embed_out")  # read by users' programs
    supported_args: ClassVar[tuple[str, ...]] = HEAD_OPTIONS

    def __init__(self, pretrained_model: Any, **kwargs: Any) -> None:
        super().__init__()
        if pretrained_model.get_output_embeddings() is None:
            raise ConfigError(
                f"{type(pretrained_model).__name__} has no language-model head; load it with "
                f"{self.transformers_parent_class.__name__}"
            )
        self.pretrained_model = pretrained_model
        self.config = pretrained_model.config
        self.is_peft_model = hasattr(pretrained_model, "peft_config")
        self.is_loaded_in_8bit = bool(getattr(pretrained_model, "is_loaded_in_8bit", False))
        self.is_loaded_in_4bit = bool(getattr(pretrained_model, "is_loaded_in_4bit", False))
        self.reward_adapter: RewardAdapter | None = None
        self.v_head = ValueHead(self.config, **kwargs)
        places = set(map(str, getattr(pretrained_model, "hf_device_map", {}).values()))
        offloaded = sorted(places & {"cpu", "disk"})
        if offloaded and places != {"cpu"}:
            raise ConfigError(
                f"device_map places parts of the model on {' and '.join(offloaded)}, but a trained "
                "model must fit on its accelerators"
            )
        self.is_sequential_parallel = len(places) > 1
        self.v_head.to(pretrained_model.get_output_embeddings().weight.device)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path | nn.Module,
        *model_args: Any,
        reward_adapter: str | Path | None = None,
        reward_adapter_name: str = "reward_adapter",
        **kwargs: Any,
    ) -> Any:
        """A model with a value head, from a name, a folder or a model.

        A value head saved with the weights is loaded too (``read_value_head``).  Weights are
        loaded in float32 for training unless ``dtype`` is given.

        Args:
            pretrained_model_name_or_path: hub name, folder (of an adapter too), or a model.
            *model_args: of the transformers class.
            reward_adapter: folder or hub name of an adapter with a score head, for
                ``compute_reward_score``.
            reward_adapter_name: name under which it is loaded.
            **kwargs: options of ``ValueHead``; peft_config: create an adapter; is_trainable:
                whether a loaded adapter is trained; load_in_8bit, load_in_4bit; all others go to
                the transformers class.
        """
        head = {k: kwargs.pop(k) for k in HEAD_OPTIONS if k in kwargs}
        source, hub = pretrained_model_name_or_path, {k: kwargs[k] for k in HUB if k in kwargs}
        base = load_base(cls.transformers_parent_class, source, model_args, **kwargs)
        model = cls(base, **head)
        if not isinstance(source, nn.Module):
            head_weights = read_value_head(source, **hub)
            if head_weights:
                model.v_head.load_state_dict(head_weights)
        if reward_adapter is not None:
            model.reward_adapter = RewardAdapter(base, reward_adapter, reward_adapter_name)
        return model

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Logits float32 [B, T, V], the model's loss or None, values float32 [B, T].

        With ``return_past_key_values`` a fourth item, the keys and values.  For an
        encoder-decoder T counts the decoder's tokens.
        """
        if past_key_values is not None:
            name = cache_argument(self.pretrained_model) or "past_key_values"
            kwargs[name] = past_key_values
        kwargs["output_hidden_states"] = True
        out = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        states = getattr(out, "decoder_hidden_states", None) or out.hidden_states
        value = self.v_head(states[-1].to(self.v_head.summary.weight.device)).squeeze(-1)
        outputs = (out.logits.float(), out.loss, value)
        if not return_past_key_values:
            return outputs
        cache = getattr(out, "cache", None)
        return (*outputs, out.past_key_values if cache is None else cache)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``generate`` of the wrapped model."""
        return self.pretrained_model.generate(*args, **kwargs)

    def compute_reward_score(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Scores float32 [B, T, labels] of int64 [B, T] by the reward adapter."""
        if self.reward_adapter is None:
            raise ConfigError(
                "the model has no reward adapter; pass reward_adapter= to from_pretrained"
            )
        return self.reward_adapter.score(input_ids, attention_mask)

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute activations in the backward pass; the trainer has an option for it."""
        self.pretrained_model.gradient_checkpointing_enable(*args, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Store activations again."""
        self.pretrained_model.gradient_checkpointing_disable()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped model's tensors under its own names, the head's as "v_head.*".

        A tied weight is under its first name only, so that the result can be written as
        safetensors.  For a PEFT model only those of the head: ``save_pretrained`` saves the
        adapter.
        """
        base = {} if self.is_peft_model else self.pretrained_model.state_dict(*args, **kwargs)
        head = {f"{PREFIX}{k}": v for k, v in self.v_head.state_dict().items()}
        tied = self._tied()
        return {name: x for name, x in base.items() if name not in tied} | head

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the tensors of ``state_dict``."""
        head = {k.removeprefix(PREFIX): v for k, v in state_dict.items() if k.startswith(PREFIX)}
        rest = {k: v for k, v in state_dict.items() if not k.startswith(PREFIX)}
        tied = self._tied().items()
        rest = {name: rest[first] for name, first in tied if first in rest} | rest
        if rest or not self.is_peft_model:
            self.pretrained_model.load_state_dict(rest, strict=strict, assign=assign)
        return self.v_head.load_state_dict(head, strict=strict, assign=assign)

    def _tied(self) -> dict[str, str]:
        """Other names of tied weights in the wrapped model -> the first name."""
        first: dict[int, str] = {}
        weights = self.pretrained_model.named_parameters(remove_duplicate=False)
        names = {name: first.setdefault(id(p), name) for name, p in weights}
        return {name: kept for name, kept in names.items() if name != kept}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the model (for PEFT, the adapter) and ``value_head.safetensors``."""
        self.pretrained_model.save_pretrained(save_directory, **kwargs)
        self.v_head.save(save_directory)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload the files of ``save_pretrained``; see ``kedge.classic.reports.push``."""
        from kedge.ext.trl.classic.reports import push

        return push(self.save_pretrained, repo_id, **kwargs)


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """A causal language model with a value head."""

    transformers_parent_class = AutoModelForCausalLM


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper):
    """An encoder-decoder language model with a value head on its decoder."""

    transformers_parent_class = AutoModelForSeq2SeqLM
    lm_head_namings = ("lm_head", "embed_out", "output_projection")


def find_file(source: str | Path, name: str, hub: dict[str, Any]) -> Path | None:
    """A file in a folder or hub repository; None if it does not exist."""
    file = cached_file(
        str(source),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
    return None if file is None else Path(file)


def load_base(
    loader: Any,
    source: str | Path | nn.Module,
    args: tuple[Any, ...],
    *,
    peft_config: Any = None,
    is_trainable: bool = False,
    **options: Any,
) -> Any:
    """The base model for a value head: the given one, from files, or an adapter on its base."""
    if peft_config is not None and not hasattr(peft_config, "peft_type"):
        raise ConfigError(
            "peft_config must be a peft.PeftConfig such as LoraConfig, got "
            f"{type(peft_config).__name__}"
        )
    bits = [n for n in (8, 4) if options.pop(f"load_in_{n}bit", False)]
    if len(bits) > 1 or (bits and "quantization_config" in options):
        raise ConfigError("choose one of load_in_8bit, load_in_4bit and quantization_config")
    if bits:
        options["quantization_config"] = quantization(8 if bits[0] == 8 else 4)
    if "use_auth_token" in options:  # renamed in transformers 5
        options["token"] = options.pop("use_auth_token")
    dtype = options.pop("torch_dtype", None)
    options.setdefault("dtype", torch.float32 if dtype is None else dtype)
    hub = {k: options[k] for k in HUB if k in options}
    if isinstance(source, nn.Module):
        if not hasattr(source, "get_output_embeddings"):
            raise ConfigError(
                "from_pretrained needs a name, a folder, a transformers language model or a PEFT "
                f"model, got {type(source).__name__}"
            )
        model: Any = source
    elif find_file(source, "adapter_config.json", hub) is None:
        model = loader.from_pretrained(source, *args, **options)
    elif peft_config is None:
        from peft import PeftConfig, PeftModel

        stored = PeftConfig.from_pretrained(str(source), **hub)
        base = loader.from_pretrained(stored.base_model_name_or_path, *args, **options)
        return PeftModel.from_pretrained(base, str(source), is_trainable=is_trainable, **hub)
    else:
        raise ConfigError(
            f"{source} is already an adapter, so peft_config would add a second; remove it to "
            "continue training that adapter (is_trainable=True)"
        )
    if peft_config is None or hasattr(model, "peft_config"):
        return model
    return with_adapter(model, peft_config)


def hidden_size(config: Any) -> int:
    """Size of the hidden states that the output layer reads."""
    places = (config, getattr(config, "text_config", None), getattr(config, "decoder", None))
    for place in places:
        for name in ("word_embed_proj_dim", "hidden_size"):
            if getattr(place, name, None):
                return int(getattr(place, name))
    raise ConfigError(f"{type(config).__name__} must have a hidden_size for a value head")


def read_value_head(source: str | Path, **hub: Any) -> dict[str, Tensor]:
    """The tensors ``summary.weight`` [1, H] and ``summary.bias`` [1] of a saved model, or {}.

    Reads what Kedge writes, LLaMA-Factory's value_head.safetensors, and the "v_head." entries of
    TRL in model.safetensors or pytorch_model.bin, whole or sharded.  Only tensors are read from a
    .bin file, never objects.
    """
    head_file = find_file(source, HEAD_FILE, hub)
    if head_file is not None:
        return {name.removeprefix(PREFIX): x for name, x in _tensors(head_file, "").items()}
    for name in _WHOLE:
        index, files = find_file(source, f"{name}.index.json", hub), {name}
        if index is not None:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file for key, file in shards.items() if key.startswith(PREFIX)}
        tensors: dict[str, Tensor] = {}
        for path in (find_file(source, file, hub) for file in sorted(files)):
            tensors |= {} if path is None else _tensors(path, PREFIX)
        if tensors:
            return tensors
    return {}


def _tensors(file: Path, prefix: str) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                keys = [k for k in tensors.keys() if k.startswith(prefix)]  # noqa: SIM118
                return {k.removeprefix(prefix): tensors.get_tensor(k) for k in keys}
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise ConfigError(f"the value head in {file} cannot be read: {error}") from error
    except Exception as error:  # pickle.UnpicklingError if the file holds other objects
        raise ConfigError(
            f"{file} contains objects other than tensors, which could run arbitrary code; if you "
            f"trust it, convert it to safetensors ({error})"
        ) from error
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def create_reference_model(
    model: PreTrainedModelWrapper, num_shared_layers: int | None = None, pattern: str | None = None
) -> Any:
    """A frozen copy of a model in evaluation mode.

    With ``num_shared_layers`` N the weights below layer N (embeddings and N layers) are frozen in
    the policy too, and shared instead of copied.

    Args:
        model: a model of ``kedge.classic``.
        num_shared_layers: N; None: copy everything and freeze nothing in the policy.
        pattern: name pattern of layers, e.g. "transformer.h.{layer}"; None: detected.
    """
    if model.is_peft_model:
        raise ConfigError(
            "a PEFT model needs no reference model: its base without the adapter is the reference"
        )
    shared: list[str] = []
    if num_shared_layers is not None:
        shared = _weights_below(model, num_shared_layers, pattern)
    memo: dict[int, Any] = {}
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name in shared:
        weights[name].requires_grad_(False)
        memo[id(weights[name])] = weights[name]  # deepcopy keeps these tensors
    reference = copy.deepcopy(model, memo)
    return reference.requires_grad_(False).eval()


def _weights_below(model: nn.Module, layer: int, pattern: str | None) -> list[str]:
    """Names of the weights below a layer, in model order."""
    names = [name for name, _ in model.named_parameters()]
    chosen = pattern or next((p for p in LAYERS if _first(names, p, 0) is not None), None)
    if chosen is None:
        raise ConfigError(
            "num_shared_layers needs a known layer name pattern, but this model matches none of "
            f"{', '.join(LAYERS)}; pass pattern"
        )
    first = _first(names, chosen, layer)
    if first is None:
        count = next(n for n in itertools.count() if _first(names, chosen, n) is None)
        raise ConfigError(
            f"num_shared_layers must be 0 to {max(count - 1, 0)} for the {count} layers that match "
            f"{chosen!r}, got {layer}"
        )
    return names[:first]


def _first(names: list[str], pattern: str, layer: int) -> int | None:
    """Index of the first weight of a layer."""
    part = f".{pattern.format(layer=layer)}."
    return next((i for i, name in enumerate(names) if part in f".{name}"), None)


SUPPORTED_ARCHITECTURES = (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead)


@dataclass(frozen=True, slots=True)
class EncoderDecoderParts:
    """The encoder reads the prompt; the decoder continues its start token with the response."""

    encoder: nn.Module
    decoder: nn.Module
    output: nn.Module
    start: int
    scale: float = 1.0
    bias: Tensor | None = None  # float [1, V]; BART-like models have one

    def head(self) -> Head:
        """The output head with its current weights."""
        weight, bias = head_weight(self.output)
        if self.bias is not None:
            logits_bias = self.bias.to(weight.device)[0]
            bias = logits_bias if bias is None else bias + logits_bias
        return Head(weight, bias, self.scale)

    def pack(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        ids: Tensor,
        response_mask: Tensor,
        context_start: Tensor | None = None,
    ) -> JoinedInput:
        """Prompts right-padded for the encoder, start token and response for the decoder."""
        assert context_start is None  # classic trainers have no environments
        order = prompt_mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        width = int(prompt_mask.sum(1).max())
        source = prompt_ids.masked_fill(~prompt_mask, 0).gather(1, order)[:, :width]
        longest = int(response_mask.sum(1).max())
        target = ids.masked_fill(~response_mask, self.start)[:, :longest]
        begin = target.new_full((len(target), 1), self.start)
        return JoinedInput(
            ids=torch.cat([begin, target], dim=1),
            lengths=response_mask.sum(1) + 1,
            prompt_lengths=torch.ones_like(target.sum(1)),
            source=(source, prompt_mask.gather(1, order)[:, :width].long()),
        )

    def read(self, packed: JoinedInput) -> Tensor:
        """Last hidden states of the decoder, start token included."""
        assert packed.source is not None  # set by ``pack``
        ids, mask = packed.source
        encoded = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        hidden: Tensor = self.decoder(
            input_ids=packed.ids,
            encoder_hidden_states=encoded,
            encoder_attention_mask=mask,
            use_cache=False,
        ).last_hidden_state
        return hidden


def build_parts(model: nn.Module, *, verify: bool = True) -> LanguageModelParts:
    """Backbone and head of a causal or an encoder-decoder language model.

    With ``verify``, checks on a few tokens that its logits come from a linear head.
    """
    inner: Any = get_base_model(model)
    config: Any = getattr(inner, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return causal_parts(model, verify=verify)
    name, output = type(inner).__name__, inner.get_output_embeddings()
    if output is None or config.decoder_start_token_id is None:
        raise ConfigError(
            f"{name} cannot be a policy: it lacks an output layer or config.decoder_start_token_id"
        )
    scaled = getattr(config, "scale_decoder_outputs", None)  # T5
    if scaled is None:
        scaled = config.model_type in {"t5", "umt5"} and config.tie_word_embeddings
    parts = EncoderDecoderParts(
        encoder=inner.get_encoder(),
        decoder=inner.get_decoder(),
        output=output,
        start=int(config.decoder_start_token_id),
        scale=float(config.d_model) ** -0.5 if scaled else 1.0,
        bias=getattr(inner, "final_logits_bias", None),
    )
    if verify:
        _verify(inner, parts, name)
    return parts


@torch.no_grad()
def _verify(model: nn.Module, parts: EncoderDecoderParts, name: str) -> None:
    """Compare with the model's own logits."""
    device = next(model.parameters()).device
    ids = torch.tensor([[5, 3, 4, 2]], device=device)
    real = torch.ones_like(ids, dtype=torch.bool)
    with eval_mode(model):
        packed = parts.pack(ids, real, ids, real)
        expected = model(input_ids=ids, decoder_input_ids=packed.ids).logits[0].float()
        hidden = parts.read(packed)[0]
        logits = parts.head().logits(hidden)
    gap = float((logits - expected).abs().max())
    slack = 1e-4 if expected.dtype == hidden.dtype else 0.05
    if not gap <= slack * (1 + float(expected.abs().max())):
        raise ConfigError(
            f"{name}: logits from backbone and head differ from the model's own by {gap:.3g}; it "
            "post-processes logits in a way that is not supported"
        )
