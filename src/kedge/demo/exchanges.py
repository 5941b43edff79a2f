"""Stage ``exchanges``: test whether the reward model notices each wrong value of a fact.

``kedge reward`` tests each kind of mistake.  A model that notices almost all wrong places may
still confuse two of them, and PPO exploits that.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path

from transformers import AutoModelForSequenceClassification, AutoTokenizer

from kedge.demo.task import FACTS, write_post, write_summary
from kedge.rewards.model import RewardModel

POSTS = 12  # per exchange
BLIND = 0.5  # share of pairs that are in the right order


def main() -> None:
    """Score correct summaries of new posts, and copies with one value exchanged."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output_dir", required=True, type=Path)
    flags.add_argument("--reward", required=True, type=Path)
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args()
    rng = random.Random(f"exchanges {args.seed}")
    names, texts = [], []
    for kind, values in FACTS.items():
        for right, wrong in permutations(values, 2):
            for _ in range(POSTS):
                post = write_post(rng)
                text = post.text.replace(f" {post.facts[kind]} ", f" {right} ")
                facts = {**post.facts, kind: right}
                names.append(f"{wrong} for {right}")
                both = (replace(post, facts=told) for told in (facts, {**facts, kind: wrong}))
                texts += [text + write_summary(told, rng, care=1.0) for told in both]
    model = AutoModelForSequenceClassification.from_pretrained(args.reward)
    tokenizer = AutoTokenizer.from_pretrained(args.reward)
    scores = RewardModel(model).score_texts(texts, tokenizer).tolist()
    seen: dict[str, float] = dict.fromkeys(names, 0.0)
    for name, one, other in zip(names, scores[::2], scores[1::2], strict=True):
        seen[name] += (one > other) / POSTS
    blind = sorted((share, name) for name, share in seen.items() if share <= BLIND)
    text = json.dumps({name: round(share, 3) for name, share in seen.items()}, indent=1)
    (args.output_dir / "exchanges.json").write_text(text + "\n")
    worst = ", ".join(name for _, name in blind[:6]) + (", ..." if len(blind) > 6 else "")
    print(f"the reward model misses {len(blind)} of {len(seen)} wrong values", end="")
    print(f": {worst}; PPO may learn to say them" if blind else "")


if __name__ == "__main__":
    main()
