"""Policy and value in one module, so that one forward pass serves both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kedge.errors import ConfigError
from kedge.learner.reference import Reference
from kedge.learner.sharding import call_within
from kedge.models.joined_rows import joins_rows
from kedge.models.model import CausalParts, LanguageModelParts
from kedge.models.packing import Packed, place
from kedge.models.shared_base import AdapterValue
from kedge.models.value_head import ScalarHead, ScalarModel
from kedge.ops.linear_logprob import linear_logprob
from kedge.ops.logit_tiles import TokenConstraints

Value = ScalarModel | AdapterValue | ScalarHead


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """The log-probabilities and values that one forward pass returns.

    Masks become indices on the host, so that the forward pass never waits for the device.

    Args:
        packed: prompts and responses.
        states: int64 [n]; flat indices of the states before the n tokens.
        targets: int64 [n]; ids of these tokens.
        slots: int64 [n]; flat indices of these tokens in the response [b, R].
        constraints: temperature and allowed tokens at these positions.
        shape: (b, R).
        value_states: int64 [m]; flat indices of the states to compute the value of; None: no value.
        value_slots: int64 [at most m]; flat indices in [b, R] of the first of these values.
        policy: compute log-probabilities.
        only_value: no gradient for the policy, including its backbone.
        entropy_grad: the entropies have a gradient.
    """

    packed: Packed
    states: Tensor
    targets: Tensor
    slots: Tensor
    constraints: TokenConstraints
    shape: torch.Size
    value_states: Tensor | None = None
    value_slots: Tensor | None = None
    policy: bool = True
    only_value: bool = False
    entropy_grad: bool = False

    def hidden(self, parts: LanguageModelParts) -> Tensor:
        """States float [n, H] of a model before the n tokens."""
        return parts.read(self.packed).flatten(0, 1).index_select(0, self.states)

    def logprobs(self, parts: LanguageModelParts, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [n] of the tokens from ``hidden``."""
        return linear_logprob(
            hidden,
            parts.head(),
            self.targets,
            constraints=self.constraints,
            entropy_grad=self.entropy_grad,
        )

    def tokens(self, x: Tensor) -> Tensor:
        """Values [n] of the tokens at their slots [b, R]; 0 elsewhere."""
        return place(x, self.slots, self.shape)

    def values(self, x: Tensor) -> Tensor:
        """The values [m] that have a slot at their slots [b, R]; 0 elsewhere."""
        assert self.value_slots is not None  # requested
        return place(x[: len(self.value_slots)], self.value_slots, self.shape)


def build_request(
    parts: LanguageModelParts,
    prompts: tuple[Tensor, Tensor],
    responses: tuple[Tensor, Tensor],
    tokens: Tensor,
    constraints: TokenConstraints,
    *,
    device: torch.device,
    value_slots: Tensor | None = None,
    last_values: bool = False,
    policy: bool = True,
    only_value: bool = False,
    entropy_grad: bool = False,
) -> ForwardRequest:
    """A request on ``device`` for rows on the host; see ``ForwardRequest``.

    Args:
        parts: backbone and head of the policy.
        prompts: ids int64 [b, P] and mask bool [b, P].
        responses: ids int64 [b, R] and response mask bool [b, R].
        tokens: bool [b, R]; response tokens to compute log-probabilities of.
        constraints: temperature and allowed tokens at these tokens.
        device: where the models are.
        value_slots: bool [b, R]; compute the value of the state before each.
        last_values: append the values of the b states after the last token.
        policy: compute log-probabilities.
        only_value: no gradient for the policy.
        entropy_grad: the entropies have a gradient.
    """
    packed = parts.pack(*prompts, *responses)
    states = packed.states(tokens)
    value_states = value_index = None
    if value_slots is not None:
        value_states = packed.states(value_slots)
        if last_values:
            value_states = torch.cat([value_states, packed.ends])
        value_states = value_states.to(device)
        value_index = value_slots.flatten().nonzero()[:, 0].to(device)
    return ForwardRequest(
        packed=packed.to(device),
        states=states.to(device),
        targets=responses[0][tokens].to(device),
        slots=tokens.flatten().nonzero()[:, 0].to(device),
        constraints=constraints.to(device),
        shape=tokens.shape,
        value_states=value_states,
        value_slots=value_index,
        policy=policy,
        only_value=only_value,
        entropy_grad=entropy_grad,
    )


class ForwardOutput(NamedTuple):
    """Flat results, in row-major order of the requested tokens and states."""

    logprobs: Tensor | None = None  # float32 [n]
    entropy: Tensor | None = None  # float32 [n]
    values: Tensor | None = None  # float32 [m]
    hidden: Tensor | None = None  # float [n, H] of the policy


class ActorCritic(nn.Module):
    """A policy and a separate value model, a value adapter, or a head on the policy's backbone."""

    def __init__(
        self,
        policy: nn.Module,
        parts: LanguageModelParts,
        value: Value | None,
        *,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.value = value
        self.recomputes = recomputes  # activations are checkpointed
        self._parts = (parts,)  # in a tuple: its modules are the policy's, not registered twice

    @property
    def parts(self) -> LanguageModelParts:
        """Backbone and head of the policy."""
        return self._parts[0]

    @property
    def shared(self) -> bool:
        """Whether the value head reads the policy's backbone."""
        return isinstance(self.value, ScalarHead)

    def join_rows(self, reference: Reference | None) -> bool:
        """Feed rows joined without padding from now on, if every backbone can read them."""
        models: list[Any] = [self.parts]
        if isinstance(self.value, ScalarModel):
            models.append(self.value)
        if reference is not None and reference.separate_models:
            with reference.active() as parts:
                models.append(parts)
        if not all(hasattr(m, "backbone") and joins_rows(m.backbone) for m in models):
            return False
        assert isinstance(self.parts, CausalParts)  # it has a backbone
        self._parts = (replace(self.parts, joins_rows=True),)
        return True

    def compile_backbones(self, backend: str | None, mode: str | None) -> None:
        """Run the backbones through torch.compile; the models themselves are unchanged.

        Raises:
            ConfigError: torch does not know the backend or the mode.
        """
        assert isinstance(self.parts, CausalParts)  # classic trainers compile nothing
        options: dict[str, Any] = {"backend": backend or "inductor", "dynamic": True}
        if mode is not None:
            options["mode"] = mode
        try:
            backbone: Any = torch.compile(self.parts.backbone, **options)
            self._parts = (replace(self.parts, backbone=backbone),)
            if isinstance(self.value, ScalarModel):
                self.value.compile_backbone(**options)
        except RuntimeError as error:  # InvalidBackend, from a module that is slow to import
            raise ConfigError(
                f"torch_compile_backend={backend!r} with torch_compile_mode={mode!r}:"
                f" {' '.join(str(error).split())}"
            ) from error

    def forward(self, request: ForwardRequest) -> ForwardOutput:
        """Compute the requested outputs with one pass through each backbone involved."""
        value, states, output = self.value, request.value_states, ForwardOutput()
        if request.policy or (self.shared and states is not None):
            output = call_within(self.policy, lambda: self._forward_policy(request))
        if isinstance(value, ScalarModel | AdapterValue) and states is not None:
            model = value.model if isinstance(value, ScalarModel) else self.policy
            values = call_within(model, lambda: value(request.packed, states))
            output = output._replace(values=values)
        return output

    def _forward_policy(self, request: ForwardRequest) -> ForwardOutput:
        logprobs = entropy = hidden = values = None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not request.only_value):
            states = self.parts.read(request.packed).flatten(0, 1)
            if request.policy:
                hidden = states.index_select(0, request.states)
                logprobs, entropy = request.logprobs(self.parts, hidden)
        if isinstance(self.value, ScalarHead) and request.value_states is not None:
            values = self.value(states.index_select(0, request.value_states)).sum(1)  # one column
        return ForwardOutput(logprobs, entropy, values, hidden)
