"""One-sentence film reviews, in disjoint splits.

The folder of reviews has ``positive.txt`` and ``negative.txt``, one sentence per line (Pang and
Lee 2005).  Of each, 45% are for the policy and its reward model, 45% for the judge, and the rest
for the comparison: its openings are the prompts, and its pairs test both models.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

OPENING = 4  # words of a prompt
SHARE = 0.45


def write_data(folder: Path, reviews: Path, seed: int) -> None:
    """Read the sentences and write the input of each stage; that of the comparison comes last."""
    rng = random.Random(seed)
    good, bad = (sentences(reviews / name, rng) for name in ("positive.txt", "negative.txt"))
    size = min(len(good), len(bad))
    cuts = [0, int(SHARE * size), int(2 * SHARE * size), size]
    policy, judge, held_out = (
        [{"chosen": a, "rejected": b} for a, b in zip(good[i:j], bad[i:j], strict=True)]
        for i, j in itertools.pairwise(cuts)
    )
    write(folder / "reward", train=policy, test=held_out)
    write(folder / "judge", train=judge, test=held_out)
    openings = [opening(row[kind]) for row in policy for kind in ("chosen", "rejected")]
    rng.shuffle(openings)
    compared = [opening(row[kind]) for row in held_out for kind in ("chosen", "rejected")]
    write(folder / "texts", train=openings)
    write(folder / "prompts", train=[{"prompt": row["prompt"]} for row in openings])
    write(folder / "compared", test=[{"prompt": row["prompt"]} for row in compared])


def sentences(file: Path, rng: random.Random) -> list[str]:
    """The sentences of a file that are longer than an opening, in random order."""
    lines = [" ".join(line.split()) for line in file.read_text(encoding="utf-8").split("\n")]
    kept = [line for line in dict.fromkeys(lines) if len(line.split()) > OPENING + 2]
    rng.shuffle(kept)
    return kept


def opening(sentence: str) -> dict[str, str]:
    """The first words as prompt, the rest as completion."""
    words = sentence.split()
    return {"prompt": " ".join(words[:OPENING]), "completion": " " + " ".join(words[OPENING:])}


def write(folder: Path, **splits: list[dict[str, Any]]) -> None:
    """A folder with a file for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
