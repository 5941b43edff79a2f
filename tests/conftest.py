"""What many tests need."""

from __future__ import annotations

import os
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
