"""The notebooks run from top to bottom, and are stored with the output of a real run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
nbformat = pytest.importorskip("nbformat", reason="pip install 'kedge-rl[dev]'")


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def printed(notebook: Any) -> str:
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    return "".join(o.text for o in outputs if o.output_type == "stream")


def percents(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"([\d.]+)%", text)]


def test_there_are_three() -> None:
    assert {p.stem for p in NOTEBOOKS} == {"agent", "ppo_from_scratch", "sentiment"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_stored_as_it_ran(path: Path) -> None:
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert 'find_spec("kedge") is None' in code[0].source  # installs only where it is missing
    pictures = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert pictures
    assert printed(notebook)
    assert str(ROOT) not in path.read_text(encoding="utf-8")


def test_what_the_stored_runs_show() -> None:
    runs = {path.stem: printed(read(path)) for path in NOTEBOOKS}
    before, after = percents(runs["agent"])[-2:]
    assert after > before + 20
    reference, trained = re.findall(r"mean score ([\d.]+)", runs["ppo_from_scratch"])
    assert float(trained) > float(reference) + 0.5
    scores = [float(x) for x in re.findall(r"score +(-?[\d.]+)", runs["sentiment"])]
    assert scores[-1] > scores[0] + 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of zmq and jupyter
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install 'kedge-rl[dev]'")
    pytest.importorskip("ipykernel", reason="pip install 'kedge-rl[dev]'")
    monkeypatch.setenv("KEDGE_QUICK", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    last = next(cell for cell in reversed(notebook.cells) if cell.cell_type == "code")
    assert last.execution_count
