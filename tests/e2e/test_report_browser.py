"""The report in a real browser: every section is drawn, and nothing is written to its console."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kedge.cli.main import main
from tests.e2e.small import PROMPTS, small

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser here to open the report in ({', '.join(BROWSERS)})")
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    trainer = small(
        output_dir=str(folder),
        total_episodes=24,
        eval_dataset=PROMPTS[:3],
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=2,
        num_sample_generations=2,
    )
    trainer.train()
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


def opened(browser: str, page: Path, where: str, folder: Path) -> str:
    """The document once its script has run; fails on whatever reaches the console."""
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--virtual-time-budget=8000", "--enable-logging=stderr", "--window-size=1300,900"),
            *(f"--user-data-dir={folder}", "--dump-dom", f"{page.as_uri()}#{where}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    assert "data-ready=" in done.stdout
    assert not re.search(r">(null|undefined|NaN|\[object)", done.stdout)
    return done.stdout


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("overview", ["What is wrong with it?", "What did it do?", "response_length"]),
        ("curves", ["objective/kl", "nats per response", "<canvas"]),
        ("curves?find=entropy", ["policy/entropy_avg", "2 of "]),
        ("completions?from=eval_completions", ["3 of 3 prompts", "step"]),
        ("tokens", ["24 of 24 responses", "advantage", 'data-i="0"']),
        ("tokens?color=kl&amp;step=6", ["4 of 24 responses"]),
        ("tokens?theme=dark&find=nowhere", ["0 of 24 responses"]),
    ],
)
def test_sections(browser: str, report: Path, where: str, words: list[str], tmp_path: Path) -> None:
    document = opened(browser, report, where.replace("&amp;", "&"), tmp_path)
    for word in words:
        assert word in document, word


def test_what_reaches_the_console_is_seen(browser: str, report: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text(encoding="utf-8").replace("function fmt", "function fmt2"))
    with pytest.raises(AssertionError):
        opened(browser, broken, "overview", tmp_path / "profile")


def test_five_thousand_responses_make_few_elements(
    browser: str, report: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "many"
    (folder / "tokens").mkdir(parents=True)
    shutil.copy(report.parent / "metrics.jsonl", folder)
    (source,) = report.parent.glob("tokens/step-000001.jsonl")
    row = json.loads(source.read_text(encoding="utf-8").splitlines()[0])
    for step in range(1, 51):
        rows = [row | {"score": i / 100} for i in range(100)]
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / "tokens" / f"step-{step:06d}.jsonl").write_text(text, encoding="utf-8")
    assert main(["report", str(folder)]) == 0
    document = opened(browser, folder / "report.html", "tokens", tmp_path / "profile")
    assert "5,000 of 5,000 responses" in document
    assert document.count('role="option"') < 60


def test_episodes_and_prompts_that_were_sampled_once(browser: str, tmp_path: Path) -> None:
    log = Path(__file__).parents[1] / "data" / "doctor" / "good.jsonl"
    shutil.copy(log, tmp_path / "metrics.jsonl")
    played = {"tokens": ["go", "wall", "left"], "turn": [0, -1, 1], "turn_rewards": [0, 1]}
    for folder, row in (
        ("tokens", {"prompt": "a maze", "score": 1, "metrics": {"success": 1}} | played),
        ("completions", {"model response": "an answer", "score": 0.5}),
    ):
        (tmp_path / folder).mkdir()
        for step in (1, 2):
            rows = [json.dumps(row | {"query": f"question {step} {i}"}) + "\n" for i in range(3)]
            (tmp_path / folder / f"step-{step:06d}.jsonl").write_text("".join(rows))
    assert main(["report", str(tmp_path)]) == 0
    page = tmp_path / "report.html"
    overview = opened(browser, page, "overview", tmp_path / "chrome")
    assert "Won 3 of 3" in overview
    assert "Nothing found." in overview
    beside = opened(browser, page, "completions", tmp_path / "chrome")
    assert "2 of 2 steps, 6 responses" in beside
    assert all(f"question {step} 0" in beside for step in (1, 2))
