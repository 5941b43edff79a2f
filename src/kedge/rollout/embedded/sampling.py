"""Sampling of tokens: allowed tokens, probabilities, random numbers, and where responses end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.records.errors import ConfigError, RolloutError
from kedge.records.types import Sampling

_BLOCK = 256  # width of the first level of the search
MAX_ALLOWED = 4096  # recorded tokens per position, which bounds a rollout's memory
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MARGIN = 8  # extra tokens to decode: decoding may trim the first of a window


def _to_int64(x: int) -> int:
    """The int64 with the same 64 bits as ``x`` modulo 2^64."""
    return (x + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64 bits."""
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        # >> copies an int64's sign bit: the mask shifts in zeros.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _to_int64(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniforms(seed: int | Sequence[int], rows: Tensor, t: int | Tensor) -> Tensor:
    """Random numbers in [0, 1) that depend on (seed, row, t) alone, the same on every device.

    float64 [B], or [B, T] for a tensor ``t`` int64 [T]; multiples of 2^-52.  ``seed`` is any
    integer modulo 2^64, or one per row; ``rows`` int64 [B] are global row numbers.
    """
    steps = torch.as_tensor(t, dtype=torch.int64, device=rows.device)
    golden = _to_int64(_GOLDEN)
    seeds = [seed] if isinstance(seed, int) else seed
    start = _mix(torch.tensor([_to_int64(x + _GOLDEN) for x in seeds]).to(rows.device))
    stream = _mix(start + (rows + 1) * golden)
    state = _mix(stream.view(-1, *[1] * steps.ndim) + (steps + 1) * golden)
    return ((state >> 12) & ((1 << 52) - 1)).to(torch.float64) * 2.0**-52


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Reject a Sampling that no token could satisfy."""
    s = sampling
    rules = {
        "max_new_tokens": (s.max_new_tokens >= 1, "be at least 1"),
        "min_new_tokens": (
            0 <= s.min_new_tokens <= s.max_new_tokens,
            f"lie in 0..max_new_tokens={s.max_new_tokens}",
        ),
        "temperature": (0 <= s.temperature < math.inf, "be 0 (greedy) or positive"),
        "top_k": (s.top_k >= 0, "be 0 (off) or positive"),
        "top_p": (0 < s.top_p <= 1, "lie in (0, 1], 1 is off"),
        "min_p": (0 <= s.min_p <= 1, "lie in [0, 1], 0 is off"),
        "stop_ids": (
            all(0 <= i < vocabulary for i in s.stop_ids),
            f"be token ids of the model, 0..{vocabulary - 1}",
        ),
        "stop_strings": ("" not in s.stop_strings, "not hold an empty string"),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            raise ConfigError(f"{name}={getattr(s, name)} must {rule}")
    if s.min_new_tokens > 0 and len(set(s.stop_ids)) >= vocabulary:
        raise ConfigError(
            f"stop_ids holds all {vocabulary} tokens, so min_new_tokens={s.min_new_tokens} leaves"
            " nothing to sample; lower it to 0"
        )


def restrict(logits: Tensor, sampling: Sampling, t: int | Tensor, stop_ids: Tensor) -> Tensor:
    """Logits float32 [B, V] of the distribution of token ``t``; -inf for excluded tokens.

    In this order: stop tokens are banned while t < min_new_tokens, logits are divided by the
    temperature, then top-k, top-p and min-p each keep at least the most likely token.  ``logits``
    are not changed, but the result may share their memory.  ``t`` is int64 [1] or [B] on their
    device if rows differ or the host does not know it; so is ``stop_ids`` int64 [S].
    """
    logits = logits.float()
    if sampling.min_new_tokens and sampling.stop_ids:
        logits = _ban_early(logits, t, sampling.min_new_tokens, stop_ids)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if sampling.truncates:
        logits = _truncate(logits, sampling)
    return logits


def _ban_early(logits: Tensor, t: int | Tensor, first: int, stop_ids: Tensor) -> Tensor:
    """Exclude stop tokens where t < first."""
    early = t < first
    if early is False or (isinstance(early, Tensor) and early.is_cpu and not early.any()):
        return logits
    banned = logits.index_fill(-1, stop_ids, -math.inf)
    return torch.where(early[:, None], banned, logits) if isinstance(early, Tensor) else banned


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p of the remaining tokens, then min-p."""
    if sampling.top_k or sampling.top_p < 1:
        k = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
        best, index = logits.topk(k)
        if sampling.top_p < 1:
            probs = best.softmax(-1)
            best = best.masked_fill(probs.cumsum(-1) - probs >= sampling.top_p, -math.inf)
        logits = torch.full_like(logits, -math.inf).scatter_(-1, index, best)
    if sampling.min_p > 0:
        floor = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < floor, -math.inf)
    return logits


def allowed_tokens(restricted: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """The tokens that ``restricted`` logits float [B, V] can sample, and their number int64 [B].

    int64 [B, K], unused slots -1.  Without ``width`` K is the largest number, for which the host
    waits, and more than MAX_ALLOWED are an error.
    """
    count = (restricted > -math.inf).sum(-1)
    if width is None:
        width = int(count.max())
        check_allowed(width)
    best, index = restricted.topk(width)
    return index.masked_fill(best == -math.inf, -1), count


def check_allowed(count: int) -> None:
    """Reject more allowed tokens than are recorded."""
    if count > MAX_ALLOWED:
        raise RolloutError(
            f"top-p or min-p left {count} tokens to sample from, more than the {MAX_ALLOWED} that"
            f" are recorded per token; set top_k={MAX_ALLOWED} or lower, too"
        )


def sample_tokens(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The token int64 [B] at quantile ``u`` of softmax(logits), and its log-probability.

    The token is the first whose cumulative probability exceeds u times the total, so a token of
    probability zero is never sampled.  Large vocabularies are searched in two levels: sums of
    blocks of 256 are accumulated in float64, then the tokens of one block.  That is faster than one
    long cumulative sum, and its rounding (1e-7 of a block) does not grow with the vocabulary.
    ``logits`` are float32 [B, V], -inf for probability 0, ``u`` is float64 [B] in [0, 1).
    Log-probabilities are exact to about 1e-6 above 1e-37; rows with NaN give some token and NaN.
    """
    probs = logits.softmax(-1)
    if probs.shape[-1] <= 4 * _BLOCK:
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1]
        token = _above(cumulative, u * total)
    else:
        token, total = _search_blocks(probs, u)
    # The float32 sum inside softmax is off by 1e-6 for large vocabularies, unlike ``total``.
    drawn = probs.gather(-1, token[:, None])[:, 0]
    return token, (drawn / total).log().float()


def _above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """First index whose cumulative sum exceeds the threshold, which lies below the total."""
    index = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    return index.clamp_(max=cumulative.shape[-1] - 1)  # only NaN exceeds the last index


def _search_blocks(probs: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The token at quantile ``u``, and the sum of all probabilities in float64."""
    vocabulary = probs.shape[-1]
    whole = vocabulary - vocabulary % _BLOCK
    sums = probs[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], dim=-1)
    cumulative = sums.cumsum(-1, dtype=torch.float64)
    # u <= 1 - 2^-52, so the product stays below the total even after rounding.
    threshold = u * cumulative[:, -1]
    block = _above(cumulative, threshold)

    first = block[:, None] * _BLOCK
    # The last block is shifted left to be full; tokens shared with the previous one count as 0.
    index = first.clamp(max=vocabulary - _BLOCK) + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(-1, index).masked_fill_(index < first, 0.0)
    inner = inside.cumsum(-1, dtype=torch.float64)
    before = (cumulative - sums).gather(-1, block[:, None])[:, 0]
    # The block's sum is rounded to float32, and the rest can reach the total: stay just below it.
    below = torch.nextafter(inner[:, -1], torch.zeros_like(u))
    picked = _above(inner, torch.minimum((threshold - before).clamp_(min=0), below))
    return index.gather(-1, picked[:, None])[:, 0], cumulative[:, -1]


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
        """True where one of the next tokens completes a stop token or string, bool [T, b]."""
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
