"""Running moments, scaling and clipping of scores, and KL controllers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kedge.classic import RunningMoments
from tests.classic_models import gpt2, samples, trainer

pytestmark = pytest.mark.filterwarnings("ignore:the KL to the reference")


def after(changes: dict[str, Any], steps: int = 1, make: Any = gpt2, **kinds: Any) -> Any:
    found = trainer(make(), **changes)
    for i in range(steps):
        stats = found.step(*samples(seed=i, **kinds))
    return found, stats


def test_running_moments() -> None:
    moments, seen = RunningMoments(), []
    for size in (1, 5, 3):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3 + 2
        seen.append(x)
        mean, _ = moments.update(x)
        assert mean == pytest.approx(float(x.mean()), abs=1e-6)
    every = torch.cat(seen).double()
    assert moments.mean == pytest.approx(float(every.mean()))
    assert moments.std == pytest.approx(float(every.std()))
    assert moments.count == 9


def test_moments_in_a_file(tmp_path: Any) -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, 2.0, 4.0]))
    moments.save_to_json(tmp_path / "m.json")
    assert RunningMoments.load_from_json(tmp_path / "m.json") == moments


@pytest.mark.parametrize("norm", [False, True])
def test_score_scaling_and_clipping(norm: bool) -> None:
    found = trainer(gpt2(), use_score_scaling=True, use_score_norm=norm, score_clip=1.5)
    seen: list[float] = []
    for i in range(3):
        queries, responses, scores = samples(seed=i)
        stats = found.step(queries, responses, scores)
        seen += [float(s) for s in scores]
        std, mean = np.std(seen, ddof=1), np.mean(seen) if norm else 0.0
        want = np.clip((np.array([float(s) for s in scores]) - mean) / std, -1.5, 1.5)
        assert stats["ppo/mean_scores"] == pytest.approx(want.mean(), abs=1e-5)
        assert stats["ppo/std_scores"] == pytest.approx(want.std(ddof=1), abs=1e-5)


def test_kl_controllers() -> None:
    adaptive, stats = after({"horizon": 80.0, "target": 6.0}, steps=2)
    error = np.clip(stats["objective/kl"] / 6.0 - 1, -0.2, 0.2)
    used = stats["objective/kl_coef"]
    assert adaptive.kl_ctl.value == pytest.approx(used * (1 + error * 8 / 80))
    fixed, stats = after({"adap_kl_ctrl": False}, steps=2)
    assert fixed.kl_ctl.value == stats["objective/kl_coef"] == 0.2
