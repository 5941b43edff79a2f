"""The embedded rollout engine: samples with only torch and a transformers model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from kedge.models.compatibility import positions
from kedge.models.fingerprint import check_weights, fingerprint, policy_weights
from kedge.models.model import eval_mode
from kedge.models.peft import drop_adapters
from kedge.ops.kernels import PREPACKED_TOKENS, Kernels
from kedge.records.errors import RolloutError
from kedge.records.types import PromptBatch, Receipt, Rollout, Sampling
from kedge.rollout.embedded.decode import Prefix, build_decoder, get_base_model, rows_that_fit
from kedge.rollout.embedded.generation import DecodeLoop
from kedge.rollout.embedded.sampling import check_sampling
from kedge.rollout.engines import EngineInputs, GroupRequests, Response, build_rollout

if TYPE_CHECKING:
    from kedge.config.base import OnPolicyConfig

_SMALL = 1_000_000  # weights of a small model
_MOST_ROWS = 512  # rows per batch on a GPU


class EmbeddedEngine:
    """Samples from a transformers model in this process.

    Args:
        model: a causal language model (PEFT models too).
        pad_id: token id after the end of a response; masks never depend on it.
        tokenizer: needed for stop strings only.
        shares_weights: True samples from ``model`` itself; False from a copy that ``load_weights``
            updates.
        chunk_rows: rows sampled together; bounds memory, changes no result.  On a GPU up to 512,
            if half of the free memory holds them.
        device: device of the copy; a shared model stays where it is.
        autocast: run the model under autocast of this type, e.g. torch.bfloat16.
        extra_column: leave one slot after the longest response if max_new_tokens allows, so that a
            score can be placed after the last token.
    """

    logprob_kind: Literal["sampled", "raw", "none"] = "sampled"
    updates_in_flight: Literal[True] = True

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
        extra_column: bool = False,
    ) -> None:
        if not shares_weights:
            # Autocast caches casts only for weights that require gradients.
            model = _copy(model, trains=autocast is not None, device=device)
        self.model = model
        self.shares_weights = shares_weights
        self._pad_id = pad_id
        self._tokenizer = tokenizer
        self._chunk_rows = chunk_rows
        self._autocast = autocast
        self._extra_column = extra_column
        self._version = 0
        self._prefixes: dict[int, Prefix] | None = None  # by row, inside keep_prefixes()
        self._loops: dict[Sampling, DecodeLoop] = {}  # by sampling distribution
        self._requests: GroupRequests[Response] = GroupRequests()

    @contextlib.contextmanager
    def keep_prefixes(self) -> Iterator[None]:
        """Context that keeps keys and values for prompts that extend earlier ones.

        For batches of at most ``chunk_rows`` rows, and models that keep all keys and values.
        """
        self._prefixes = {}
        try:
            yield
        finally:
            self._prefixes = None

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt:
        """Sample from ``weights`` from now on; with shared weights, only store the version.

        Raises:
            SyncError: a name is unknown or a shape differs.
        """
        shared = self.shares_weights
        loaded = policy_weights(self.model) if shared else _load(self.model, weights)
        self._version = version
        return Receipt(version=version, fingerprint=fingerprint(loaded))

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """Sample one response per row, which depends only on (weights, prompt, row, seed).

        Raises:
            ConfigError: the sampling cannot work for this model.
            RolloutError: the prompts break the contract, or the model returns NaN.
        """
        host = self._check_prompts(prompts, sampling)
        device = next(self.model.parameters()).device
        keeps = self._prefixes is not None and len(host) <= self._chunk_rows and self.slots > 0
        prefixes = self._prefixes if keeps else None
        loop = self._loop(sampling, self._rows_at_once(host, sampling, device), prefixes=prefixes)
        loop.submit(host, range(len(host)), seed=seed, limits=host.limits(sampling))
        responses: dict[int, Response] = {}
        with self._sampling_context(device, packs=sampling.max_new_tokens >= PREPACKED_TOKENS):
            while len(responses) < len(host):
                responses.update(loop.advance(self._version))
        rollout = self._build_rollout(host, [responses[i] for i in range(len(host))], sampling)
        return replace(rollout.to(prompts.ids.device), prompts=prompts)

    @property
    def slots(self) -> int:
        """Responses sampled at once by ``advance``; 0 if the model does not keep all keys."""
        return self._chunk_rows if build_decoder(self.model).keeps_all else 0

    @property
    def unfinished(self) -> int:
        """Responses that are being sampled."""
        return self._requests.unfinished

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        """Add rows; each is sampled as by ``generate``, up to rounding.

        Raises:
            ConfigError: the sampling cannot work for this model.
            RolloutError: the prompts break the contract.
        """
        host = self._check_prompts(prompts, sampling)
        distribution = replace(sampling, max_new_tokens=0)
        if distribution not in self._loops:
            self._loops[distribution] = self._loop(distribution, self._chunk_rows, joins=True)
        keys = self._requests.add(host, sampling)
        self._loops[distribution].submit(host, keys, seed=seed, limits=host.limits(sampling))

    def advance(self) -> Rollout | None:
        """Sample for a short time; returns complete groups."""
        with self._sampling_context(next(self.model.parameters()).device):
            for loop in self._loops.values():
                for key, response in loop.advance(self._version):
                    self._requests.put(key, response)
        return self._requests.take_complete(self._build_rollout)

    def cancel(self) -> None:
        """Drop all requests."""
        self._loops.clear()
        self._requests.clear()

    @property
    def max_length(self) -> int | None:
        """Tokens of prompt and response together; None: no limit."""
        return positions(get_base_model(self.model))

    def _loop(self, sampling: Sampling, slots: int, **how: Any) -> DecodeLoop:
        return DecodeLoop(self.model, sampling, self._tokenizer, slots=slots, **how)

    def _check_prompts(self, prompts: PromptBatch, sampling: Sampling) -> PromptBatch:
        """Check the prompts and move them to the host."""
        config: Any = get_base_model(self.model).config
        check_sampling(sampling, config.get_text_config().vocab_size)
        host = prompts.to("cpu")
        check_prompts(host, sampling, config)
        return host

    @contextlib.contextmanager
    def _sampling_context(self, device: torch.device, *, packs: bool = False) -> Iterator[None]:
        kernels, autocast = Kernels([self.model]), contextlib.nullcontext()
        if self._autocast is not None:
            autocast = torch.autocast(device.type, dtype=self._autocast)  # type: ignore[assignment]
        faster = kernels.prepacked(self._chunk_rows) if packs else kernels.active()
        with torch.no_grad(), eval_mode(self.model), autocast, faster, _one_thread(self.model):
            yield

    def _rows_at_once(self, prompts: PromptBatch, sampling: Sampling, device: torch.device) -> int:
        """Rows per chunk; as many as fit on a GPU, where more rows cost little time."""
        if device.type != "cuda":
            return self._chunk_rows
        config: Any = get_base_model(self.model).config
        tokens = prompts.ids.shape[1] + sampling.max_new_tokens
        width = (self._autocast or next(self.model.parameters()).dtype).itemsize
        fit = rows_that_fit(config, tokens, width, device)
        return max(self._chunk_rows, min(fit, _MOST_ROWS))

    def _build_rollout(
        self, prompts: PromptBatch, responses: list[Response], sampling: Sampling
    ) -> Rollout:
        pad_id, extra = self._pad_id, self._extra_column
        return build_rollout(prompts, responses, sampling, pad_id=pad_id, extra_column=extra)


def build_embedded(inputs: EngineInputs, args: OnPolicyConfig) -> EmbeddedEngine:
    """Build an engine on the learner's modules, or on a copy if sampling runs ahead of training."""
    return EmbeddedEngine(
        inputs.policy,
        pad_id=inputs.pad_id,
        tokenizer=inputs.tokenizer,
        shares_weights=args.max_lag == 0,
        chunk_rows=inputs.chunk_rows,
        autocast=inputs.dtype,
        extra_column=inputs.extra_column,
    )


def _copy(model: nn.Module, *, trains: bool, device: torch.device | str | None) -> nn.Module:
    """Copy a policy; frozen weights are shared unless ``device`` is given.

    ``trains`` is ``requires_grad`` of the copied weights.
    """
    shared = {}
    if device is None and any(p.requires_grad for p in model.parameters()):
        shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    copied = drop_adapters(copy.deepcopy(model, dict(shared)))
    for p in copied.parameters():
        if id(p) not in shared:
            p.requires_grad_(trains)
    return copied if device is None else copied.to(device)


def check_prompts(prompts: PromptBatch, sampling: Sampling, config: Any) -> None:
    """Reject prompts that are empty, not left-padded, or too long for the model."""
    lengths = prompts.mask.sum(-1)
    if len(lengths) == 0 or int(lengths.min()) == 0:
        what = f"the prompt of row {int(lengths.argmin())}" if len(lengths) else "the batch"
        raise RolloutError(f"{what} is empty; every prompt needs at least one token")
    if not bool((prompts.mask[:, 1:] >= prompts.mask[:, :-1]).all()):
        raise RolloutError("prompts must be left-padded; their mask has padding after a real token")
    most = positions(config)
    limits = prompts.limits(sampling).to(lengths.device)
    row = int((lengths + limits).argmax())
    if most is not None and lengths[row] + limits[row] > most:
        raise RolloutError(
            f"the prompt of {lengths[row]} tokens and max_new_tokens={limits[row]} need"
            f" {lengths[row] + limits[row]} positions; the model has {most}. Lower"
            " max_prompt_length or the response length"
        )


@contextlib.contextmanager
def _one_thread(model: nn.Module) -> Iterator[None]:
    """Context with one thread for small models, whose threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    small = threads > 1 and sum(p.numel() for p in model.parameters()) <= _SMALL
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if small:
            torch.set_num_threads(threads)


def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy ``weights`` into the model; returns the model's tensors of the same names."""
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    check_weights(targets, weights)
    for name, new in weights.items():
        targets[name].data.copy_(new)
    return {name: targets[name] for name in weights}
