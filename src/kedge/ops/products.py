"""The seam for faster products: what an extension may replace while models of Kedge run.

An entry point of the group ``kedge.ops`` names a subclass of `Backend`; without one, torch chooses.
Choices depend on the machine alone, so that a run that resumes on it repeats its numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from kedge import plugins

Forward = Callable[..., Tensor]


def kernels_enabled() -> bool:
    """False with KEDGE_CPU_KERNELS=0 in the environment or with oneDNN off in torch."""
    return os.environ.get("KEDGE_CPU_KERNELS") != "0" and bool(torch.backends.mkldnn.enabled)


class Layers:
    """Faster forwards of a model's layers; these are none."""

    def forwards(self) -> list[tuple[nn.Module, Forward]]:
        """Layers and forwards for passes with gradient."""
        return []

    def packed_forwards(self, rows: int) -> list[tuple[nn.Module, Forward]]:
        """Layers and forwards for weights that do not change, for products of ``rows`` rows."""
        return []

    def forget(self) -> None:
        """Called at the end of a block of passes."""

    def expire(self) -> None:
        """Called after an optimizer step within a block of passes."""


class Backend:
    """Products as torch computes them."""

    slow_bf16 = ""  # why bf16 is slow on this processor, and the way out; empty: it is not

    def layers(self, models: list[nn.Module]) -> Layers:
        """Faster forwards for layers of models, which are on their final device."""
        return Layers()

    def float32_attention(self) -> int:
        """Largest number of keys for which float32 attention is faster under CPU autocast."""
        return 0

    def keep_freed_memory(self, keep: bool) -> None:
        """Keep freed memory for the next pass, or return it at once."""

    def float32_product(
        self, x: Tensor, w: Tensor, bias: Tensor | None, *, out_buffer: Tensor
    ) -> Tensor:
        """The product x w^T + bias in the dtype of ``out_buffer`` float [m, n], without rounding.

        For bfloat16 or float16 matrices the result has the float32 sums of the accumulator.
        ``x`` float [m, k] and ``w`` float [n, k] may have any strides; ``bias`` is float [n].
        """
        if x.dtype != out_buffer.dtype:
            if x.device.type == "cuda" and _supports_out_dtype(x.device):
                result: Tensor = torch.mm(x, w.T, out_dtype=out_buffer.dtype)
                return result if bias is None else result.add_(bias)
            x, w = x.to(out_buffer.dtype), w.to(out_buffer.dtype)
            bias = None if bias is None else bias.to(out_buffer.dtype)
        return self.product(x, w, bias, out_buffer=out_buffer)

    def product(
        self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, out_buffer: Tensor | None = None
    ) -> Tensor:
        """The product x w^T + bias without gradient; shapes as in `float32_product`."""
        if bias is None:
            return torch.mm(x, w.T, out=out_buffer)
        return torch.addmm(bias, x, w.T, out=out_buffer)

    def outer(self, g: Tensor, x: Tensor) -> Tensor:
        """g^T x float [n, k] of g [m, n] and x [m, k], without gradient."""
        return self.product(g.T, x.T) if g.shape[1] <= x.shape[1] else self.product(x.T, g.T).T

    def in_place(self, x: Tensor) -> bool:
        """Whether sums of products with ``x`` are added in place."""
        return True

    def add_product(self, total: Tensor, x: Tensor, w: Tensor) -> None:
        """Add x w float [m, k] of x [m, n] and w [n, k] to ``total``, in its precision."""
        if total.dtype == x.dtype and self.in_place(x):
            total.addmm_(x, w)
        else:
            total.add_(self.product(x, w.T))

    def add_outer(self, total: Tensor, g: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
        """Add g^T x float [n, k] of g [m, n] and x [m, k] to ``total``, in its precision.

        With ``overwrite`` the product replaces what ``total`` holds, which may be uninitialized.
        """
        if total.dtype == g.dtype and self.in_place(g):
            total.addmm_(g.T, x, beta=0 if overwrite else 1)
        elif overwrite:
            total.copy_(self.outer(g, x))
        else:
            total.add_(self.outer(g, x))


@cache
def backend() -> Backend:
    """The backend of the first entry point whose extension is there."""
    found = (plugins.load("kedge.ops", name) for name in plugins.find("kedge.ops"))
    kind: type[Backend] = next((x for x in found if x is not None), Backend)
    return kind()


@cache
def _supports_out_dtype(device: torch.device) -> bool:
    """Whether ``torch.mm`` can return the float32 sums of bfloat16 products on this device."""
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        result: Tensor = torch.mm(x, x, out_dtype=torch.float32)
    except (TypeError, RuntimeError):  # torch before 2.8, or another backend
        return False
    return result.dtype == torch.float32
