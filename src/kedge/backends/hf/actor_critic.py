"""Policy and value in one module, so that one forward pass serves both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kedge.backends.hf.model import LanguageModelParts
from kedge.backends.hf.packing import Packed
from kedge.backends.hf.sharding import inside
from kedge.backends.hf.value_head import ScalarHead, ScalarModel
from kedge.errors import ConfigError
from kedge.ops.linear_logprob import TokenConstraints, linear_logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """What a forward pass shall say of packed rows.

    Args:
        packed: prompts and responses.
        tokens: bool [b, R]; the response tokens whose log-probability is wanted.
        targets: int64 [n]; their ids.
        draw: what could be drawn at those tokens.
        slots: bool [b, R]; the value of the state before each is wanted.
        ends: also the values of the states after the last token.
        policy: log-probabilities are wanted at all.
        only_value: the policy, trunk included, gets no gradient.
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
    """The answers: flat, in row-major order of the slots asked about."""

    logprobs: Tensor | None  # float32 [n]
    entropy: Tensor | None  # float32 [n]
    values: Tensor | None  # float32 [m]
    ends: Tensor | None  # float32 [b]
    hidden: Tensor | None  # float [n, H] of the policy


class ActorCritic(nn.Module):
    """A policy, and a value model of its own or a value head on the policy's trunk."""

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
        """Whether the value reads the policy's trunk."""
        return isinstance(self.value, ScalarHead)

    def compile_trunks(self, backend: str | None, mode: str | None) -> None:
        """Run the trunks through torch.compile; the models themselves stay as they are.

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
        except RuntimeError as error:  # InvalidBackend, of a module that is slow to import
            raise ConfigError(
                f"torch_compile_backend={backend!r} with torch_compile_mode={mode!r}:"
                f" {' '.join(str(error).split())}"
            ) from error

    def forward(self, ask: ForwardRequest) -> ForwardOutput:
        """Everything asked for, from one pass through each trunk that is needed."""
        states = None
        if ask.slots is not None:
            states = ask.packed.states(ask.slots)
            states = torch.cat([states, ask.packed.ends]) if ask.ends else states
        value, said = self.value, ForwardOutput(None, None, None, None, None)
        if ask.policy or (self.shared and states is not None):
            said = inside(self.policy, lambda: self._ask_policy(ask, states))
        if isinstance(value, ScalarModel) and states is not None:
            at = states
            said = said._replace(values=inside(value.model, lambda: value(ask.packed.ids, at)))
        if said.values is not None and ask.ends:
            rows = len(ask.packed.ids)
            values, ends = said.values.split([len(said.values) - rows, rows])
            said = said._replace(values=values, ends=ends)
        return said

    def _ask_policy(self, ask: ForwardRequest, states: Tensor | None) -> ForwardOutput:
        logprobs = entropy = hidden = values = None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not ask.only_value):
            whole = self.parts.read(ask.packed).flatten(0, 1)
            if ask.policy:
                hidden = whole[ask.packed.states(ask.tokens)]
                logprobs, entropy = linear_logprob(
                    hidden, self.parts.head(), ask.targets, draw=ask.draw
                )
        if isinstance(self.value, ScalarHead) and states is not None:
            values = self.value(whole[states]).sum(1)  # one column
        return ForwardOutput(logprobs, entropy, values, None, hidden)
