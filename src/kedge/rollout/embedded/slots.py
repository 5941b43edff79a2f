"""Continuous sampling of the embedded engine: slots of ended responses are refilled."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kedge.rollout.embedded.decode import CausalStepper, get_base_model
from kedge.rollout.embedded.generation import POLL, Responses, sample_step
from kedge.rollout.embedded.kv_cache import growing_cache
from kedge.rollout.embedded.sampling import check_allowed, restrict, uniforms
from kedge.rollout.embedded.stopping import Stopper
from kedge.rollout.requests import GroupRequests
from kedge.types import PromptBatch, Sampling, group_rows

_REFILL = 8  # refill when this fraction of the slots, 1 / 8, is free: a refill copies the cache


class SlotStepper(CausalStepper):
    """A causal stepper whose rows can be joined with those of another one.

    It lives across weight updates: a CUDA graph of it casts the weights in every step.
    """

    def join(self, other: CausalStepper) -> None:
        """Add the rows of ``other`` at the end."""
        self._leave_graph()
        steppers = (self, other)
        masks = [_mask(x) for x in steppers]
        # Columns before the first real token of any row are dropped.
        begins = [int(mask.any(0).long().argmax()) for mask in masks]
        sizes = [mask.shape[1] - begin for mask, begin in zip(masks, begins, strict=True)]
        width = max(sizes)
        self._mask = torch.cat(
            [_left(mask[:, b:], width, 1) for mask, b in zip(masks, begins, strict=True)]
        )
        self._padded = torch.cat([torch.ones_like(x._padded) for x in steppers])
        self._position = torch.cat([x._position for x in steppers])
        cache = growing_cache(get_base_model(self._model).config)
        pairs = zip(self._cache.layers, other._cache.layers, strict=True)
        for number, layers in enumerate(pairs):
            keys, values = (
                torch.cat(
                    [
                        _left(getattr(layer, name)[:, :, b:], width - 1, 2)
                        for layer, b in zip(layers, begins, strict=True)
                    ]
                )
                for name in ("keys", "values")
            )
            cache.update(keys, values, number)
        self._cache = self._options["past_key_values"] = cache

    def _captured(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        kind = self._device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
            return self._run(ids, positions.clamp(max=self._last), mask)


def _mask(stepper: CausalStepper) -> Tensor:
    """Real tokens of the cache and the next one, bool [b, used + 1]."""
    if stepper._mask is not None:
        return stepper._mask
    layer: Any = stepper._cache.layers[0]
    keys: Tensor = layer.keys
    return torch.ones(len(keys), keys.shape[-2] + 1, dtype=torch.bool, device=keys.device)


def _left(x: Tensor, size: int, dim: int) -> Tensor:
    """Pad ``dim`` on the left with zeros to ``size``."""
    after = [0] * 2 * (x.ndim - 1 - dim)
    return nn.functional.pad(x, [*after, size - x.shape[dim], 0])


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A row that has no slot yet."""

    key: int
    prompt: Tensor  # int64 [P]
    row: int  # selects the random numbers, with the seed
    seed: int
    limit: int  # tokens of the response


@dataclass(frozen=True, slots=True)
class SlotResult:
    """One response of n tokens."""

    tokens: Tensor  # int64 [n]
    logprobs: Tensor  # float32 [n]
    versions: list[tuple[int, int]]  # version, and number of tokens sampled with it
    terminated: bool
    allowed: Tensor | None  # int64 [n, K]


class SlotSampler:
    """The requests of one engine.

    Args:
        model: a model for which ``CausalStepper.keeps_all`` is True.
        sampling: distribution and stop conditions; lengths are those of the rows.
        tokenizer: needed for stop strings.
        slots: responses sampled at once.
        record: record the allowed tokens.
    """

    def __init__(
        self, model: nn.Module, sampling: Sampling, tokenizer: Any, *, slots: int, record: bool
    ) -> None:
        self.sampling, self.requests = sampling, GroupRequests[SlotResult]()
        self._model, self._size, self._record = model, slots, record
        self._device = next(model.parameters()).device
        self._on_cpu = self._device.type == "cpu"
        self._stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64).to(self._device)
        self._stopper = Stopper(sampling, tokenizer, 0)
        self._waiting: deque[_Waiting] = deque()
        self._stepper: SlotStepper | None = None
        self.max_new_tokens = 0  # the largest of all rows
        # of the b rows in the batch, on the device: the last token, the index of the next one, and
        # the random numbers of all
        self._token = torch.empty(0, dtype=torch.int64, device=self._device)
        self._t = torch.empty(0, dtype=torch.int64, device=self._device)
        self._u = torch.empty(0, 0, dtype=torch.float64, device=self._device)
        # on the host
        self._keys: list[int] = []
        self._spans: list[list[tuple[int, int]]] = []  # version, and index of its first token
        self._running = torch.empty(0, dtype=torch.bool)
        self._length = torch.empty(0, dtype=torch.int64)
        self._limit = torch.empty(0, dtype=torch.int64)
        self._tokens = torch.empty(0, 0, dtype=torch.int64)
        self._logprobs = torch.empty(0, 0)
        self._allowed = torch.empty(0, 0, 0, dtype=torch.int64)

    def submit(self, prompts: PromptBatch, seed: int, limits: Tensor) -> None:
        """Hold these rows, on the host; rows of a group have one prompt.

        ``limits`` int64 [B] are the numbers of tokens that responses may have.
        """
        self._widen(int(limits.max()))
        keys = self.requests.add(prompts)
        for rows in (index.tolist() for index in group_rows(prompts)[1]):
            # A pad token that was added to the tokenizer alone is beyond the model's vocabulary.
            prompt = prompts.ids[rows[0]][prompts.mask[rows[0]]]
            self._waiting += [
                _Waiting(keys[i], prompt, int(prompts.row[i]), seed, int(limits[i])) for i in rows
            ]

    def _widen(self, limit: int) -> None:
        """Make place for responses of up to ``limit`` tokens."""
        missing = limit - self.max_new_tokens
        if missing <= 0:
            return
        self.max_new_tokens = limit
        self._u, self._tokens, self._logprobs = (
            nn.functional.pad(x, (0, missing)) for x in (self._u, self._tokens, self._logprobs)
        )
        slots, _, width = self._allowed.shape
        more = self._allowed.new_full((slots, missing, width), -1)
        self._allowed = torch.cat([self._allowed, more], dim=1)  # width 0 cannot be padded

    def advance(self, version: int) -> None:
        """Sample up to 16 tokens per slot, or until a response is complete."""
        for _ in range(POLL if self._on_cpu else 1):
            logits = self._next_logits(version)
            if logits is None:
                return
            window: list[Tensor] = []
            while True:
                self._token, recorded = self._sample(logits)
                self._t = self._t + 1
                window.append(recorded)
                if self._on_cpu or len(window) == POLL:
                    break
                assert self._stepper is not None
                logits = self._stepper.step(self._token)
            if self._read(torch.stack(window).cpu()):
                return

    def _sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = restrict(logits, self.sampling, self._t, self._stop_ids)
        at = self._t.clamp(max=self.max_new_tokens - 1)[:, None]
        u = self._u.gather(1, at)[:, 0]
        return sample_step(logits, u, self.sampling, record=self._record)

    def _next_logits(self, version: int) -> Tensor | None:
        """Logits [b, V] of the next tokens, after a refill if it is due; None if empty."""
        running = int(self._running.sum())
        free = self._size - running
        refill = bool(self._waiting) and free >= max(1, self._size // _REFILL)
        if refill or 4 * running <= 3 * len(self._keys):
            self._keep(self._running.nonzero()[:, 0])
        logits = []
        if self._stepper is not None:
            logits.append(self._stepper.step(self._token))
        if refill:
            logits.append(
                self._fill([self._waiting.popleft() for _ in range(free) if self._waiting])
            )
        for spans, length in zip(self._spans, self._length.tolist(), strict=True):
            if spans and spans[-1][1] == length:
                spans.pop()  # no token was sampled with that version
            if not spans or spans[-1][0] != version:
                spans.append((version, length))
        return torch.cat(logits) if logits else None

    def _keep(self, rows: Tensor) -> None:
        """Keep only these rows of the batch, on the host."""
        if not len(rows):
            self._stepper = None
        self._stopper.select(rows)
        on_device = rows.to(self._device) if self._stepper is None else self._stepper.select(rows)
        self._token, self._t, self._u = (x[on_device] for x in (self._token, self._t, self._u))
        self._keys = [self._keys[i] for i in rows.tolist()]
        self._spans = [self._spans[i] for i in rows.tolist()]
        self._running, self._length = self._running[rows], self._length[rows]
        self._limit = self._limit[rows]
        self._tokens, self._logprobs = self._tokens[rows], self._logprobs[rows]
        self._allowed = self._allowed[rows]

    def _fill(self, new: list[_Waiting]) -> Tensor:
        """Add rows to the batch; returns the logits of their first tokens."""
        tokens = [tuple(x.prompt.tolist()) for x in new]  # rows of several groups may share them
        unique = dict(zip(tokens, (x.prompt for x in new), strict=True))
        prompts, index = list(unique.values()), {key: i for i, key in enumerate(unique)}
        width = max(map(len, prompts))
        ids = torch.stack([_left(prompt, width, 0) for prompt in prompts])
        mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts])
        stepper = SlotStepper(self._model)
        logits = stepper.start(ids, mask, torch.tensor([index[key] for key in tokens]))
        if self._stepper is None:
            self._stepper = stepper
        else:
            self._stepper.join(stepper)
        count = len(new)
        every = torch.arange(self.max_new_tokens, device=self._device)
        u = [uniforms(x.seed, torch.tensor([x.row], device=self._device), every) for x in new]
        self._stopper.add(count)
        self._token = _more(self._token, count)
        self._t = _more(self._t, count)
        self._u = torch.cat([self._u, *u])
        self._keys += [x.key for x in new]
        self._spans += [[] for _ in new]
        self._running = torch.cat([self._running, torch.ones(count, dtype=torch.bool)])
        self._length = _more(self._length, count)
        self._limit = torch.cat([self._limit, torch.tensor([x.limit for x in new])])
        self._tokens, self._logprobs = _more(self._tokens, count), _more(self._logprobs, count)
        self._allowed = _more(self._allowed, count)
        return logits

    def _read(self, window: Tensor) -> bool:
        """Store the tokens of a window int64 [w, b, ...]; True if a response is complete."""
        steps = len(window)
        columns = self._length[:, None] + torch.arange(steps)  # [b, w]
        inside = (columns < self._limit[:, None]) & self._running[:, None]
        rows = torch.arange(len(columns))[:, None].expand_as(columns)[inside]
        at = rows, columns[inside]
        recorded = window.transpose(0, 1)[inside]
        self._tokens[at] = recorded[:, 0]
        self._logprobs[at] = recorded[:, 1].int().view(torch.float32)
        if self._record and len(recorded):
            self._store_allowed(at, recorded[:, 2:])
        stopped = self._stopper.ended(window[..., 0]).t()
        ended = inside & (stopped | (columns + 1 == self._limit[:, None]))
        first = ended.int().argmax(1)
        now = ended.any(1)
        for i in now.nonzero()[:, 0].tolist():
            end = int(columns[i, first[i]]) + 1
            self._finish(i, end, terminated=bool(stopped[i, first[i]]))
        self._running &= ~now
        self._length += steps
        return bool(now.any())

    def _store_allowed(self, at: tuple[Tensor, Tensor], recorded: Tensor) -> None:
        """Store the numbers [n] and the allowed tokens [n, K] of places in the batch."""
        width = int(recorded[:, 0].max())
        check_allowed(width)
        missing = width - self._allowed.shape[2]
        if missing > 0:
            self._allowed = nn.functional.pad(self._allowed, (0, missing), value=-1)
        self._allowed[at] = -1
        self._allowed[..., :width][at] = recorded[:, 1 : 1 + width]

    def _finish(self, i: int, length: int, *, terminated: bool) -> None:
        begins = self._spans[i]
        ends = [*(begin for _, begin in begins[1:]), length]
        versions = [(v, end - begin) for (v, begin), end in zip(begins, ends, strict=True)]
        result = SlotResult(
            tokens=self._tokens[i, :length].clone(),
            logprobs=self._logprobs[i, :length].clone(),
            versions=versions,
            terminated=terminated,
            allowed=self._allowed[i, :length].clone() if self._record else None,
        )
        self.requests.put(self._keys[i], result)

    def responses(self) -> tuple[PromptBatch, Responses, list[list[tuple[int, int]]]] | None:
        """The groups that are complete: prompts, responses, and spans of versions."""
        complete = self.requests.complete()
        if not complete:
            return None
        (groups,) = complete  # of one distribution
        results = groups.results
        joined = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        allowed = [x.allowed for x in results if x.allowed is not None]
        width = max((x.shape[1] for x in allowed), default=0)
        wide = [nn.functional.pad(x, (0, width - x.shape[1]), value=-1) for x in allowed]
        return (
            groups.prompts,
            Responses(
                tokens=joined([x.tokens for x in results]),
                logprobs=joined([x.logprobs for x in results]),
                length=torch.tensor([len(x.tokens) for x in results]),
                terminated=torch.tensor([x.terminated for x in results]),
                allowed=joined(wide, padding_value=-1) if wide else None,
            ),
            [x.versions for x in results],
        )


def _more(x: Tensor, rows: int) -> Tensor:
    """``x`` with rows of zeros at the end."""
    return torch.cat([x, x.new_zeros(rows, *x.shape[1:])])
