"""Stage ``preferences``: which of two answers to a post an annotator prefers."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from kedge.demo.task import liked, read_post


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
        if first["completion"] == second["completion"]:
            continue
        post = read_post(first["prompt"])
        better, worse = sorted(
            (first["completion"], second["completion"]), key=lambda a: -liked(post, a, rng)
        )
        pairs.append({"prompt": post.text, "chosen": better, "rejected": worse})
    (args.output_dir / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    print(f"{len(pairs)} preference pairs")


if __name__ == "__main__":
    main()
