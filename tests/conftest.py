"""What many tests need."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# What a test names if it is of an extension: modules, forwarded paths and names, commands.
EXTENSIONS = re.compile(
    r"kedge\.(ext|classic|compat|judges|trl|trl_scripts)\b|environments\.(games|adapters)\b"
    r"|\b(AsyncPPO(Config|Trainer)|TrlParser|PPOv2\w+|code_verifier|Sandbox)\b"
    r"|main\(\[?\*?[\[(]*\"(sft|reward|judge|plan|doctor|report|compare|init|expert|value|serve)"
    r"|import .*\bifeval\b"
)


@functools.cache
def of_extension(file: Path) -> bool:
    """Whether a file of tests, or one that it imports at its top, names an extension."""
    text = file.read_text(encoding="utf-8")
    if EXTENSIONS.search(re.sub(r"(importorskip|find_spec)\(.*?\)", "", text)):
        return True
    used = re.findall(r"^from (tests[.\w]*) import \(?\s*(\w+)", text, re.MULTILINE)
    names = [name for module, part in used for name in (module, f"{module}.{part}")]
    files = (Path(__file__).parents[1] / f"{name.replace('.', '/')}.py" for name in names)
    return "docs.generate" in text or any(
        f != file and f.is_file() and of_extension(f) for f in files
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without ``kedge.ext``, leave out the tests of extensions."""
    if importlib.util.find_spec("kedge.ext") or collection_path.suffix != ".py":
        return None
    return of_extension(collection_path) or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Start every test with the same random numbers, and put back what it left changed.

    Ray and vLLM need what they put into the environment of their process.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    environment = dict(os.environ)
    levels = [(log, log.level) for log in map(logging.getLogger, ("kedge", "transformers"))]
    threads = torch.get_num_threads() if torch else 0
    random.seed(0)
    if numpy:
        numpy.random.seed(0)
    if torch:
        torch.default_generator.manual_seed(0)
    try:
        return (yield)
    finally:
        for log, level in levels:
            log.setLevel(level)
        if dict(os.environ) != environment and not (item.keywords.keys() & {"ray", "vllm"}):
            os.environ.clear()
            os.environ.update(environment)
        if torch and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if redaction := sys.modules.get("kedge.redaction"):
            redaction._known.clear()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recorded numbers and real models beside the checkout."""
    default = Path(__file__).parents[2] / "shared"
    where = Path(os.environ.get("KEDGE_SHARED", default))
    if not (where / "data").is_dir():
        pytest.skip(f"no recorded numbers or real models at {where} (set KEDGE_SHARED)")
    return where


@pytest.fixture(scope="session", autouse=True)
def draw_curves() -> Callable[..., Path | None]:
    """Leave out the picture that a run draws at its end: ten times the time of most runs here."""
    from kedge.reporting import log

    draw = log.draw_curves
    log.draw_curves = lambda *_: None  # type: ignore[assignment]
    return draw


@pytest.fixture(scope="session", autouse=True)
def _keyboard() -> None:
    """Ctrl-C and SIGHUP mean what they do at a terminal: background jobs are deaf to them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module", autouse=True)
def _own_precision() -> None:
    """Forget the precision of the last run of another module, which accelerate keeps."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state()


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch, draw_curves: Callable[..., Path | None]) -> None:
    """With this fixture, runs draw their curves."""
    monkeypatch.setattr("kedge.reporting.log.draw_curves", draw_curves)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[str], Any]:
    """``with logged(regex):`` needs a matching line in the log, as ``pytest.warns`` a warning."""

    @contextmanager
    def check(regex: str) -> Iterator[pytest.LogCaptureFixture]:
        caplog.clear()
        try:
            yield caplog
        finally:
            assert re.search(regex, caplog.text), caplog.text

    return check
