"""What a run did, in sentences with numbers, and the words it came to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.insight.doctor import score_change
from kedge.insight.log import RunLog

WORDS = 12  # in each list
RARE = 3  # a token seen less often says nothing


def story(log: RunLog, rows: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """Sentences on score, distance, certainty, length, updates, evaluation and time.

    Args:
        log: the rows of training.
        rows: all rows, evaluations too.
    """
    told = [
        ("Score", _score(log)),
        ("Evaluation", _evaluation(rows)),
        ("Distance", _distance(log)),
        ("Certainty", _certainty(log)),
        ("Length", _length(log)),
        ("Updates", _updates(log)),
        ("Value", _value(log)),
        ("Time", _time(log)),
    ]
    return [{"title": title, "text": text} for title, text in told if text]


def _ends(log: RunLog, name: str) -> tuple[float, float] | None:
    start, end = log.first(name), log.last(name)
    return None if start is None or end is None else (start, end)


def _score(log: RunLog) -> str:
    ends = _ends(log, "objective/scores")
    if ends is None:
        return ""
    start, end = ends
    text = f"The mean score of its responses went from {start:.3g} to {end:.3g}"
    spread, change = log.first("objective/scores_std"), score_change(log)
    if not spread or change is None:
        return text + "."
    chance = change[2]
    if abs(end - start) < 2 * chance:
        verdict = "no more than chance gives"
    else:
        way = "up" if end > start else "down"
        verdict = f"{way} by {abs(end - start) / spread:.2g} standard deviations of a response"
    return f"{text}: {verdict} (chance alone: {chance:.2g})."


def _evaluation(rows: Sequence[Mapping[str, float]]) -> str:
    said = []
    for name, label in (
        ("eval_objective/scores", "score"),
        ("eval_win_rate", "win rate against the starting policy"),
        ("eval_accuracy", "share solved"),
    ):
        values = [row[name] for row in rows if name in row]
        if values:
            change = (
                f"{values[0]:.3g} to {values[-1]:.3g}" if len(values) > 1 else f"{values[0]:.3g}"
            )
            said.append(f"{label} {change}")
    return f"On the evaluation prompts: {', '.join(said)}." if said else ""


def _distance(log: RunLog) -> str:
    kl, length = log.last("objective/kl"), log.last("completions/mean_length")
    if kl is None:
        return ""
    per_token = f", {kl / length:.3f} a token" if length else ""
    coef = log.last("objective/kl_coef")
    cost = log.last("objective/non_score_reward")
    paid = f"; it pays {-cost:.3g} of score for that (kl_coef {coef:.3g})" if cost and coef else ""
    return f"It ended {kl:.3g} nats a response from the reference{per_token}{paid}."


def _certainty(log: RunLog) -> str:
    ends = _ends(log, "policy/entropy_avg")
    if ends is None:
        return ""
    start, end = ends
    word = "surer" if end < 0.95 * start else "less sure" if end > 1.05 * start else "as sure"
    return (
        f"Entropy went from {start:.3g} to {end:.3g} nats a token: it is {word}"
        f"{' as' if word == 'as sure' else ' than'} at the start."
    )


def _length(log: RunLog) -> str:
    ends, cut = _ends(log, "completions/mean_length"), log.last("completions/truncated_ratio")
    if ends is None:
        return ""
    text = f"Responses went from {ends[0]:.3g} to {ends[1]:.3g} tokens"
    return text + (f"; {cut:.1%} are cut off by the limit." if cut is not None else ".")


def _updates(log: RunLog) -> str:
    moved, clipped = log.last("policy/approxkl_avg", 1.0), log.last("policy/clipfrac_avg", 1.0)
    if moved is None:
        return ""
    if moved < 1e-9:
        return "Every batch was learned from in one step, so the ratio to what sampled it stays 1."
    text = f"An update moves the policy by {moved:.2g} nats a token"
    if clipped is not None:
        text += f", and the clip holds back {clipped:.1%} of what it learns from"
    ratio = log.series("val/ratio")
    low, high = min(ratio, default=1.0), max(ratio, default=1.0)
    between = f"; the mean ratio stayed between {low:.4g} and {high:.4g}" if ratio else ""
    return text + between + "."


def _value(log: RunLog) -> str:
    ends = _ends(log, "val/explained_variance")
    if ends is None:
        return ""
    first, last = (f"{x:.0%}" if x >= 0.005 else "none" for x in ends)
    text = f"The value explained {first} of the variance of the returns at the start, {last} at the"
    worse = " (it predicts worse than their mean would)" if ends[1] < -0.05 else ""
    return f"{text} end{worse}."


def _time(log: RunLog) -> str:
    parts = {
        label: sum(log.series(f"time/{name}"))
        for name, label in (
            ("rollout", "sampling"),
            ("reward", "scoring"),
            ("annotate", "annotating"),
            ("update", "optimizing"),
        )
    }
    whole = sum(parts.values())
    if not whole:
        return ""
    shares = ", ".join(f"{x / whole:.0%} {label}" for label, x in parts.items())
    speed = log.last("eps", 0.2)
    return f"Time went to: {shares}" + (f"; {speed:.3g} responses a second." if speed else ".")


def vocabulary(tokens: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """Tokens used more and less often at the end than at the start, and what updates thought.

    Args:
        tokens: tables of ``{"step", "rows"}``, in order; each row with lists per token.

    Returns:
        "more" and "less": token, uses per 1000 tokens at the start, at the end.  "praised" and
        "blamed": token, mean advantage, uses, over the second half.
    """
    if not tokens:
        return {}
    third = max(1, len(tokens) // 3)
    early, late = _uses(tokens[:third]), _uses(tokens[-third:])
    found: dict[str, list[list[Any]]] = {"more": [], "less": [], "praised": [], "blamed": []}
    if len(tokens) > 1:
        found["more"], found["less"] = _shifted(early, late)
    sums: dict[str, list[float]] = {}
    for table in tokens[len(tokens) // 2 :]:
        for row in table["rows"]:
            for text, advantage in zip(row["tokens"], row.get("advantage", ()), strict=False):
                if advantage is not None:
                    sums.setdefault(text, []).append(advantage)
    means: list[list[Any]] = [
        [text, sum(xs) / len(xs), len(xs)] for text, xs in sums.items() if len(xs) >= RARE
    ]
    means.sort(key=lambda each: each[1])
    found["blamed"] = [each for each in means[:WORDS] if each[1] < 0]
    found["praised"] = [each for each in means[::-1][:WORDS] if each[1] > 0]
    return found


def _uses(tables: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(text for table in tables for row in table["rows"] for text in row["tokens"])


def _shifted(early: Counter[str], late: Counter[str]) -> tuple[list[list[Any]], list[list[Any]]]:
    before, after = max(1, early.total()), max(1, late.total())
    rates: list[list[Any]] = [
        [text, 1000 * early[text] / before, 1000 * late[text] / after]
        for text in {**early, **late}
        if early[text] + late[text] >= RARE
    ]
    # By the change against its own noise, so that neither rare nor common tokens win by being so.
    rates.sort(key=lambda r: (r[2] - r[1]) / (r[1] + r[2]) ** 0.5)
    less = [r for r in rates[:WORDS] if r[2] < r[1]]
    return [r for r in rates[::-1][:WORDS] if r[2] > r[1]], less
