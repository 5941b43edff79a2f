"""The embedded rollout engine: it samples with nothing but torch and a transformers model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kedge.backends.hf.decode import build_stepper, get_base_model
from kedge.backends.hf.fingerprint import check_weights, fingerprint, policy_weights
from kedge.backends.hf.sampling import check, draw, restrict, support, uniforms
from kedge.backends.hf.stopping import Stopper
from kedge.backends.rollout import EngineInputs
from kedge.errors import RolloutError
from kedge.ops.cpu.patch import Kernels
from kedge.types import PromptBatch, Receipt, Rollout, Sampling

_SMALL = 1_000_000  # weights


class EmbeddedEngine:
    """Samples from a transformers model in this process.

    Args:
        model: a causal or an encoder-decoder language model (PEFT models too).
        pad_id: fills ``Rollout.ids`` after the end of a response; masks never depend on it.
        tokenizer: needed for stop strings only.
        shares_weights: True samples from ``model`` itself; False from a copy that ``load_weights``
            updates.
        chunk_rows: rows that are in flight together; bounds memory, changes no result.
        device: where the copy lives; a live model stays where it is.
        autocast: run the model under autocast of this type, e.g. torch.bfloat16.
        extra_slot: leave one slot after the longest response if max_new_tokens allows, so that a
            score can be placed after the last token.
        record_allowed_tokens: record ``Rollout.allowed_tokens`` when top-k, top-p or min-p cut the
            distribution.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_id: int,
        tokenizer: Any = None,
        shares_weights: bool = True,
        chunk_rows: int = 64,
        device: torch.device | str | None = None,
        autocast: torch.dtype | None = None,
        extra_slot: bool = False,
        record_allowed_tokens: bool = True,
    ) -> None:
        if not shares_weights:
            model = copy.deepcopy(model).requires_grad_(False)
            model = model if device is None else model.to(device)
        self.model = model
        self._live = shares_weights
        self._pad_id = pad_id
        self._tokenizer = tokenizer
        self._chunk_rows = chunk_rows
        self._autocast = autocast
        self._extra_slot = extra_slot
        self._keep_support = record_allowed_tokens
        self._version = 0

    @property
    def shares_weights(self) -> bool:
        """True if it samples from the given model, False if from a copy."""
        return self._live

    @property
    def logprobs(self) -> Literal["sampled", "raw", "none"]:
        """Always "sampled": recorded of the very distribution that tokens are drawn from."""
        return "sampled"

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt:
        """Sample from ``weights`` from now on; a live engine only notes the version.

        Raises:
            SyncError: a name is unknown or a shape differs.
        """
        held = policy_weights(self.model) if self._live else _copied(self.model, weights)
        self._version = version
        return Receipt(version=version, fingerprint=fingerprint(held))

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One response per row; each depends on (weights, prompt, row, seed) alone.

        Raises:
            ConfigError: the sampling cannot work for this model.
            RolloutError: the prompts break the contract, or the model returns NaN.
        """
        config: Any = get_base_model(self.model).config
        check(sampling, config.get_text_config().vocab_size)
        check_prompts(prompts, sampling, config)
        device = next(self.model.parameters()).device
        order, copies = _order(prompts)
        pieces = []
        quick, precise = Kernels([self.model]).active(), self._precision(device)
        with torch.no_grad(), _evaluating(self.model), quick, precise, _alone(self.model):
            for start in range(0, len(order), self._chunk_rows):
                cut = slice(start, start + self._chunk_rows)
                pieces.append(self._chunk(prompts, order[cut], copies[cut], sampling, seed, device))
        return self._assemble(prompts, order, pieces, sampling.max_new_tokens)

    def _precision(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self._autocast)

    def _chunk(
        self,
        prompts: PromptBatch,
        rows: Tensor,
        groups: Tensor,
        sampling: Sampling,
        seed: int,
        device: torch.device,
    ) -> _Responses:
        """Sample the responses of ``rows``, reading each of their prompts once."""
        unique, copies = torch.unique_consecutive(groups, return_inverse=True)
        first = torch.zeros_like(unique).scatter_(0, copies.flip(0), rows.flip(0))
        mask = prompts.mask[first]
        longest = int(mask.sum(-1).max())
        mask = mask[:, -longest:].to(device)
        # A pad token that was added to the tokenizer alone is beyond the model's vocabulary.
        ids = prompts.ids[first][:, -longest:].to(device).masked_fill(~mask, 0)
        steps = torch.arange(sampling.max_new_tokens, device=device)
        u = uniforms(seed, prompts.row[rows].to(device), steps).t().contiguous()
        return _sample(
            build_stepper(self.model),
            (ids, mask, copies.to(device)),
            u,
            sampling,
            Stopper(sampling, self._tokenizer, len(rows), device),
            record_allowed_tokens=self._keep_support and sampling.truncates,
        )

    def _assemble(
        self, prompts: PromptBatch, order: Tensor, pieces: list[_Responses], limit: int
    ) -> Rollout:
        """The rows of all chunks, back in the order of the prompts."""
        size = max(int(x.length.max()) for x in pieces)
        size = min(size + self._extra_slot, limit)
        device = prompts.ids.device
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)).to(order))

        def join(parts: list[Tensor]) -> Tensor:
            return torch.cat([x.to(device) for x in parts])[back]

        length = join([x.length for x in pieces])
        present = torch.arange(size, device=device) < length[:, None]
        ids = join([_fit(x.tokens, size, self._pad_id) for x in pieces])
        logprobs = join([_fit(x.logprobs, size, 0.0) for x in pieces])
        if logprobs[present].isnan().any():
            raise RolloutError(
                f"the model of version {self._version} returned NaN logits while sampling; "
                "lower the learning rate, or check the weights that were loaded"
            )
        kept = [x.support for x in pieces if x.support is not None]
        return Rollout(
            prompts=prompts,
            ids=ids.masked_fill(~present, self._pad_id),
            loss_mask=present,
            response_mask=present.clone(),
            terminated=join([x.finished for x in pieces]),
            version=torch.full_like(length, self._version),
            behavior_logprobs=logprobs.masked_fill(~present, 0.0),
            allowed_tokens=_join_support(kept, size, join, present) if kept else None,
        )


def build_embedded(inputs: EngineInputs, *, max_lag: int) -> EmbeddedEngine:
    """Samples from the learner's modules; from a copy if sampling runs ahead of training."""
    return EmbeddedEngine(
        inputs.policy,
        pad_id=inputs.pad_id,
        tokenizer=inputs.tokenizer,
        shares_weights=max_lag == 0,
        chunk_rows=inputs.chunk_rows,
        autocast=inputs.dtype,
        extra_slot=inputs.extra_slot,
    )


@dataclass(slots=True)
class _Responses:
    """What one chunk of b rows sampled, T steps long; junk after the length of a row."""

    tokens: Tensor  # int64 [b, T]
    logprobs: Tensor  # float32 [b, T]
    length: Tensor  # int64 [b]
    finished: Tensor  # bool [b]
    support: Tensor | None  # int64 [b, T, K]


class _TokenBuffer:
    """Tokens as they are sampled, for a set of rows that only ever shrinks."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.active = torch.arange(rows, device=device)
        self.steps: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []

    def add(self, token: Tensor, logprob: Tensor, drawable: Tensor | None) -> None:
        self.steps.append((self.active, token, logprob, drawable))

    def stacked(self, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [b, T], log-probabilities [b, T] and support [b, T, K]."""
        shape = (len(self.steps), rows)
        first = self.steps[0]
        tokens, logprobs = first[1].new_zeros(shape), first[2].new_zeros(shape)
        width = max(0 if s is None else s.shape[-1] for *_, s in self.steps)
        drawable = first[1].new_full((*shape, width), -1) if width else None
        for t, (active, token, logprob, allowed) in enumerate(self.steps):
            tokens[t, active] = token
            logprobs[t, active] = logprob
            if drawable is not None and allowed is not None:
                drawable[t, active, : allowed.shape[-1]] = allowed
        swapped = None if drawable is None else drawable.transpose(0, 1)
        return tokens.t(), logprobs.t(), swapped


def _sample(
    stepper: Any,
    prompts: tuple[Tensor, Tensor, Tensor],
    u: Tensor,
    sampling: Sampling,
    stopper: Stopper,
    *,
    record_allowed_tokens: bool,
) -> _Responses:
    """The generation loop; ``u`` float64 [T, b] holds the random number of every token."""
    rows, device = u.shape[1], u.device
    stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=device)
    length = torch.full((rows,), len(u), device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    running = torch.ones_like(finished)
    tape = _TokenBuffer(rows, device)
    logits = stepper.start(*prompts)
    for t in range(len(u)):
        logits = restrict(logits, sampling, t, stop_ids)
        if sampling.temperature == 0:
            token = logits.argmax(-1)
            logprob = torch.zeros_like(token, dtype=torch.float32)
        else:
            token, logprob = draw(logits, u[t])
        tape.add(token, logprob, support(logits) if record_allowed_tokens else None)
        hit = stopper.ended(token)
        if hit is not None and bool((hit := hit & running).any()):
            at = tape.active[hit]
            length[at] = t + 1
            finished[at] = True
            running = running & ~hit
            left = int(running.sum())
            if not left:
                break
            if 4 * left <= 3 * len(running):  # dropping rows copies the cache: only when it pays
                keep = running.nonzero()[:, 0]
                stepper.select(keep)
                stopper.select(keep)
                tape.active, u, token = tape.active[keep], u[:, keep], token[keep]
                running = running[keep]
        if t + 1 < len(u):
            logits = stepper.step(token)
    tokens, logprobs, drawable = tape.stacked(rows)
    return _Responses(tokens, logprobs, length, finished, drawable)


def _fit(x: Tensor, size: int, fill: float) -> Tensor:
    """Cut or pad dimension 1 to ``size``."""
    if x.shape[1] >= size:
        return x[:, :size]
    pad = x.new_full((x.shape[0], size - x.shape[1], *x.shape[2:]), fill)
    return torch.cat([x, pad], dim=1)


def _join_support(kept: list[Tensor], size: int, join: Any, present: Tensor) -> Tensor:
    width = max(x.shape[-1] for x in kept)
    wide = [nn.functional.pad(_fit(x, size, -1), (0, width - x.shape[-1]), value=-1) for x in kept]
    joined: Tensor = join(wide)
    return joined.masked_fill(~present[..., None], -1)


def _order(prompts: PromptBatch) -> tuple[Tensor, Tensor]:
    """Rows sorted by prompt length then group, and the group number of each, both int64 [B].

    Raises:
        RolloutError: rows of one group hold different prompts.
    """
    groups, number = prompts.group.unique(return_inverse=True)
    first = torch.full_like(groups, len(number)).scatter_reduce_(
        0, number, torch.arange(len(number)).to(number), "amin"
    )[number]
    same = (prompts.mask == prompts.mask[first]) & (
        (prompts.ids == prompts.ids[first]) | ~prompts.mask
    )
    if not same.all():
        row = int((~same.all(-1)).nonzero()[0])
        raise RolloutError(
            f"rows {int(first[row])} and {row} are of group {int(prompts.group[row])} but hold "
            "different prompts; rows share a group only if they answer the same prompt"
        )
    order = number.argsort(stable=True)
    order = order[prompts.mask.sum(-1)[order].argsort(stable=True)]
    return order, number[order]


def check_prompts(prompts: PromptBatch, sampling: Sampling, config: Any) -> None:
    """Refuse prompts that an engine cannot answer.

    Raises:
        RolloutError: a prompt is empty, not left-padded, or too long for the model.
    """
    lengths = prompts.mask.sum(-1)
    if len(lengths) == 0 or int(lengths.min()) == 0:
        what = f"the prompt of row {int(lengths.argmin())}" if len(lengths) else "the batch"
        raise RolloutError(f"{what} is empty; every prompt needs at least one token")
    if not bool((prompts.mask[:, 1:] >= prompts.mask[:, :-1]).all()):
        raise RolloutError("prompts must be left-padded; their mask has padding after a real token")
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = int(lengths.max())
    apart = getattr(config, "is_encoder_decoder", False)  # prompt and response count from 0 each
    needed = (max if apart else sum)((longest, sampling.max_new_tokens))
    if most is not None and needed > most:
        raise RolloutError(
            f"the longest prompt of {longest} tokens and max_new_tokens={sampling.max_new_tokens} "
            f"need {needed} positions; the model has {most}. "
            "Lower max_prompt_length or the response length"
        )


@contextlib.contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """One thread inside for models so small that more would wait for each other all the time."""
    threads = torch.get_num_threads()
    small = threads > 1 and sum(p.numel() for p in model.parameters()) <= _SMALL
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if small:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout inside; afterwards every module is in the mode it was in."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _copied(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy ``weights`` into the model; what the model then holds under the same names."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    check_weights(own, weights)
    for name, new in weights.items():
        own[name].data.copy_(new)
    return {name: own[name] for name in weights}
