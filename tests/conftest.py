"""What many tests need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recorded numbers and real models beside the checkout."""
    default = Path(__file__).parents[2] / "shared"
    where = Path(os.environ.get("KEDGE_SHARED", default))
    if not (where / "data").is_dir():
        pytest.skip(f"no recorded numbers or real models at {where} (set KEDGE_SHARED)")
    return where


@pytest.fixture(scope="session", autouse=True)
def _no_curves() -> None:
    """Leave out the picture that a run draws at its end: ten times the time of most runs here."""
    if run := sys.modules.get("kedge.trainers.run.run"):
        run.draw_curves = lambda *_: None  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def _own_precision() -> None:
    """Forget the precision of the last run of another module, which accelerate keeps."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state()


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this fixture, runs draw their curves."""
    from kedge.reporting.curves import draw_curves

    monkeypatch.setattr("kedge.trainers.run.run.draw_curves", draw_curves)
