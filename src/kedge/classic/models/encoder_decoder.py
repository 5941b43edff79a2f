"""Encoder-decoder language models as backbone and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import ConfigError
from kedge.models.model import LanguageModelParts, causal_parts, eval_mode, head_weight
from kedge.models.packing import JoinedInput
from kedge.ops.linear_logprob import Head
from kedge.rollout.embedded.decode import get_base_model


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

    Raises:
        ConfigError: its logits do not come from a linear head over its hidden states.
    """
    inner = get_base_model(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return encoder_decoder_parts(inner, verify=verify)
    return causal_parts(model, verify=verify)


def encoder_decoder_parts(model: Any, *, verify: bool = True) -> EncoderDecoderParts:
    """Backbone and head of an encoder-decoder; by default checks them on a few tokens."""
    name, config = type(model).__name__, model.config
    output = model.get_output_embeddings()
    if output is None or config.decoder_start_token_id is None:
        raise ConfigError(
            f"{name} cannot be a policy: it lacks an output layer or config.decoder_start_token_id"
        )
    scaled = getattr(config, "scale_decoder_outputs", None)  # T5
    if scaled is None:
        scaled = config.model_type in {"t5", "umt5"} and config.tie_word_embeddings
    parts = EncoderDecoderParts(
        encoder=model.get_encoder(),
        decoder=model.get_decoder(),
        output=output,
        start=int(config.decoder_start_token_id),
        scale=float(config.d_model) ** -0.5 if scaled else 1.0,
        bias=getattr(model, "final_logits_bias", None),
    )
    if verify:
        _verify(model, parts, name)
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
