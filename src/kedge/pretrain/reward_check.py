"""Checks a trained reward model on pairs that training did not see, and on answers without an end.

A policy finds what its reward model does not see.  Accuracy over all pairs hides a kind of mistake
that the model cannot tell from a right answer, and preferences hold finished answers alone, so the
score of an unfinished one is an extrapolation, often upwards.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kedge.rewards.model import RewardModel

KIND = "kind"  # column of the pairs
FILE = "held_out.json"
FEWEST = 20  # pairs of a kind to judge it by
OFTEN = 0.1  # share of unfinished answers above the finished one


def check_reward_model(model: Any, rows: Any) -> dict[str, Any]:
    """Accuracy over held-out pairs and by kind of mistake, and scores of unfinished answers.

    Args:
        model: a sequence-classification model with one label.
        rows: tokenized pairs, ``chosen_ids`` and ``rejected_ids``, with or without ``kind``.
    """
    chosen, rejected = list(rows["chosen_ids"]), list(rows["rejected_ids"])
    unfinished = [_cut(a, b) for a, b in zip(chosen, rejected, strict=True)]
    source = RewardModel(model)
    better, worse, cut = (source.score_ids(ids) for ids in (chosen, rejected, unfinished))
    right = (better > worse).tolist()
    groups: dict[str, list[bool]] = {}
    for kind, one in zip(rows[KIND] if KIND in rows.column_names else [], right, strict=False):
        groups.setdefault(str(kind), []).append(one)
    kinds = {kind: _accuracy(groups[kind]) for kind in sorted(groups)}
    return {
        **_accuracy(right),
        "kinds": kinds,
        "blind": [k for k, a in kinds.items() if a["pairs"] >= FEWEST and a["low"] <= 0.5],
        "lowest_score": float(torch.cat([better, worse]).quantile(0.01)),
        "unfinished_higher": float((cut > better).float().mean()),
        "unfinished_score": float(cut.mean()),
        "finished_score": float(better.mean()),
    }


def _cut(answer: Sequence[int], other: Sequence[int]) -> list[int]:
    """The first half of what differs from the other answer, without the end."""
    same = next((i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), 0)
    return list(answer[: max(1, min(same + (len(answer) - same + 1) // 2, len(answer) - 1))])


def _accuracy(right: list[bool]) -> dict[str, float]:
    """Share of pairs in order, and the lower end of its 95% interval (Wilson)."""
    n, z = len(right), 1.96
    share = sum(right) / n
    spread = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return {
        "pairs": n,
        "accuracy": share,
        "low": (share + z * z / (2 * n) - spread) / (1 + z * z / n),
    }


def describe(check: dict[str, Any]) -> list[str]:
    """The check in lines of text, with what to do about it."""
    share, lowest = check["unfinished_higher"], math.floor(check["lowest_score"])
    lines = [f"on {check['pairs']} held-out pairs, {check['accuracy']:.1%} are in the right order"]
    for kind, one in check["kinds"].items():
        mark = "  not better than chance" if kind in check["blind"] else ""
        lines.append(f"  {kind:<20} {one['pairs']:>5} pairs  {one['accuracy']:>6.1%}{mark}")
    if check["blind"]:
        lines.append(
            f"the reward model does not see {', '.join(check['blind'])}, so RL will not avoid it:"
            " train on more such pairs, or longer"
        )
    lines.append(
        f"{share:.0%} of the answers score higher when they are cut short"
        f" (mean {check['unfinished_score']:.2f}, whole {check['finished_score']:.2f})"
    )
    if share > OFTEN:
        lines.append(
            "RL would learn not to end: replace the score of unfinished responses, with"
            f" --non_eos_penalty --penalty_reward_value {lowest}"
        )
    return lines


def write_check(check: dict[str, Any], folder: str) -> None:
    """Print the check, and write it next to the model."""
    sys.stdout.write("".join(f"kedge: {line}\n" for line in describe(check)))
    sys.stdout.flush()
    Path(folder, FILE).write_text(json.dumps(check, indent=1) + "\n", encoding="utf-8")
