"""The decode loop of the embedded engine: waiting rows, running rows, and responses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kedge.records.errors import RolloutError
from kedge.records.types import PromptBatch, Sampling, group_rows
from kedge.rollout.embedded.decode import CausalDecoder, Prefix, build_decoder
from kedge.rollout.embedded.sampling import (
    MAX_ALLOWED,
    StopCriteria,
    allowed_tokens,
    check_allowed,
    restrict,
    sample_tokens,
    uniforms,
)
from kedge.rollout.engines import Response

POLL = 16  # tokens sampled on an accelerator between two checks for ended responses
_REFILL = 8  # rows join once 1 / 8 of the slots are free, since joining copies the cache


@dataclass(slots=True)
class _Row:
    key: int
    prompt: list[int]
    number: int  # selects the random numbers, together with the seed
    seed: int
    limit: int  # maximum tokens of the response
    begin: int = 0  # batch steps before its first token


class DecodeLoop:
    """Samples its rows, as many at a time as it has slots.

    Tokens stay on an accelerator for some steps; then the host copies them, once, finds the rows
    that have ended, and drops them from the batch when enough have: dropping copies the cache.

    Args:
        model: the model.
        sampling: distribution and stop conditions; lengths are those of the rows.
        tokenizer: needed for stop strings.
        slots: rows sampled at once.
        joins: whether rows may join a running batch, which needs ``CausalDecoder.keeps_all``;
            False: only after all have ended, so that results do not depend on timing.
        prefixes: keys and values by row number, read and replaced; None: do not keep any.
    """

    def __init__(
        self,
        model: nn.Module,
        sampling: Sampling,
        tokenizer: Any,
        *,
        slots: int,
        joins: bool = False,
        prefixes: dict[int, Prefix] | None = None,
    ) -> None:
        self._model, self._sampling, self._slots = model, sampling, slots
        self._joins, self._prefixes = joins, prefixes
        self._device = next(model.parameters()).device
        self._on_cpu = self._device.type == "cpu"
        self._stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64).to(self._device)
        self._stop_criteria = StopCriteria(sampling, tokenizer)
        self._poll = 1 if self._on_cpu else POLL
        if not (joins or sampling.truncates or sampling.stop_ids or sampling.stop_strings):
            self._poll = 2**31  # only length limits end rows
        self._waiting: deque[_Row] = deque()
        self._decoder: CausalDecoder | None = None
        # on the device, for the b rows of the batch: last token, its index, random numbers
        self._token = self._t = torch.empty(0, dtype=torch.int64)
        self._u = torch.empty(0, 0)
        # on the host
        self._rows: list[_Row] = []
        self._running = torch.empty(0, dtype=torch.bool)  # whether rows are still running
        self._end = torch.empty(0, dtype=torch.int64)  # step at which each row reaches its limit
        self._clear()

    def _clear(self) -> None:
        """Begin a new batch."""
        self._decoder, self._steps = None, 0
        self._versions: list[tuple[int, int]] = []  # (version, steps before it)
        self._dropped = 0  # steps removed from the buffer
        self._buffer = torch.empty(0, 0, 2, dtype=torch.int64)  # [steps, b, ...], see _draw

    def submit(
        self, prompts: PromptBatch, keys: Sequence[int], *, seed: int, limits: Tensor
    ) -> None:
        """Add rows on the host with a key each; the shortest prompts are sampled first.

        Rows of a group share a prompt, which is read once.  ``limits`` int64 [B]: most tokens of
        each.
        """
        groups: list[list[_Row]] = []
        for group, rows in zip(*group_rows(prompts), strict=True):
            first, *others = index = rows.tolist()
            ids, mask = prompts.ids[rows], prompts.mask[rows]
            same = (mask == mask[:1]).all(1) & ((ids == ids[:1]) | ~mask).all(1)
            if others and not same.all():
                raise RolloutError(
                    f"rows {first} and {index[int((~same).nonzero()[0])]} are of group {group} but"
                    " hold different prompts; rows share a group only if they answer the same"
                    " prompt"
                )
            prompt = ids[0][mask[0]].tolist()
            groups.append(
                [_Row(keys[i], prompt, int(prompts.row[i]), seed, int(limits[i])) for i in index]
            )
        for of_group in sorted(groups, key=lambda rows: len(rows[0].prompt)):
            self._waiting += of_group

    def advance(self, version: int) -> list[tuple[int, Response]]:
        """Sample until a response is complete, at most 16 tokens; returns keys and responses."""
        for _ in range(POLL if self._on_cpu else 1):
            new = self._admit()
            if not (new or self._rows):
                break
            if not self._versions or self._versions[-1][0] != version:
                self._versions.append((version, self._steps))
            window = [self._fill(new) if new else self._step()]
            if self._poll > 1:
                left = int(self._end[self._running].min()) - self._steps
                window += [self._step() for _ in range(min(self._poll, left) - 1)]
            if complete := self._read(torch.stack(window).cpu()):
                return complete
        return []

    def _admit(self) -> list[_Row]:
        """Take the next rows from the queue."""
        if not self._waiting:
            return []
        running = int(self._running.sum())
        free = self._slots - running
        enough = free >= max(1, self._slots // _REFILL) if self._joins else not running
        if not enough:
            return []
        if running < len(self._rows):
            self._keep(self._running.nonzero()[:, 0])
        return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]

    def _step(self) -> Tensor:
        """Sample the next token of every row; returns int64 [b, ...] for the host."""
        assert self._decoder is not None
        self._t += 1
        self._token, recorded = self._decoder.sample(self._token, self._draw)
        return recorded if self._on_cpu else recorded.clone()

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample one token per row from logits [b, V], on the device.

        Returns the token int64 [b], and int64 [b, 2 or 3 + K] for the host: token, bits of its
        log-probability, number of allowed tokens and these.
        """
        logits = restrict(logits, self._sampling, self._t, self._stop_ids)
        if self._sampling.temperature == 0:
            token = logits.argmax(-1)
            logprob = torch.zeros_like(token, dtype=torch.float32)
        else:  # ended rows may outlast their random numbers
            at = self._t.clamp(max=self._u.shape[1] - 1)[:, None]
            token, logprob = sample_tokens(logits, self._u.gather(1, at)[:, 0])
        columns = [token[:, None], logprob.view(torch.int32).long()[:, None]]
        if self._sampling.truncates:
            most = min(self._sampling.top_k or MAX_ALLOWED, logits.shape[-1])
            allowed, count = allowed_tokens(logits, None if self._on_cpu else most)
            columns += [count[:, None], allowed]
        return token, torch.cat(columns, 1)

    def _fill(self, new: list[_Row]) -> Tensor:
        """Add rows to the batch, and sample the next token of all as ``_step`` does."""
        recorded = [] if self._decoder is None else [self._step()]
        parts = [] if self._decoder is None else [(self._token, self._t, self._u)]
        decoder = build_decoder(self._model, across_updates=self._joins)
        numbers = torch.tensor([row.number for row in new], device=self._device)
        every = torch.arange(max(row.limit for row in new), device=self._device)
        self._u = uniforms([row.seed for row in new], numbers, every)
        self._t = torch.zeros_like(numbers)
        self._token, first = self._draw(self._start(decoder, new))
        if self._decoder is None:
            self._decoder = decoder
        else:
            self._decoder.join(decoder)
        for row in new:
            row.begin = self._steps
        self._rows += new
        self._stop_criteria.add(len(new))
        self._running = torch.cat([self._running, torch.ones(len(new), dtype=torch.bool)])
        self._end = torch.cat([self._end, torch.tensor([self._steps + row.limit for row in new])])
        self._buffer = nn.functional.pad(self._buffer, (0, 0, 0, len(new)), value=-1)
        if not recorded:
            return first
        token, t, u = zip(*parts, (self._token, self._t, self._u), strict=True)
        self._token, self._t, self._u = torch.cat(token), torch.cat(t), _cat_padded(u)
        return _cat_padded([*recorded, first])

    def _start(self, decoder: CausalDecoder, new: list[_Row]) -> Tensor:
        """Prefill each distinct prompt once; return logits [b, V] of the first tokens."""
        if self._prefixes:
            kept = [self._prefixes[row.number] for row in new if row.number in self._prefixes]
            if len(kept) == len(new):
                logits = decoder.resume(kept, [row.prompt for row in new])
                if logits is not None:
                    return logits
        prompts: dict[tuple[int, ...], int] = {}  # several groups may share prompts
        copies = [prompts.setdefault(tuple(row.prompt), len(prompts)) for row in new]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + [*prompt] for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = torch.arange(width) >= width - lengths[:, None]
        return decoder.start(ids, mask, torch.tensor(copies))

    def _read(self, window: Tensor) -> list[tuple[int, Response]]:
        """Store the tokens of a window int64 [w, b, ...]; return the completed responses."""
        count, _, width = window.shape
        begin = self._steps - self._dropped
        missing = begin + count - len(self._buffer)
        wider = max(0, width - self._buffer.shape[2])
        if missing > 0 or wider:
            more = max(missing, len(self._buffer)) if missing > 0 else 0
            self._buffer = nn.functional.pad(self._buffer, (0, wider, 0, 0, 0, more), value=-1)
        self._buffer[begin : begin + count, :, :width] = window
        before = self._steps
        self._steps += count
        stopped = self._stop_criteria.ended(window[..., 0])
        ended = stopped & self._running
        ended[-1] |= (self._end == self._steps) & self._running
        if not ended.any():
            return []
        now, last = ended.any(0), ended.int().argmax(0).tolist()
        complete = [
            (self._rows[i].key, self._response(i, before + last[i] + 1, bool(stopped[last[i], i])))
            for i in now.nonzero()[:, 0].tolist()
        ]
        self._running &= ~now
        assert self._decoder is not None
        keep = self._running.nonzero()[:, 0]
        if len(keep) <= self._decoder.keep_share * len(self._rows):
            self._keep(keep)
        return complete

    def _response(self, i: int, end: int, terminated: bool) -> Response:
        """The response of row ``i``, whose last token was sampled in the step before ``end``."""
        begin = self._rows[i].begin
        recorded = self._buffer[begin - self._dropped : end - self._dropped, i]
        allowed = None
        if self._sampling.truncates:
            width = int(recorded[:, 2].max())
            check_allowed(width)
            allowed = recorded[:, 3 : 3 + width].clone()
        spans = [
            (version, min(then, end) - max(first, begin))
            for (version, first), (_, then) in pairwise([*self._versions, (0, end)])
        ]
        return Response(
            tokens=recorded[:, 0].clone(),
            logprobs=recorded[:, 1].int().view(torch.float32),
            allowed=allowed,
            terminated=terminated,
            versions=[(version, tokens) for version, tokens in spans if tokens > 0],
        )

    def _keep(self, rows: Tensor) -> None:
        """Keep only these rows of the batch, on the host."""
        if self._prefixes is not None:
            self._store_prefixes(set(range(len(self._rows))) - set(rows.tolist()))
        self._stop_criteria.select(rows)
        self._rows = [self._rows[i] for i in rows.tolist()]
        self._running, self._end = self._running[rows], self._end[rows]
        if not self._rows:
            self._clear()
            return
        assert self._decoder is not None
        first = min(row.begin for row in self._rows)
        self._buffer = self._buffer[first - self._dropped :, rows]
        self._dropped = first
        rows = self._decoder.select(rows)
        self._token, self._t, self._u = (x[rows] for x in (self._token, self._t, self._u))

    def _store_prefixes(self, places: set[int]) -> None:
        """Keep the cached keys and values of rows; their last token has none yet."""
        assert self._prefixes is not None
        assert self._decoder is not None
        for i in places:
            row = self._rows[i]
            sampled = self._buffer[row.begin - self._dropped : self._steps - self._dropped - 1, i]
            tokens = row.prompt + sampled[:, 0].tolist()
            self._prefixes[row.number] = self._decoder.prefix(i, tokens)


def _cat_padded(parts: Sequence[Tensor]) -> Tensor:
    """Rows of matrices, padded to the widest with -1."""
    width = max(x.shape[1] for x in parts)
    pad = partial(nn.functional.pad, value=-1)
    return torch.cat([pad(x, (0, width - x.shape[1])) for x in parts])
