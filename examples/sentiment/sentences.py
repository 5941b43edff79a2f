"""Stage ``data``: film reviews of one sentence each, split among those that must not share any.

The folder ``--reviews`` holds ``positive.txt`` and ``negative.txt``, a sentence a line (Pang and
Lee 2005).  Of each kind, 45% are for the policy and its reward model, 45% for the judge, and what
is left is for the comparison: its openings are the prompts, and its pairs test both models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

OPENING = 4  # words of a prompt
SHARE = 0.45


def main() -> None:
    """Read the sentences, write what each stage reads."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output_dir", required=True, type=Path)
    flags.add_argument("--reviews", required=True, type=Path)
    flags.add_argument("--seed", type=int, default=0)
    asked = flags.parse_args()
    rng = random.Random(asked.seed)
    good, bad = (sentences(asked.reviews / name, rng) for name in ("positive.txt", "negative.txt"))
    size = min(len(good), len(bad))
    cuts = [0, int(SHARE * size), int(2 * SHARE * size), size]
    policy, judge, held = (
        [{"chosen": a, "rejected": b} for a, b in zip(good[i:j], bad[i:j], strict=True)]
        for i, j in itertools.pairwise(cuts)
    )
    write(asked.output_dir / "reward", train=policy, test=held)
    write(asked.output_dir / "judge", train=judge, test=held)
    opened = [opening(row[kind]) for row in policy for kind in ("chosen", "rejected")]
    rng.shuffle(opened)
    compared = [opening(row[kind]) for row in held for kind in ("chosen", "rejected")]
    write(asked.output_dir / "texts", train=opened)
    write(asked.output_dir / "prompts", train=[{"prompt": row["prompt"]} for row in opened])
    write(asked.output_dir / "compared", test=[{"prompt": row["prompt"]} for row in compared])


def sentences(file: Path, rng: random.Random) -> list[str]:
    """The sentences of a file that have more than an opening, in an order of chance."""
    lines = [" ".join(line.split()) for line in file.read_text(encoding="utf-8").split("\n")]
    found = [line for line in dict.fromkeys(lines) if len(line.split()) > OPENING + 2]
    rng.shuffle(found)
    return found


def opening(sentence: str) -> dict[str, str]:
    """The first words as prompt, the others as completion."""
    words = sentence.split()
    return {"prompt": " ".join(words[:OPENING]), "completion": " " + " ".join(words[OPENING:])}


def write(folder: Path, **splits: list[dict[str, Any]]) -> None:
    """A folder with a file for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
