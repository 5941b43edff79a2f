"""Keys and values kept from one turn to the next, so that a conversation is read once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from kedge.rollout.embedded.decode import CausalStepper, Draw


@dataclass(frozen=True, slots=True)
class Prefix:
    """What was read for one row."""

    tokens: list[int]
    keys: list[Tensor]  # [heads, tokens, size] per layer
    values: list[Tensor]


def common_length(a: list[int], b: list[int]) -> int:
    """Number of tokens that both lists begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class PrefixStepper(CausalStepper):
    """A causal stepper that reads only what follows the prefixes of an earlier call.

    Args:
        model: the model.
        prefixes: by row; replaced by those of this call when rows end.
        rows: the row numbers of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        prefixes: dict[int, Prefix],
        rows: list[int],
    ) -> None:
        super().__init__(model)
        self._prefixes, self._rows = prefixes, rows
        self._histories: list[list[int]] = []
        self._steps: list[Tensor] = []  # int64 [b]; tokens of each step, on the device

    @property
    def _layers(self) -> list[Any]:
        return self._cache.layers

    def start(self, ids: Tensor, mask: Tensor, copies: Tensor) -> Tensor:
        """Read the prompts, or only their new tokens if all rows have a prefix."""
        self._histories = [ids[i][mask[i]].tolist() for i in copies.tolist()]
        kept = [self._prefixes.get(row) for row in self._rows]
        found = [prefix for prefix in kept if prefix is not None]
        if len(found) < len(kept):
            return super().start(ids, mask, copies)
        lengths = [
            min(common_length(prefix.tokens, history), len(history) - 1)
            for prefix, history in zip(found, self._histories, strict=True)
        ]
        return self._resume(found, lengths) if min(lengths) else super().start(ids, mask, copies)

    def _resume(self, prefixes: list[Prefix], lengths: list[int]) -> Tensor:
        """Fill the cache with the first ``lengths`` tokens of the prefixes, and read the rest."""
        device, width = self._device, max(lengths)
        for layer in range(len(prefixes[0].keys)):
            for_rows = [(p.keys[layer], p.values[layer]) for p in prefixes]
            keys, values = (
                torch.stack(
                    [
                        nn.functional.pad(pair[part][:, :n], (0, 0, width - n, 0))
                        for pair, n in zip(for_rows, lengths, strict=True)
                    ]
                )
                for part in (0, 1)
            )
            self._cache.update(keys, values, layer)
        new = [h[n:] for h, n in zip(self._histories, lengths, strict=True)]
        longest = max(map(len, new))
        ids = torch.tensor([[0] * (longest - len(x)) + x for x in new])
        ends = torch.tensor([len(h) for h in self._histories])
        positions = ends[:, None] - longest + torch.arange(longest)
        begins = torch.tensor(lengths)[:, None]
        read = torch.arange(width) >= width - begins
        mask = torch.cat([read, positions >= begins], 1)
        self._padded = torch.ones(len(new), dtype=torch.bool)  # padding between old and new tokens
        self._mask = mask.to(device)
        self._position = ends[:, None].to(device)
        logits = self._forward(ids.to(device), positions.clamp(min=0).to(device))
        self._extend_mask()
        return logits

    def sample(self, tokens: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """One forward pass over one token per row, and the next tokens."""
        self._steps.append(tokens.clone())
        return super().sample(tokens, draw)

    def select(self, rows: Tensor) -> Tensor:
        """Keep only these rows of the batch; prefixes of the others are stored."""
        if len(self._histories) == len(self._rows) == len(self._padded):
            left = set(rows.tolist())
            self._store([i for i in range(len(self._rows)) if i not in left])
            self._rows = [self._rows[i] for i in rows.tolist()]
            self._histories = [self._histories[i] for i in rows.tolist()]
            self._steps = [step[rows.to(self._device)] for step in self._steps]
        return super().select(rows)

    def store(self) -> None:
        """Store the prefixes of the rows that are in the batch."""
        self._store(list(range(len(self._rows))))

    def _store(self, places: list[int]) -> None:
        if not places:
            return
        self._leave_graph()
        sampled = torch.stack(self._steps, 1).tolist() if self._steps else [[]] * len(self._rows)
        used = self._layers[0].keys.shape[-2]
        mask = None if self._mask is None else self._mask[:, :used]
        for i in places:
            real = slice(None) if mask is None else mask[i]
            self._prefixes[self._rows[i]] = Prefix(
                tokens=self._histories[i] + sampled[i],
                keys=[layer.keys[i][:, real].clone() for layer in self._layers],
                values=[layer.values[i][:, real].clone() for layer in self._layers],
            )
