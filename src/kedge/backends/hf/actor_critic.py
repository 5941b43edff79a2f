"""Policy and value in one module, so that one forward pass serves both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kedge.backends.hf.model import LanguageModelParts
from kedge.backends.hf.packing import Packed
from kedge.backends.hf.sharding import call_within
from kedge.backends.hf.value_head import ScalarHead, ScalarModel
from kedge.errors import ConfigError
from kedge.ops.linear_logprob import TokenConstraints, linear_logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """Which log-probabilities and values one forward pass returns.

    Args:
        packed: prompts and responses.
        tokens: bool [b, R]; response tokens to compute log-probabilities of.
        targets: int64 [n]; ids of these tokens.
        draw: temperature and allowed tokens at these positions.
        slots: bool [b, R]; compute the value of the state before each.
        ends: also compute the values of the states after the last token.
        policy: compute log-probabilities.
        only_value: no gradient for the policy, including its trunk.
    """

    packed: Packed
    tokens: Tensor
    targets: Tensor
    draw: TokenConstraints
    slots: Tensor | None = None
    ends: bool = False
    policy: bool = True
    only_value: bool = False


class ForwardOutput(NamedTuple):
    """Results, flat, in row-major order of the requested slots."""

    logprobs: Tensor | None  # float32 [n]
    entropy: Tensor | None  # float32 [n]
    values: Tensor | None  # float32 [m]
    ends: Tensor | None  # float32 [b]
    hidden: Tensor | None  # float [n, H] of the policy


class ActorCritic(nn.Module):
    """A policy, with a separate value model or a value head on the policy's trunk."""

    def __init__(
        self, policy: nn.Module, parts: LanguageModelParts, value: ScalarModel | ScalarHead | None
    ) -> None:
        super().__init__()
        self.policy = policy
        self.value = value
        self._parts = (parts,)  # in a tuple: its modules are the policy's, not registered twice

    @property
    def parts(self) -> LanguageModelParts:
        """Trunk and head of the policy."""
        return self._parts[0]

    @property
    def shared(self) -> bool:
        """Whether the value head reads the policy's trunk."""
        return isinstance(self.value, ScalarHead)

    def compile_trunks(self, backend: str | None, mode: str | None) -> None:
        """Run the trunks through torch.compile; the models themselves are unchanged.

        Raises:
            ConfigError: torch does not know the backend or the mode.
        """
        how: dict[str, Any] = {"backend": backend or "inductor", "dynamic": True}
        if mode is not None:
            how["mode"] = mode
        try:
            self._parts = (self.parts.compiled(how),)
            if isinstance(self.value, ScalarModel):
                self.value.compile_trunk(**how)
        except RuntimeError as error:  # InvalidBackend, from a module that is slow to import
            raise ConfigError(
                f"torch_compile_backend={backend!r} with torch_compile_mode={mode!r}:"
                f" {' '.join(str(error).split())}"
            ) from error

    def forward(self, request: ForwardRequest) -> ForwardOutput:
        """Compute the requested outputs with one pass through each trunk involved."""
        states = None
        if request.slots is not None:
            states = request.packed.states(request.slots)
            states = torch.cat([states, request.packed.ends]) if request.ends else states
        value, output = self.value, ForwardOutput(None, None, None, None, None)
        if request.policy or (self.shared and states is not None):
            output = call_within(self.policy, lambda: self._forward_policy(request, states))
        if isinstance(value, ScalarModel) and states is not None:
            at = states
            output = output._replace(
                values=call_within(value.model, lambda: value(request.packed.ids, at))
            )
        if output.values is not None and request.ends:
            rows = len(request.packed.ids)
            values, ends = output.values.split([len(output.values) - rows, rows])
            output = output._replace(values=values, ends=ends)
        return output

    def _forward_policy(self, request: ForwardRequest, states: Tensor | None) -> ForwardOutput:
        logprobs = entropy = hidden = values = None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not request.only_value):
            whole = self.parts.read(request.packed).flatten(0, 1)
            if request.policy:
                hidden = whole[request.packed.states(request.tokens)]
                logprobs, entropy = linear_logprob(
                    hidden, self.parts.head(), request.targets, draw=request.draw
                )
        if isinstance(self.value, ScalarHead) and states is not None:
            values = self.value(whole[states]).sum(1)  # one column
        return ForwardOutput(logprobs, entropy, values, None, hidden)
