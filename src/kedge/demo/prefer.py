"""Stage ``preferences``: an annotator chooses between two answers to a post."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from kedge.demo.task import Post, add_mistake, rate, read_post


def main() -> None:
    """Read two answers per post and write the preference pairs; equal answers are skipped."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output_dir", required=True, type=Path)
    flags.add_argument("--answers", required=True, type=Path)
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args()
    rng = random.Random(f"preferences {args.seed}")
    rows = [json.loads(line) for line in args.answers.read_text().splitlines()]
    pairs = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        post = read_post(first["prompt"])
        answers = [first["completion"], second["completion"]]
        compared = [(answers[0], answers[1], "two answers")]
        compared += [(answer, *add_mistake(post, answer, rng)) for answer in answers]
        for one, other, kind in compared:
            if one != other:
                pairs.append({**prefer(post, one, other, rng), "kind": kind})
    rng.shuffle(pairs)
    (args.output_dir / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    print(f"{len(pairs)} preference pairs")


def prefer(post: Post, first: str, second: str, rng: random.Random) -> dict[str, str]:
    """Order a pair by an annotator's preference."""
    better, worse = sorted((first, second), key=lambda answer: -rate(post, answer, rng))
    return {"prompt": post.text, "chosen": better, "rejected": worse}


if __name__ == "__main__":
    main()
