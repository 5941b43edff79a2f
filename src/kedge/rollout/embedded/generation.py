"""The generation loop of the embedded rollout engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kedge.rollout.embedded.decode import Stepper
from kedge.rollout.embedded.sampling import (
    MAX_ALLOWED,
    allowed_tokens,
    check_allowed,
    restrict,
    sample_tokens,
)
from kedge.rollout.embedded.stopping import Stopper
from kedge.types import Sampling

POLL = 16  # tokens sampled on an accelerator before the host looks where responses ended


@dataclass(slots=True)
class Responses:
    """The samples of one chunk of b rows, T steps long, on the host; junk after a row's length."""

    tokens: Tensor  # int64 [b, T]
    logprobs: Tensor  # float32 [b, T]
    length: Tensor  # int64 [b]
    terminated: Tensor  # bool [b]
    allowed: Tensor | None  # int64 [b, T, K]


class ChunkSampler:
    """The generation loop of one chunk.

    Tokens stay on the device for ``poll`` steps; then the host copies them, once, finds the rows
    that have ended, and drops them from the batch.

    Args:
        stepper: the model.
        sampling: distribution and stop conditions.
        stopper: finds the end of rows.
        u: float64 [T, b]; the random number of every token, on the device.
        limits: int64 [b]; most tokens of each row, on the host.
        record: record the allowed tokens.
    """

    def __init__(
        self,
        stepper: Stepper,
        sampling: Sampling,
        stopper: Stopper,
        u: Tensor,
        *,
        limits: Tensor,
        record: bool,
    ) -> None:
        self._limits = limits
        self._stepper, self._sampling, self._stopper, self._u = stepper, sampling, stopper, u
        self._record = record
        self._on_cpu = u.device.type == "cpu"
        self._stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64).to(u.device)
        steps, rows = u.shape
        self._t = torch.zeros(1, dtype=torch.int64, device=u.device)  # index of the next token
        self._poll = 1 if self._on_cpu else POLL
        if not (stopper.can_end or record):
            self._poll = steps
        # on the host
        self._active = torch.arange(rows)  # the rows in the batch
        self._running = torch.ones(rows, dtype=torch.bool)  # of these, not ended yet
        self._tokens = torch.zeros(steps, rows, dtype=torch.int64)
        self._logprobs = torch.zeros(steps, rows)
        self._allowed: list[Tensor] = []  # [rows, K] per step
        self._length = torch.full((rows,), steps)
        self._terminated = torch.zeros(rows, dtype=torch.bool)

    def run(self, ids: Tensor, mask: Tensor, copies: Tensor) -> Responses:
        """Sample responses to prompts on the host; see ``Stepper.start``."""
        steps, pending = len(self._u), []
        ends = set(self._limits.tolist())  # where rows leave: the model may have no place for more
        token, recorded = self._sample(self._stepper.start(ids, mask, copies))
        done = 0
        for t in range(steps):
            pending.append(recorded if self._on_cpu else recorded.clone())
            if len(pending) == self._poll or t + 1 in ends or t + 1 == steps:
                keep = self._read(torch.stack(pending).cpu(), t + 1)  # the only wait
                pending, done = [], t + 1
                if keep is not None:
                    if not len(keep):
                        break
                    token = self._select(keep, token)
            if t + 1 < steps:
                self._t += 1
                token, recorded = self._stepper.sample(token, self._sample)
        return Responses(
            tokens=self._tokens[:done].t(),
            logprobs=self._logprobs[:done].t(),
            length=self._length,
            terminated=self._terminated,
            allowed=nn.utils.rnn.pad_sequence(
                [x.t() for x in self._allowed], padding_value=-1
            ).permute(2, 1, 0)
            if self._record
            else None,
        )

    def _sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next token int64 [b], and what the host reads of it, int64 [b, 2 or 3 + K]."""
        t = int(self._t) if self._on_cpu else self._t
        logits = restrict(logits, self._sampling, t, self._stop_ids)
        u = self._u.index_select(0, self._t)[0]
        return sample_step(logits, u, self._sampling, record=self._record)

    def _read(self, window: Tensor, end: int) -> Tensor | None:
        """Store the steps before ``end``, int64 [w, b, ...]; the rows to keep if rows have ended.

        Dropping rows has a price, so they stay until enough have ended.
        """
        begin, tokens = end - len(window), window[..., 0]
        self._tokens[begin:end, self._active] = tokens
        self._logprobs[begin:end, self._active] = window[..., 1].int().view(torch.float32)
        if self._record:
            check_allowed(int(window[..., 2].max()))
            width = int(window[..., 2].max())
            for step in window[..., 3 : 3 + width]:
                allowed = step.new_full((len(self._length), step.shape[1]), -1)
                allowed[self._active] = step
                self._allowed.append(allowed)
        ended = self._stopper.ended(tokens) & self._running
        full = (self._limits[self._active] == end) & self._running
        now = ended.any(0) | full
        if not now.any():
            return None
        rows, stopped = self._active[now], ended.any(0)[now]
        first = begin + 1 + ended.int().argmax(0)[now]
        self._length[rows] = first.where(stopped, end)
        self._terminated[rows] = stopped
        self._running &= ~now
        left = int(self._running.sum())
        keep = self._running.nonzero()[:, 0]
        few = left <= self._stepper.keep_share * len(self._running)
        return keep if few or full.any() else None

    def _select(self, keep: Tensor, token: Tensor) -> Tensor:
        """Keep only these rows of the batch; returns their next input."""
        self._stopper.select(keep)
        self._active, self._running = self._active[keep], self._running[keep]
        keep = self._stepper.select(keep)
        self._u = self._u[:, keep]
        return token[keep]


def sample_step(
    logits: Tensor, u: Tensor, sampling: Sampling, *, record: bool
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, on the device.

    Args:
        logits: float32 [b, V]; restricted to what can be sampled.
        u: float64 [b]; random numbers.
        sampling: the distribution.
        record: record the allowed tokens.

    Returns:
        The token int64 [b], and what the host reads, int64 [b, 2 or 3 + K]: token, bits of its
        log-probability, number of allowed tokens and these.
    """
    if sampling.temperature == 0:
        token = logits.argmax(-1)
        logprob = torch.zeros_like(token, dtype=torch.float32)
    else:
        token, logprob = sample_tokens(logits, u)
    columns = [token[:, None], logprob.view(torch.int32).long()[:, None]]
    if record:
        most = min(sampling.top_k or MAX_ALLOWED, logits.shape[-1])
        allowed, count = allowed_tokens(logits, None if logits.device.type == "cpu" else most)
        columns += [count[:, None], allowed]
    return token, torch.cat(columns, 1)
