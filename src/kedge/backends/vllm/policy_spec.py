"""What a rollout engine has to know of a policy, apart from the weights of the moment."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kedge.backends.hf.fingerprint import check_weights
from kedge.backends.vllm.weight_payload import (
    WeightPayload,
    adapter_weights,
    base_weights,
    get_lora_config,
)
from kedge.errors import ConfigError, SyncError

_PROBE_ROWS, _PROBE_TOKENS = 4, 32
_ONE_AT_A_TIME = threading.Lock()  # weights are put into a module that engines share


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy without the weights that train.  It can be pickled and sent elsewhere.

    Args:
        skeleton: the policy; what trains is on the meta device, the rest is shared with it.
        tied: the names of the output head and of the embedding it shares its weight with.
        adapter: the LoRA configuration, where an adapter trains and nothing else.
        tokenizer: the policy's, or None; needed for stop strings only.
    """

    skeleton: nn.Module
    tied: tuple[str, str] | None
    tokenizer: Any = None
    adapter: Any = None

    @classmethod
    def of(cls, policy: nn.Module, tokenizer: Any = None) -> PolicySpec:
        """The blueprint of a transformers causal language model.

        Raises:
            ConfigError: an encoder-decoder model, or an adapter that vLLM does not take.
        """
        config: Any = policy.config
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{type(policy).__name__} is an encoder-decoder model, which vLLM engines are not"
                " given here; use rollout_engine='embedded'"
            )
        adapter = get_lora_config(policy)
        model: Any = policy
        base = policy if adapter is None else model.get_base_model()
        return cls(_skeleton(policy), _tied(base), tokenizer, adapter)

    @property
    def base(self) -> nn.Module:
        """The model itself, without an adapter around it."""
        wrapped: Any = self.skeleton
        return wrapped.get_base_model() if self.adapter is not None else self.skeleton

    @property
    def config(self) -> Any:
        """The model's configuration, as vLLM shall read it.

        A tied head is a weight of its own there, since vLLM does not follow a tied one when weights
        are exchanged; and there is no end-of-text token, since vLLM would ban it in
        ``min_new_tokens`` even where it is no stop token.
        """
        config: Any = copy.deepcopy(self.base.config)
        config.architectures = [type(self.base).__name__]
        config.eos_token_id = None
        if self.tied is not None:
            config.tie_word_embeddings = False
        return config

    def parcel(self, weights: Mapping[str, Tensor]) -> WeightPayload:
        """The weights that train, ready to be sent.

        Raises:
            SyncError: a weight is missing or unknown, or has another shape.
        """
        own = dict(self.skeleton.named_parameters())
        check_weights(own, weights)
        lacking = [name for name, p in own.items() if p.is_meta and name not in weights]
        if lacking:
            raise SyncError(f"the weights lack {lacking[0]!r}, which trains; send all that train")
        if self.adapter is not None:
            return WeightPayload(adapter_weights(weights), self.adapter)
        return WeightPayload(tuple(self._whole(own | dict(weights))), None)

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """A folder that vLLM can load: configuration, weights without adapter, tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        if self.tokenizer is not None:
            _without_eos(self.tokenizer).save_pretrained(folder)
        if self.adapter is None:
            self.parcel(weights).write(folder)
        else:
            held = base_weights(dict(self.skeleton.named_parameters()))
            WeightPayload(tuple(self._whole(held)), None).write(folder)

    def _whole(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All weights, and the head under a name of its own."""
        for name, x in weights.items():
            yield name, x.detach()
            if self.tied is not None and name == self.tied[1]:
                yield self.tied[0], x.detach()

    def probe(self) -> Tensor:
        """The token ids that receipts are about: int64 [rows, tokens], the same every time."""
        whole: Any = self.skeleton.config
        config = whole.get_text_config()
        most = getattr(config, "max_position_embeddings", None) or _PROBE_TOKENS
        size = (_PROBE_ROWS, min(_PROBE_TOKENS, most - 1))
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, config.vocab_size, size, generator=generator)

    @torch.no_grad()
    def logprobs(self, weights: Mapping[str, Tensor]) -> Tensor:
        """What the learner's own code computes for the probe: float32 [rows, tokens - 1], nats."""
        device = next(iter(weights.values())).device
        ids = self.probe().to(device)
        held = {n: p for n, p in self.skeleton.named_parameters() if not p.is_meta}
        given = {n: p.to(device) for n, p in held.items()} | dict(weights)
        with _ONE_AT_A_TIME:
            logits = functional_call(self.skeleton, given, kwargs={"input_ids": ids}).logits
        picked = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
        return picked[..., 0].cpu()


def _skeleton(policy: nn.Module) -> nn.Module:
    """A copy that shares frozen weights and has none where the policy trains."""
    trained = [p for p in policy.parameters() if p.requires_grad] or list(policy.parameters())
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in policy.parameters()
    }
    for p in trained:
        empty = torch.empty_like(p, device="meta")
        memo[id(p)] = nn.Parameter(empty, requires_grad=False)
    return copy.deepcopy(policy, memo).eval()


def _tied(policy: nn.Module) -> tuple[str, str] | None:
    """Names of the head's weight and of the embedding's, where they are one tensor."""
    model: Any = policy
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    names = {id(module): name for name, module in policy.named_modules()}
    return f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight"


def _without_eos(tokenizer: Any) -> Any:
    mine = copy.deepcopy(tokenizer)
    mine.eos_token = None
    return mine
