"""Weights on their way to a sampler, and what it says of them.  A lost update is never silent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from kedge.errors import SyncError
from kedge.types import Receipt


class WeightUpdate(NamedTuple):
    """The weights after an update, as every sampler must hold them."""

    weights: Mapping[str, Tensor]  # empty for a sampler that uses the learner's own modules
    version: int
    fingerprint: str
    step: int  # updates finished
    moves: int  # updates so far that trained the policy


def verify_sync(receipt: Receipt | None, sent: WeightUpdate, *, held: str, moved: bool) -> str:
    """The fingerprint that the sampler now holds.

    Args:
        receipt: what the sampler says; None from one that holds no weights at all.
        sent: what it was sent.
        held: the fingerprint that it confirmed before.
        moved: the policy trained in between.

    Raises:
        SyncError: it holds other weights, or training did not change them.
    """
    if receipt is None:
        return held
    if (receipt.version, receipt.fingerprint) != (sent.version, sent.fingerprint):
        raise SyncError(
            f"the sampler reports weights {receipt.fingerprint} (version {receipt.version})"
            f" after being sent {sent.fingerprint} (version {sent.version}): it would sample from"
            " another policy than the one that trains"
        )
    if moved and receipt.fingerprint == held:
        raise SyncError(
            f"training step {sent.version} had a gradient and a learning rate above 0, but the"
            f" policy's weights did not change (fingerprint {sent.fingerprint}): the learning rate"
            " is too small for their precision, or the optimizer holds other weights"
        )
    return receipt.fingerprint
