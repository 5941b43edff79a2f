"""Responses that ranks read through the references of rank 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kedge.errors import RolloutError
from tests.contract.test_rollout_engine import prompts
from tests.on_ray.clusters import needs_ray

pytestmark = needs_ray


def test_a_dead_rank_0_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from kedge.ray.rollout_store import RankExchange

    take: Any = SimpleNamespace(options=lambda **_: take, remote=lambda ticket: ticket)

    def dead(reference: Any) -> Any:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "get", dead)
    context: Any = SimpleNamespace(rank=1, first=SimpleNamespace(take_references=take))
    with pytest.raises(RolloutError, match=r"rank 0, which has .* is lost.*resume the run"):
        RankExchange(context, 0).read(3, prompts())
