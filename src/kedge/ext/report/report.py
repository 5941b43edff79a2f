"""The report of a run: one self-contained HTML page that loads nothing from the network."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.ext.report.doctor import examine, open_question
from kedge.records.errors import DataError
from kedge.reporting.log import RunLog, log_file, read_options, read_rows, read_table, score_change
from kedge.reporting.run_info import read_run_info

TOKENS = "tokens"
WORDS = 12  # words per list
RARE = 3  # tokens with fewer uses are ignored
SCRIPTS = (
    *("core.js", "list.js", "charts.js", "overview.js", "curves.js"),
    *("completions.js", "tokens.js", "main.js"),
)
Row = dict[str, Any]


def gather(run: str | Path, *, most: int = 5000) -> dict[str, Any]:
    """All data of the report page of an ``output_dir`` or ``metrics.jsonl``, as JSON values.

    Of each kind of table, ``most`` responses are read; beyond, every step is truncated equally.
    Damaged lines are skipped, with a warning that counts them.
    """
    folder = log_file(run).absolute().parent
    rows = read_rows(run)
    if not rows:
        raise DataError(
            f"{log_file(run)} has no readable row; wait until the run has logged an iteration"
        )
    rows = [{k: x for k, x in row.items() if not k.startswith("train_")} for row in rows]
    training = [row for row in rows if "objective/scores" in row]
    log = RunLog(folder.name, training, read_options(folder))
    tables = {
        name: _read_tables(folder / name, most)
        for name in sorted(p.name for p in folder.glob("*completions") if p.is_dir())
    }
    tokens = _read_tables(folder / TOKENS, most)
    for table in tokens:
        table["rows"] = [row for row in table["rows"] if _has_lists(row)]
    series: dict[str, dict[str, list[float]]] = {}  # steps and finite values of every metric
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "epoch") and math.isfinite(value):
                line = series.setdefault(name, {"x": [], "y": []})
                line["x"].append(int(row.get("step", 0)))
                line["y"].append(float(f"{value:.6g}"))
    axis = {int(r["step"]): int(r["episode"]) for r in rows if "episode" in r and "step" in r}
    return {
        "name": folder.name,
        "about": read_run_info(folder),
        "updates": len(log.rows),
        "findings": [asdict(finding) for finding in examine(log)],
        "unseen": open_question(log),
        "story": story(log, rows),
        "vocabulary": vocabulary(tokens),
        "played": episodes(tokens),
        "series": series,
        "meanings": {name: meaning(name) for name in series},
        "episodes": {"x": [0, *axis], "y": [0, *axis.values()]},  # responses up to each iteration
        "tables": {name: table for name, table in tables.items() if table},
        "tokens": tokens,
    }


def gather_pair(a: str | Path, b: str | Path, *, most: int = 5000) -> dict[str, Any]:
    """The data of the page of two runs: those of the first, and ``runs`` with what is of each.

    "differ": options and inputs with different values, a row ``[name, of a, of b]`` each.
    """
    runs = [gather(run, most=most) for run in (a, b)]
    names = [str(data["name"]) for data in runs]
    if names[0] == names[1]:
        names = [str(a), str(b)]
    tables: dict[str, list[Row]] = {}
    for name, data in zip(names, runs, strict=True):
        for kind, steps in data["tables"].items():
            tables.setdefault(kind, []).extend({**table, "run": name} for table in steps)
    shared = ("about", "findings", "unseen", "series", "episodes", "updates")
    return runs[0] | {
        "name": " and ".join(names),
        "runs": [
            {"name": name} | {key: data[key] for key in shared}
            for name, data in zip(names, runs, strict=True)
        ],
        "differ": differences(runs[0]["about"], runs[1]["about"]),
        "series": runs[1]["series"] | runs[0]["series"],
        "meanings": runs[1]["meanings"] | runs[0]["meanings"],
        "tables": tables,
        "tokens": [],
    }


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[list[Any]]:
    """Inputs and options of two ``run.json`` with different values, without names of the run."""
    inputs = ("algorithm", "model", "datasets", "rewards", "device", "processes")
    sides = [{k: x.get(k) for k in inputs} | x.get("options", {}) for x in (a, b)]
    named = ("output_dir", "run_name", "exp_name", "logging_dir")
    names = [name for name in sides[0] | sides[1] if name not in named]
    return [[n, *(x.get(n) for x in sides)] for n in names if sides[0].get(n) != sides[1].get(n)]


def meaning(name: str) -> str:
    """Description of a metric; "" if unknown.

    Evaluation metrics (``eval_...``, ``eval_<set>_...``) use that of the underlying metric.
    """
    from kedge.loop.metrics import NAMES, PREFIXES  # imported here, since it imports torch

    if name in NAMES:
        return NAMES[name]
    if name.startswith("eval_"):
        known = [m for m in NAMES if name.endswith(f"_{m.removeprefix('eval_')}")]
        for metric in known:
            if metric.startswith("eval_"):
                return NAMES[metric]
        if known:
            return f"{NAMES[max(known, key=len)]}; on the evaluation prompts"
        name = f"eval_{name[name.rindex('pass@') :]}" if "pass@" in name else name
    return next((text for prefix, text in PREFIXES.items() if name.startswith(prefix)), "")


def _read_tables(folder: Path, most: int) -> list[Row]:
    """The tables of a folder ordered by step: ``{"step", "rows"}``."""
    tables = {}
    for file in folder.glob("step-*.jsonl"):
        step = file.stem.removeprefix("step-")
        if step.isdecimal() and file.is_file():
            tables[int(step)] = read_table(file)
    share = most if sum(map(len, tables.values())) <= most else max(1, most // len(tables))
    return [{"step": n, "rows": tables[n][:share]} for n in sorted(tables) if tables[n]]


def _has_lists(row: Mapping[str, Any]) -> bool:
    """Whether a row has a list of tokens, and of values per token."""
    names = ("tokens", "advantage", "trained", "turn", "turn_rewards")
    return "tokens" in row and all(isinstance(row[name], list) for name in names if name in row)


def page(data: Mapping[str, Any]) -> str:
    """The HTML page for the result of ``gather``.

    The data are compressed JSON in base64, so that generated text cannot end the script or become
    markup; a content security policy blocks all connections.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    packed = gzip.compress(text.encode(errors="backslashreplace"), compresslevel=5, mtime=0)
    body = _asset("page.html")
    for name, text in {
        "title": escape(str(data["name"])),
        "style": _asset("page.css"),
        "script": "\n".join(map(_asset, SCRIPTS)),
        "data": base64.b64encode(packed).decode(),
    }.items():
        body = body.replace(f"<!--{name}-->", text)
    return body


def _asset(name: str) -> str:
    return (files("kedge.ext.report") / "assets" / name).read_text(encoding="utf-8")


# -- the run in sentences, its vocabulary and its episodes -----------------------------------------


def story(log: RunLog, rows: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """Sentences on score, distance, certainty, length, updates and time, and on evaluations."""
    sections = {
        "Score": _score(log),
        "Episodes": _episodes(log),
        "Evaluation": _evaluation(rows),
        "Distance": _distance(log),
        "Certainty": _certainty(log),
        "Length": _length(log),
        "Updates": _updates(log),
        "Value": _value(log),
        "Time": _time(log),
    }
    return [{"title": title, "text": text} for title, text in sections.items() if text]


def _say(*parts: tuple[float, str]) -> str:
    """Join texts with non-NaN numbers into a sentence; "" if the first number is NaN."""
    text = "".join(text for number, text in parts if not math.isnan(number))
    return "" if math.isnan(parts[0][0]) else f"{text}."


def _ends(log: RunLog, name: str) -> tuple[float, float]:
    return log.first(name), log.last(name)


def _score(log: RunLog) -> str:
    start, end, noise = score_change(log)
    verdict = "within noise"
    if abs(end - start) >= 2 * noise:
        change = abs(end - start) / log.first("objective/scores_std")
        way = "up" if end > start else "down"
        verdict = f"{way} by {change:.2g} standard deviations of a score"
    return _say(
        (start, f"The mean score went from {start:.3g} to {end:.3g}"),
        (noise, f": {verdict} (noise: {noise:.2g})"),
    )


def _episodes(log: RunLog) -> str:
    (turns, late), (before, after) = (_ends(log, f"environment/{n}") for n in ("turns", "success"))
    cut, failed = log.last("completions/truncated_ratio"), log.last("environment/errors")
    shares = {
        n[18:]: log.last(n) for n in (log.rows or [{}])[-1] if n.startswith("environment/ended_")
    }
    ends = ", ".join(f"{x:.0%} {n.replace('_', ' ')}" for n, x in shares.items() if x >= 0.005)
    told = _say(
        (turns, f"An episode has {turns:.3g} turns at the start, {late:.3g} at the end"),
        (cut, f"; {cut:.1%} are truncated"),
        (failed or math.nan, f", the environments of {failed:.1%} fail"),
        (turns if ends else math.nan, f"; how the last ones ended: {ends}"),
    )
    won = _say((before + turns, f"Success went from {before:.1%} to {after:.1%}"))
    return f"{won} {told}".strip()


def _evaluation(rows: Sequence[Mapping[str, float]]) -> str:
    labels = {
        "eval_objective/scores": "score",
        "eval_win_rate": "win rate against the starting policy",
        "eval_accuracy": "accuracy",
    }
    parts = []
    for name, label in labels.items():
        if values := [row[name] for row in rows if name in row]:
            ends = values[:1] + values[1:][-1:]
            parts.append(f"{label} {' to '.join(f'{x:.3g}' for x in ends)}")
    return f"On the evaluation prompts: {', '.join(parts)}." if parts else ""


def _distance(log: RunLog) -> str:
    kl, length = log.last("objective/kl"), log.last("completions/mean_length") or math.nan
    coef, cost = log.last("objective/kl_coef"), log.last("objective/non_score_reward")
    paid = f"; the KL penalty costs {-cost:.3g} of score (kl_coef {coef:.3g})"
    return _say(
        (kl, f"KL to the reference at the end: {kl:.3g} nats per response"),
        (length, f", {kl / length:.3f} per token"),
        (cost * coef or math.nan, paid),
    )


def _certainty(log: RunLog) -> str:
    start, end = _ends(log, "policy/entropy_avg")
    trend = "fell" if end < 0.95 * start else "rose" if end > 1.05 * start else "stayed similar"
    text = f"Entropy {trend}: {start:.3g} nats per token at the start, {end:.3g} at the end"
    return _say((start, text))


def _length(log: RunLog) -> str:
    start, end = _ends(log, "completions/mean_length")
    cut = log.last("completions/truncated_ratio")
    if log.series("environment/turns"):  # told together with the episodes
        cut = math.nan
    return _say(
        (start, f"The mean response length went from {start:.3g} to {end:.3g} tokens"),
        (cut, f"; {cut:.1%} of responses are truncated"),
    )


def _updates(log: RunLog) -> str:
    moved, clipped = log.last("policy/approxkl_avg", 1.0), log.last("policy/clipfrac_avg", 1.0)
    ratio = log.series("val/ratio") or [math.nan]
    if moved < 1e-9:
        return "Every batch is used for one optimizer step, so the probability ratio stays 1."
    return _say(
        (moved, f"An iteration moves the policy by {moved:.2g} nats per token"),
        (clipped, f", with {clipped:.1%} of tokens clipped"),
        (ratio[0], f"; the mean ratio stayed between {min(ratio):.4g} and {max(ratio):.4g}"),
    )


def _value(log: RunLog) -> str:
    start, end = _ends(log, "val/explained_variance")
    first, last = (f"{x:.0%}" if x >= 0.005 else "none" for x in (start, end))
    worse = " (worse than predicting the mean)" * (end < -0.05)
    text = f"The value model explained {first} of the return variance at the start, {last} at the"
    return _say((start, f"{text} end{worse}"))


def _time(log: RunLog) -> str:
    labels = {
        "rollout": "sampling",
        "reward": "scoring",
        "annotate": "computing log-probabilities",
        "update": "optimizing",
    }
    parts = {label: sum(log.series(f"time/{name}")) for name, label in labels.items()}
    total = sum(parts.values())
    if not total:
        return ""
    shares = ", ".join(f"{x / total:.0%} {label}" for label, x in parts.items())
    speed = log.last("eps")
    return _say((total, f"Time went to: {shares}"), (speed, f"; {speed:.3g} responses per second"))


def vocabulary(tokens: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """The policy's tokens used more and less often at the end than at the start, and advantages.

    Of tables ``{"step", "rows"}``, in order.  "more" and "less": token, uses per 1000 tokens at the
    start, at the end.  "praised" and "blamed": token, mean advantage, uses, over the second half.
    """
    if not tokens:
        return {}
    third = max(1, len(tokens) // 3)
    lists: dict[str, list[list[Any]]] = {"more": [], "less": [], "praised": [], "blamed": []}
    if len(tokens) > 1:
        early, late = _uses(tokens[:third]), _uses(tokens[-third:])
        before, after = max(1, early.total()), max(1, late.total())
        rates: list[list[Any]] = [
            [text, 1000 * early[text] / before, 1000 * late[text] / after]
            for text in {**early, **late}
            if early[text] + late[text] >= RARE
        ]
        # Change over noise, so that frequency alone does not decide.
        rates.sort(key=lambda r: (r[2] - r[1]) / (r[1] + r[2]) ** 0.5)
        lists["less"] = [r for r in rates[:WORDS] if r[2] < r[1]]
        lists["more"] = [r for r in rates[::-1][:WORDS] if r[2] > r[1]]
    sums: dict[str, list[float]] = {}
    for text, advantage in _policy_tokens(tokens[len(tokens) // 2 :]):
        if advantage is not None:
            sums.setdefault(text, []).append(advantage)
    means: list[list[Any]] = [
        [text, sum(xs) / len(xs), len(xs)] for text, xs in sums.items() if len(xs) >= RARE
    ]
    means.sort(key=lambda entry: entry[1])
    lists["blamed"] = [entry for entry in means[:WORDS] if entry[1] < 0]
    lists["praised"] = [entry for entry in means[::-1][:WORDS] if entry[1] > 0]
    return lists


def _policy_tokens(tables: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float | None]]:
    """Text and advantage of the policy's tokens; without a list "trained" all are the policy's."""
    for table in tables:
        for row in table["rows"]:
            trained, advantages = row.get("trained") or repeat(1), row.get("advantage", ())
            for text, own, advantage in zip(
                row["tokens"], trained, chain(advantages, repeat(None)), strict=False
            ):
                if own:
                    yield text, advantage


def _uses(tables: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(text for text, _ in _policy_tokens(tables))


def episodes(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rewards by number of the turn, and late episodes won and lost; empty without turns.

    "turns": number of the turn, share of late episodes that have it, mean reward over the first and
    the last third of the run, mean advantage over the last.  "won" and "lost": table and row of
    examples, the newest first, "won_turns" and "lost_turns" their mean turns.  "won_by": the metric
    ``success``, or, without it, a score in the upper half of the range.
    """
    numbered = [
        (t, i, row)
        for t, table in enumerate(tables)
        for i, row in enumerate(table["rows"])
        if row.get("turn_rewards") and isinstance(row.get("metrics"), dict)
    ]
    if not numbered:
        return {}
    third = max(1, len(tables) // 3)
    early = [row for t, _, row in numbered if t < third]
    late = [(t, i, row) for t, i, row in numbered if t >= len(tables) - third]
    own = any("success" in row["metrics"] for _, _, row in numbered)
    scores = [row["score"] for _, _, row in numbered if row["score"] is not None]
    middle = (min(scores, default=0.0) + max(scores, default=0.0)) / 2
    sides: dict[bool, list[tuple[int, int, Mapping[str, Any]]]] = {True: [], False: []}
    for t, i, row in reversed(late):
        if row["score"] is not None:
            won = row["metrics"].get("success", 0) > 0 if own else row["score"] > middle
            sides[won].append((t, i, row))
    turns = []
    for k in range(max(len(row["turn_rewards"]) for _, _, row in numbered)):
        there = [row for _, _, row in late if len(row["turn_rewards"]) > k]
        share = len(there) / len(late) if late else 0.0
        advantages = [
            x
            for row in there
            for turn, x in zip(row["turn"], row.get("advantage", ()), strict=False)
            if turn == k and x is not None
        ]
        before = [row["turn_rewards"][k] or 0.0 for row in early if len(row["turn_rewards"]) > k]
        after = [row["turn_rewards"][k] or 0.0 for row in there]
        turns.append(
            [k + 1, share, *(fmean(x) if x else None for x in (before, after, advantages))]
        )
    means = {
        f"{name}_turns": fmean(len(row["turn_rewards"]) for _, _, row in side) if side else None
        for name, side in (("won", sides[True]), ("lost", sides[False]))
    }
    return means | {
        "turns": turns,
        "won": [[t, i] for t, i, _ in sides[True]],
        "lost": [[t, i] for t, i, _ in sides[False]],
        "won_by": "metric success" if own else f"score above {middle:.3g}",
    }
