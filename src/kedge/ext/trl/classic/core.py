"""The functions of ``trl.core``, implemented with Kedge's formulas."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import TopKLogitsWarper, TopPLogitsWarper, trainer_utils

from kedge.math.masked import whiten as _whiten

WANDB_PADDING = -1
set_seed = trainer_utils.set_seed


class LengthSampler:
    """Draws a length, each of ``min_value`` to ``max_value - 1`` equally often (numpy's state)."""

    def __init__(self, min_value: int, max_value: int) -> None:
        if not 0 <= min_value < max_value:
            raise ValueError(
                f"LengthSampler needs 0 <= min_value < max_value, got {min_value} and {max_value}"
            )
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        """One length."""
        return int(np.random.choice(self.values))


def logprobs_from_logits(logits: Tensor, labels: Tensor, gather: bool = True) -> Tensor:
    """Log-probabilities [B, T] of ``labels``; with ``gather=False`` of all tokens [B, T, V]."""
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, labels[..., None])[..., 0] if gather else logprobs


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy of each distribution, nats: float [..., V] -> float [...]."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def whiten(values: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale to unit variance over all elements; ``shift_mean`` removes the mean."""
    return _whiten(values, torch.ones_like(values, dtype=torch.bool), center=shift_mean)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """``whiten`` over the elements where ``mask`` is True; 0 elsewhere."""
    return _whiten(values, mask.bool(), center=shift_mean)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean where ``mask`` is True, overall or along one axis; 0 where the mask is empty."""
    kept = torch.where(mask.bool(), values, 0.0)
    if axis is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(axis) / mask.sum(axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance where ``mask`` is True; a ValueError if that is too few values."""
    count = int(mask.sum())
    if count < 1 + unbiased:
        raise ValueError(
            f"the variance needs at least {1 + unbiased} values, but the mask selects {count}"
        )
    off = torch.where(mask.bool(), values - masked_mean(values, mask), 0.0)
    return (off**2).sum() / (count - unbiased)


def clip_by_value(x: Tensor, tensor_min: float | Tensor, tensor_max: float | Tensor) -> Tensor:
    """``x`` between two bounds, which may be tensors."""
    low, high = torch.as_tensor(tensor_min, device=x.device), torch.as_tensor(tensor_max).to(x)
    return torch.maximum(torch.minimum(x, high), low.to(x))


def flatten_dict(nested: Mapping[str, Any], sep: str = "/") -> dict[str, Any]:
    """Flatten nested dictionaries; ``sep`` joins their names, which must not contain it."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if sep in name:
            raise ValueError(f"the key {name!r} contains the separator {sep!r}")
        if isinstance(value, Mapping):
            flat |= {f"{name}{sep}{k}": v for k, v in flatten_dict(value, sep).items()}
        else:
            flat[name] = value
    return flat


def stack_dicts(stats_dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the flattened tensors of all dictionaries by name, padded with -1."""
    return {
        name: pad_sequence(
            [stats[name].flatten() for stats in stats_dicts],
            batch_first=True,
            padding_value=WANDB_PADDING,
        )
        for name in stats_dicts[0]
    }


def stats_to_np(stats_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as numpy arrays, bfloat16 as float32, numbers as floats."""
    out: dict[str, Any] = {}
    for name, value in stats_dict.items():
        x = value
        if isinstance(x, Tensor):
            x = x.detach().cpu()
            x = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
        out[name] = float(x) if isinstance(x, int | float | np.number) else x
    return out


def convert_to_scalar(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and arrays of one element as numbers; the rest unchanged."""
    return {
        name: x.item()
        if isinstance(x, Tensor | np.ndarray) and (x.ndim == 0 or x.shape == (1,))
        else x
        for name, x in stats.items()
    }


def top_k_top_p_filtering(
    logits: Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    filter_value: float = -float("inf"),
    min_tokens_to_keep: int = 1,
) -> Tensor:
    """Logits float [B, V] with all but the likely tokens at ``filter_value``; top_k 0: all."""
    limits: Any = {"filter_value": filter_value, "min_tokens_to_keep": min_tokens_to_keep}
    unused = torch.empty(0, dtype=torch.long)  # the warpers ignore previous tokens
    if top_k > 0:
        logits = TopKLogitsWarper(int(top_k), **limits)(unused, logits)
    if 0 <= top_p < 1:
        logits = TopPLogitsWarper(float(top_p), **limits)(unused, logits)
    return logits


@torch.no_grad()
def respond_to_batch(
    model: nn.Module, queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Sample ``txt_len`` tokens int64 [B, txt_len] after queries int64 [B, P] of equal length."""
    ids = queries
    for _ in range(txt_len):
        logits = top_k_top_p_filtering(model(ids)[0][:, -1], top_k=top_k, top_p=top_p)
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=-1)
    return ids[:, -txt_len:]


class PPODecorators:
    """Empties the accelerator's memory cache after a block, if enabled."""

    optimize_device_cache = False

    @classmethod
    @contextmanager
    def empty_device_cache(cls) -> Iterator[None]:
        """Usable as a context manager or a decorator."""
        yield
        if cls.optimize_device_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()


def random_state() -> dict[str, Any]:
    """The random states of this process."""
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    state = {
        "python": random.getstate(),
        "numpy": [name, words, place, has_gauss, gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the random states of ``random_state``."""
    random.setstate(state["python"])
    name, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
