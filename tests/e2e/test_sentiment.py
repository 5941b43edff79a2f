"""The pipeline of film reviews: it runs to the end, and no sentence serves two sides."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.testing import tiny_policy
from tests.unit.text_toys import word_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "sentiment"


def reviews(folder: Path, rows: int) -> None:
    """Sentences of seven words; favorable ones have even words."""
    rng = random.Random(0)
    for name, kind in (("positive", 0), ("negative", 1)):
        lines = [
            " ".join(f"w{2 * rng.randrange(2, 14) + kind}" for _ in range(7)) for _ in range(rows)
        ]
        (folder / f"{name}.txt").write_text("\n".join(lines))


def texts(folder: Path) -> set[str]:
    """Every sentence in the files of a folder, put together again."""
    found = set()
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found |= {row[n] for n in ("chosen", "rejected") if n in row}
            if "completion" in row:
                found.add(row["prompt"] + row["completion"])
    return found


def test_no_sentence_serves_two_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reviews(tmp_path, 200)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import sentences

    out = tmp_path / "out"
    argv = ["sentences.py", "--reviews", str(tmp_path), "--output_dir", str(out), "--seed", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    sentences.main()
    policy = texts(out / "texts")
    reward, judge = (
        {row[n] for row in read(out / name / "train.jsonl") for n in ("chosen", "rejected")}
        for name in ("reward", "judge")
    )
    held = {row[n] for row in read(out / "judge" / "test.jsonl") for n in ("chosen", "rejected")}
    assert len(policy) == len(reward) == len(judge) == 180
    assert len(held) == 40
    assert policy == reward
    assert not policy & judge
    assert not (policy | judge) & held
    openings = {" ".join(each.split()[:4]) for each in held}
    assert {row["prompt"] for row in read(out / "compared" / "test.jsonl")} == openings


def read(file: Path) -> list[dict[str, str]]:
    """The rows of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
def test_the_pipeline_runs_to_the_end(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (the pipeline extra)")
    reviews(tmp_path, 60)
    tiny_policy(vocab_size=32).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    short = ["sft_steps=2", "reward_steps=2", "episodes=16", "updates_of=8", "length=4", "limit=6"]
    out = tmp_path / "out"
    given = [f"folder={out}", f"model={tmp_path / 'model'}", f"reviews={tmp_path}", *short]
    assert main(["pipeline", str(EXAMPLE / "pipeline.yaml"), "--set", *given]) == 0
    (row,) = json.loads((out / "results.json").read_text())
    assert row["stage"] == "tuned-against-start"
    assert row["prompts"] == 6
    assert row["judge"] == str(out / "judging")
