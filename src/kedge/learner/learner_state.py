"""Weights and state of a learner: copies for rollout engines, model files, checkpoints.

Only rank 0 holds full tensors of a sharded model, and only for a copy or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from kedge.learner.distributed import raise_on_all_ranks, shard_like
from kedge.models.fingerprint import FingerprintSums, WeightsCopy, full_tensor, policy_weights
from kedge.records.errors import CheckpointError, DamagedCheckpointError
from kedge.records.types import StoredTensor

Stage = Callable[[Iterable[tuple[str, Tensor]]], WeightsCopy]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCopier:
    """Hands the trainable weights of a policy to rollout engines."""

    # a single engine, on rank 0, gets the weights: other ranks take part in gathering only
    first_only: bool = False
    dtype: torch.dtype | None = None  # of the copies; None: the dtype of the weights
    stage: Stage | None = None  # moves full tensors to where engines read them; None: copies
    device: str | None = None  # of the copies; None: the learner's
    # engines load the weights before training continues, so they get the learner's own tensors,
    # unless these are sharded
    live: bool = False

    def __call__(self, policy: nn.Module) -> dict[str, Tensor]:
        """Full weights of a possibly sharded policy, gathered one at a time.  Collective.

        Shards are converted before they are gathered: half the bytes for engines in 16 bits.  If a
        rank cannot stage or copy them, every rank raises SyncError.
        """
        named = policy_weights(policy)
        sharded = any(isinstance(p, DTensor) for p in named.values())
        if self.live and self.stage is None and not sharded:
            raise_on_all_ranks(None)  # rank 0 may stage, and fail
            return WeightsCopy(named) if not self.first_only or is_first() else {}
        sums, left = FingerprintSums(), len(named)

        def gather() -> Iterator[tuple[str, Tensor | None]]:
            nonlocal left
            for name, p in named.items():
                sent = p.to(self._dtype_of(p))
                x = full_on_first(sent) if self.first_only else full_tensor(sent)
                left -= 1
                yield name, x

        gathered, failure = gather(), None
        try:
            staged = (self.stage or self._copy)(_hash(named, gathered, sums))
        except Exception as error:
            failure = error
            for _ in gathered:  # other ranks must take part in gathering the rest
                pass
            if left:  # gathering failed midway
                raise
        raise_on_all_ranks(failure)
        staged.fingerprint = sums.digest()
        staged.device = next(iter(named.values())).device if staged else None
        return staged

    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> WeightsCopy:
        copies = WeightsCopy()
        for name, x in weights:
            copies[name] = x.to(device=self.device, dtype=self._dtype_of(x), copy=True)
        return copies

    def _dtype_of(self, x: Tensor) -> torch.dtype | None:
        return self.dtype if x.is_floating_point() else None


def _hash(
    named: Mapping[str, Tensor],
    gathered: Iterable[tuple[str, Tensor | None]],
    sums: FingerprintSums,
) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of this rank; adds each weight, of sharded ones its shard, to ``sums``."""
    for name, x in gathered:
        if x is not None or isinstance(named[name], DTensor):
            sums.add(name, named[name])
        if x is not None:
            yield name, x


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def full_on_first(x: Tensor) -> Tensor | None:
    """Gather a possibly sharded tensor on rank 0; None on other ranks.  Collective."""
    if not isinstance(x, DTensor):
        return x if is_first() else None
    local, ranks = x.to_local(), x.device_mesh.size()
    padded = local.new_zeros((-(-x.shape[0] // ranks), *x.shape[1:]))  # padded to the longest shard
    padded[: len(local)] = local
    if x.device_mesh.get_rank() != 0:
        dist.gather(padded, None, dst=0)
        return None
    whole = local.new_empty((ranks, *padded.shape))
    dist.gather(padded, list(whole.unbind()), dst=0)
    return whole.flatten(0, 1)[: x.shape[0]]


def full_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The state dict of a sharded model with full tensors on rank 0, else None.  Collective.

    Tensors are gathered one at a time; tied weights stay tied.
    """
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return None
    seen: dict[int, Tensor | None] = {}
    state = model.state_dict(keep_vars=True)
    for x in state.values():
        if id(x) not in seen:
            full = full_on_first(x.detach())
            seen[id(x)] = None if full is None else full.cpu()
    full_tensors = {name: y for name, x in state.items() if (y := seen[id(x)]) is not None}
    return full_tensors or None


def all_finite(x: Tensor) -> bool:
    """Whether a tensor, or this rank's shard of it, has neither NaN nor infinite numbers."""
    local = x.to_local() if isinstance(x, DTensor) else x
    return not local.numel() or bool(torch.stack(local.detach().aminmax()).isfinite().all())


@torch.no_grad()
def load_weights(trained: Mapping[str, Sequence[Tensor]], saved: Mapping[str, Any]) -> None:
    """Load saved weights into each model, sharded or not."""
    for name, weights in trained.items():
        stored = saved.get(name, [])
        if len(weights) != len(stored):
            head = name == "value" and len(stored) == 2  # a weight and a bias
            how = 'value_source="policy"' if head else "the model that it was written with"
            raise CheckpointError(
                f"the checkpoint's {name} has {len(stored)} trained weights, this run's has"
                f" {len(weights)}; resume with {how}"
            )
        for number, (p, q) in enumerate(zip(weights, stored, strict=True)):
            if p.shape != q.shape:
                raise CheckpointError(
                    f"weight {number} of the checkpoint's {name} has shape {tuple(q.shape)}, this"
                    f" run's has {tuple(p.shape)}; resume with the model that it was written with"
                )
            if not all_finite(q):
                raise DamagedCheckpointError(f"weight {number} of its {name} is not finite")
        for p, q in zip(weights, stored, strict=True):
            p.copy_(shard_like(q, p))


def read_state(
    state: Mapping[str, Any], trained: Mapping[str, Sequence[Tensor]], optimizer: Optimizer
) -> Mapping[str, Any]:
    """Read the stored tensors of a learner's state, sharded like the weights in ``trained``."""
    pairs: list[tuple[StoredTensor, Tensor]] = []

    def target(x: Any, weight: Tensor) -> Any:
        if not isinstance(x, StoredTensor):
            return x
        like = weight if x.shape == weight.shape else torch.empty(x.shape, device=weight.device)
        pairs.append((x, torch.empty_like(like, dtype=x.dtype, requires_grad=False)))
        return pairs[-1][1]

    if not any(isinstance(x, StoredTensor) for xs in state["weights"].values() for x in xs):
        return state
    saved, numbered = state["optimizer"], [p for g in optimizer.param_groups for p in g["params"]]
    weights = {
        name: [target(x, p) for x, p in zip(xs, trained[name], strict=True)]
        if len(xs) == len(trained.get(name, ()))
        else xs
        for name, xs in state["weights"].items()
    }
    by_weight = {
        i: {key: target(x, numbered[i]) for key, x in kept.items()}
        for i, kept in saved["state"].items()
        if i < len(numbered)
    }
    if pairs:
        pairs[0][0].read(pairs)
    return {**state, "weights": weights, "optimizer": {**saved, "state": by_weight}}
