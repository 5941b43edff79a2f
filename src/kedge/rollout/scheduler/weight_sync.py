"""Verification of weight syncs from the learner to the rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from kedge.errors import SyncError
from kedge.types import Receipt


class WeightUpdate(NamedTuple):
    """The weights after an iteration, which every rollout engine must load."""

    weights: Mapping[str, Tensor]  # empty if the engine shares the learner's modules
    version: int
    fingerprint: str
    step: int  # iterations finished
    moves: int  # iterations so far that trained the policy


def verify_sync(receipt: Receipt | None, sent: WeightUpdate, *, confirmed: str, moved: bool) -> str:
    """The fingerprint of the weights that the rollout engine now has.

    Args:
        receipt: returned by the engine; None from an engine without weights.
        sent: what it was sent.
        confirmed: the fingerprint that it confirmed before.
        moved: whether the policy was trained in between.

    Raises:
        SyncError: the engine has other weights, or training did not change them.
    """
    if receipt is None:
        return confirmed
    if (receipt.version, receipt.fingerprint) != (sent.version, sent.fingerprint):
        raise SyncError(
            f"weight sync failed: the rollout engine must have weights {sent.fingerprint} (version"
            f" {sent.version}), but reports {receipt.fingerprint} (version {receipt.version}); it"
            " would sample from another policy than the one being trained"
        )
    if moved and receipt.fingerprint == confirmed:
        raise SyncError(
            f"iteration {sent.version} had a gradient and a learning rate above 0, but the policy's"
            f" weights did not change (fingerprint {sent.fingerprint}): the learning rate is too"
            " small for their precision, or the optimizer has other parameters"
        )
    return receipt.fingerprint
