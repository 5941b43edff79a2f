"""Where a response ends: stop tokens and stop strings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.errors import ConfigError
from kedge.types import Sampling

_MARGIN = 8  # extra tokens to decode: decoding may trim the first of a window


class StopStrings:
    """Finds rows that have just completed a stop string; decodes only their ends."""

    def __init__(self, sampling: Sampling, tokenizer: Any) -> None:
        if tokenizer is None:
            raise ConfigError(
                f"stop_strings={sampling.stop_strings} need a tokenizer; "
                "give the engine tokenizer=, or use stop_ids"
            )
        self._stops = sampling.stop_strings
        self._decode = tokenizer.decode
        self._first = sampling.min_new_tokens  # a stop string completed earlier does not stop
        longest = max(len(s.encode()) for s in self._stops)
        self._window = longest + _MARGIN  # in byte-fallback text each token is one byte
        self._may_end: dict[int, bool] = {}

    def complete(self, ids: list[int]) -> bool:
        """Whether the last token of a response completes a stop string."""
        if len(ids) < self._first or not self._may_complete(ids[-1]):
            return False
        tail = ids[-self._window :]
        after = self._text(tail)
        if not any(s in after for s in self._stops):
            return False
        before = self._text(tail[:-1])
        return any(after.count(s) > before.count(s) for s in self._stops)

    def _text(self, ids: list[int]) -> str:
        return self._decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _may_complete(self, token: int) -> bool:
        """Whether the token could hold the last character of a stop string."""
        if token not in self._may_end:
            text = self._text([token])
            # Part of a character, or a leading space that decoding trims: undecided.
            unsure = not text.strip() or "\N{REPLACEMENT CHARACTER}" in text
            self._may_end[token] = unsure or any(
                s[-1] in text or s[-1].isspace() for s in self._stops
            )
        return self._may_end[token]


class StopCriteria:
    """Finds where the rows of a chunk end, from tokens on the host."""

    def __init__(self, sampling: Sampling, tokenizer: Any) -> None:
        self._ids = torch.tensor(sampling.stop_ids, dtype=torch.int64)
        self._strings = StopStrings(sampling, tokenizer) if sampling.stop_strings else None
        self._responses: list[list[int]] = []

    def ended(self, tokens: Tensor) -> Tensor:
        """Whether each of the next tokens int64 [T, b] ends a stop token or string."""
        ended = torch.isin(tokens, self._ids)
        for t, step in enumerate(tokens.tolist() if self._strings else []):
            for response, token in zip(self._responses, step, strict=True):
                response.append(token)
            ended[t] |= torch.tensor([self._strings.complete(ids) for ids in self._responses])  # type: ignore[union-attr]
        return ended

    def add(self, rows: int) -> None:
        """Add new rows at the end."""
        self._responses += [[] for _ in range(rows)]

    def select(self, rows: Tensor) -> None:
        """Keep only the rows int64 [n], in that order."""
        self._responses = [self._responses[i] for i in rows.tolist()]
