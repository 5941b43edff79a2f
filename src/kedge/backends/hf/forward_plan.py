"""How the forward and backward passes of a learner run; the numbers are those of plain passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import TrainingArguments

from kedge.backends.hf.actor_critic import ActorCritic
from kedge.backends.hf.joined_rows import JoinedAttention
from kedge.backends.hf.last_layer import LastLayers
from kedge.backends.hf.packing import group_rows, padding_budget, split_by_length
from kedge.backends.hf.reference import Reference
from kedge.backends.hf.settings import LearnerSettings
from kedge.backends.hf.trunk import TrunkCache
from kedge.ops.cpu.patch import Kernels
from kedge.types import MicroBatch, Rollout

_NO_LIMIT = 2**62


class ForwardPlan:
    """Compiled trunks or CPU kernels, kept states, joined rows, and the rows of a pass.

    Args:
        module: policy and value model; it joins rows from now on if all its models can.
        reference: or None.
        models: all models of the learner, on their device.
        args: torch_compile and its options.
        settings: of the learner.
        sharded: whether weights are, so that ranks must run equally many passes.
    """

    def __init__(
        self,
        module: ActorCritic,
        reference: Reference | None,
        models: Iterable[nn.Module],
        args: TrainingArguments,
        settings: LearnerSettings,
        *,
        sharded: bool,
    ) -> None:
        if args.torch_compile:
            module.compile_trunks(args.torch_compile_backend, args.torch_compile_mode)
        plain = not (args.torch_compile or sharded)  # otherwise nothing is replaced in the models
        models = list(models) if plain else []
        self.kernels = Kernels(models)
        owners: list[Any] = [module.parts, module.value, getattr(reference, "parts", None)]
        self.trunks = TrunkCache(owners if plain and settings.cache_trunk else [])
        self.last_layers = LastLayers(owners if plain else [])
        skipped = self.trunks.skipped
        self.joins_rows = plain and module.join_rows(reference)
        self._attention = JoinedAttention(models if self.joins_rows else [])
        budget = settings.padding_budget
        if budget is None:
            output = module.parts.output
            budget = padding_budget(module.policy, output, skipped, joined=self.joins_rows)
        self._max_padding = budget
        self._split_padding = _NO_LIMIT if sharded else budget
        self._forward_rows = settings.forward_rows

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context of forward and backward passes."""
        kernels, attention = self.kernels.active(), self._attention.active()
        with kernels, attention, self.trunks.active(), self.last_layers.active():
            yield

    def groups(self, rollout: Rollout) -> list[list[int]]:
        """The rows of each pass without gradient."""
        return group_rows(rollout, self._forward_rows, self._max_padding, by_prompt=self.joins_rows)

    def split(self, step: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The rows of each pass with gradient: micro-batches, split where lengths differ much."""
        return split_by_length(step, max_padding=self._split_padding)

    def end_batch(self) -> None:
        """Drop what was kept for the rows of a batch."""
        self.trunks.clear()
