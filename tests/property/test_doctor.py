"""The doctor reads any log: it runs while a run trains, and must not be what ends it."""

from __future__ import annotations

import random

from kedge.ext.report.doctor import RULES, examine
from kedge.loop.metrics import NAMES
from kedge.reporting.log import RunLog

VALUES = (0.0, 0.0, 1.0, 0.5, 1e-30, 1e30, float("nan"), float("inf"))


def test_no_log_is_too_odd_for_the_doctor() -> None:
    draw, found = random.Random(0), set()
    for _ in range(400):
        names = [name for name in NAMES if "..." not in name and draw.random() < 0.9]
        usual = {name: draw.choice(VALUES) for name in names}
        rows = [
            {"step": float(i)}
            | {n: draw.choice(VALUES) if draw.random() < 0.3 else usual[n] for n in names}
            for i in range(draw.randint(1, 12))
        ]
        found |= {finding.rule for finding in examine(RunLog("", rows, {}))}
    assert len(found) > len(RULES) // 2  # the logs reach the rules' sentences
