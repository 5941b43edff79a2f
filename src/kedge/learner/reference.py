"""The reference: the frozen policy of the KL term."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kedge.models.fingerprint import fingerprint, policy_weights
from kedge.models.model import LanguageModelParts, causal_parts, no_dropout
from kedge.models.peft import AdapterSwitch
from kedge.records.types import Rollout

BuildParts = Callable[..., LanguageModelParts]


class RemoteReference(Protocol):
    """A reference in other processes, which computes while the learner continues."""

    def begin(
        self, rollout: Rollout, groups: Sequence[Sequence[int]], *, joined: bool
    ) -> Callable[[], Tensor]:
        """Start computing; the returned call waits for log-probabilities float32 [B, R].

        ``groups`` of rows share a forward pass, ``joined`` without padding.
        """


class FrozenModel:
    """A reference with separate weights.

    Args:
        model: language model; it is frozen.
        build_parts: splits the model into backbone and head.
    """

    def __init__(self, model: nn.Module, build_parts: BuildParts = causal_parts) -> None:
        self.model = model.requires_grad_(False).eval()
        no_dropout(self.model)
        self.parts = build_parts(self.model)
        self._fingerprint: str | None = None

    @torch.no_grad()
    def mix(self, policy: nn.Module, alpha: float) -> None:
        """Set every weight to alpha x that of the policy + (1 - alpha) x the weight."""
        self.fingerprint()  # of the initial weights, which a resumed run must have, too
        for own, new in zip(self.model.parameters(), policy.parameters(), strict=True):
            if own is not new:  # weights that never train are shared
                own.mul_(1 - alpha).add_(new.to(own.dtype), alpha=alpha)

    def fingerprint(self) -> str:
        """A short hash of the initial weights, computed once."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(policy_weights(self.model))
        return self._fingerprint

    @contextmanager
    def active(self) -> Iterator[LanguageModelParts]:
        """Backbone and head of the model."""
        yield self.parts

    @property
    def separate_models(self) -> list[nn.Module]:
        """The model."""
        return [self.model]


class AdapterReference:
    """The base of a PEFT model, alone or with the adapter ``name``, which never trains."""

    def __init__(
        self, policy: Any, name: str | None = None, build_parts: BuildParts = causal_parts
    ) -> None:
        self.policy, self.name, self._build_parts = policy, name, build_parts
        self._switch = AdapterSwitch(policy)
        self._fingerprint: str | None = None
        with self.active() as parts:
            self.parts = parts

    @contextmanager
    def active(self) -> Iterator[LanguageModelParts]:
        """Backbone and head, with the reference's adapter active only within the block."""
        with self._switch.active(self.name):
            yield self._build_parts(self.policy, verify=False)

    def fingerprint(self) -> str:
        """A short hash of every weight of the policy that does not train, computed once."""
        if self._fingerprint is None:
            named = self.policy.named_parameters()
            self._fingerprint = fingerprint({n: p for n, p in named if not p.requires_grad})
        return self._fingerprint

    @property
    def separate_models(self) -> list[nn.Module]:
        """Empty, since the policy's base model is used."""
        return []


# Runs a block with the reference policy.
Reference = FrozenModel | AdapterReference


def frozen_copy(policy: nn.Module, *, sharded: bool = False) -> FrozenModel:
    """A frozen copy of the current policy, which shares weights that do not train.

    If both will be ``sharded`` before the policy trains, they share memory until then.
    """
    if sharded:
        memo = {id(p): nn.Parameter(p.data, requires_grad=False) for p in policy.parameters()}
    else:
        memo = {id(p): p for p in policy.parameters() if not p.requires_grad}
    return FrozenModel(copy.deepcopy(policy, memo))
