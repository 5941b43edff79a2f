"""Runs a causal backbone over rows joined end to end, without padding.

All layers but attention treat tokens one by one: they run once over the tokens of all rows, however
different their lengths, and once over a prompt that several rows share.  Attention runs row by row
(``ops/cpu/joined_attention.py``).  transformers hands the keyword ``packed_segments`` down to its
attention function, also when a layer is recomputed in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kedge.models.mask_checks import known_masks
from kedge.ops.cpu.joined_attention import Group, joined_attention
from kedge.ops.cpu.low_precision import float32_attention
from kedge.ops.cpu.matmul import cpu_kernels_enabled
from kedge.ops.grouped_attention import OTHER, grouped_attention

_USUAL, _JOINED = _KNOWN = "sdpa", "kedge_joined_rows"
_WINDOWS = ("sliding_window", "attention_chunk_size")  # options that need a [T, T] mask
_PROBE = ((5,), (3, 2, 4), (7,))  # lengths of the groups in the comparison
_lock = Lock()
_users: Counter[int] = Counter()  # active contexts by id of the configuration they changed


def pack_sequences(ids: Tensor, lengths: Tensor) -> Tensor:
    """Join right-padded rows int64 [b, L] with lengths [b] to tokens int64 [1, T]."""
    return ids[torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]][None]


def run_packed(backbone: Any, ids: Tensor, groups: Sequence[Group]) -> Tensor:
    """Last hidden states float [1, T, H] of joined rows; ``supports_packing(backbone)`` must hold.

    With gradient, call it and the backward pass within ``VarlenAttention.active``: layers may be
    recomputed.

    Args:
        backbone: backbone of a transformers model.
        ids: int64 [1, T]; the tokens of all rows, a shared prompt once.
        groups: (n,) for a row of n tokens, (n, a, b, ...) for a prompt of n tokens and the
            responses to it of a, b, ... tokens; their sum is T.
    """
    # Without gradient, activate it here even if another thread has it active.
    attention = VarlenAttention([] if torch.is_grad_enabled() else [backbone])
    positions = []
    for prompt, *responses in groups:
        positions.append(torch.arange(prompt, device=ids.device))
        positions += [torch.arange(prompt, prompt + n, device=ids.device) for n in responses]
    with attention.active(), known_masks():
        assert backbone.config._attn_implementation == _JOINED, "call it within active()"
        output = backbone(
            input_ids=ids,
            position_ids=torch.cat(positions)[None],
            use_cache=False,
            packed_segments=tuple(groups),
        )
    hidden: Tensor = output.last_hidden_state
    return hidden


class VarlenAttention:
    """Lets models attend to joined rows.

    Args:
        models: models to patch; those without torch's attention stay unchanged.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        configs = [getattr(m, "config", None) for model in models for m in model.modules()]
        known = [c for c in configs if getattr(c, "_attn_implementation", None) in _KNOWN]
        self._configs: list[Any] = list({id(c): c for c in known}.values())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the attention of the models obeys ``packed_segments``.

        Without this keyword their attention is the usual one.
        """
        with _lock:  # models in other threads may share the configuration
            for config in self._configs:
                _users[id(config)] += 1
                config._attn_implementation_internal = _JOINED
        try:
            yield
        finally:
            with _lock:
                for config in self._configs:
                    _users[id(config)] -= 1
                    if not _users[id(config)]:
                        del _users[id(config)]
                        config._attn_implementation_internal = _USUAL


@torch.no_grad()
def supports_packing(backbone: Any) -> bool:
    """Whether joined rows give the same states as separate rows; tests a few tokens.

    Always False on an accelerator, where padding is cheaper than many small attention kernels, and
    with KEDGE_CPU_KERNELS=0 in the environment.
    """
    weight = next(iter(backbone.parameters()), None)
    if weight is None or weight.device.type != "cpu" or not cpu_kernels_enabled():
        return False
    config = getattr(backbone, "config", None)
    if config is None or getattr(config, "_attn_implementation", None) not in _KNOWN:
        return False
    parts = (config, config.get_text_config())
    if any(getattr(part, name, None) for part in parts for name in _WINDOWS):
        return False
    training = [m for m in backbone.modules() if m.training]
    backbone.eval()
    try:
        return _agrees(backbone)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False  # its arguments differ
    finally:
        for module in training:
            module.training = True


def _agrees(backbone: Any) -> bool:
    def states(row: Tensor) -> Tensor:
        hidden: Tensor = backbone(input_ids=row[None], use_cache=False).last_hidden_state
        return hidden

    apart, joined_ids = [], []
    for prompt, *responses in _PROBE:
        start = torch.arange(prompt)
        rows = [start, *(torch.arange(n) + 1 for n in responses)]
        joined_ids += rows
        apart.append(states(start))
        apart += [states(torch.cat([start, x]))[:, prompt:] for x in rows[1:]]
    joined = run_packed(backbone, torch.cat(joined_ids)[None], _PROBE)
    expected = torch.cat(apart, dim=1)
    slack = 1e-4 if joined.dtype in (torch.float32, torch.float64) else 2e-2
    gap = (joined - expected).abs().max()
    return joined.shape == expected.shape and bool(gap <= slack * (1 + expected.abs().max()))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_segments: tuple[Group, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: states float [1, T, h, d]."""
    if packed_segments is None:
        usual = ALL_ATTENTION_FUNCTIONS[_USUAL]
        states: tuple[Tensor, None] = usual(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
        return states
    if attention_mask is not None or dropout or any(options.get(x) is not None for x in OTHER):
        raise ValueError(f"joined rows do not support a mask, dropout, or {OTHER}")
    return joined_attention(query, key, value, packed_segments, scaling).transpose(1, 2), None


# The first is used under bfloat16 autocast on a CPU, the second for single tokens on a GPU.
ALL_ATTENTION_FUNCTIONS[_USUAL] = grouped_attention(
    float32_attention(ALL_ATTENTION_FUNCTIONS[_USUAL])
)
ALL_ATTENTION_FUNCTIONS.register(_JOINED, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_JOINED, ALL_MASK_ATTENTION_FUNCTIONS[_USUAL])
