"""The sentences of the report."""

from __future__ import annotations

import re
from pathlib import Path

from kedge.reporting.log import RunLog
from kedge.reporting.story import story

ASSETS = Path(__file__).parents[2] / "src" / "kedge" / "reporting" / "assets"


def sentences(**series: list[float]) -> dict[str, str]:
    names = {name: name.replace("__", "/") for name in series}
    length = len(next(iter(series.values())))
    rows = [{names[n]: values[i] for n, values in series.items()} for i in range(length)]
    return {section["title"]: section["text"] for section in story(RunLog("run", rows), rows)}


def test_the_ratio_is_told_as_a_range() -> None:
    found = sentences(policy__approxkl_avg=[0.01] * 4, val__ratio=[1.0, 0.98, 1.03, 1.0])
    assert found["Updates"].endswith("; the mean ratio stayed between 0.98 and 1.03.")
    still = sentences(policy__approxkl_avg=[0.0] * 4, val__ratio=[1.0] * 4)["Updates"]
    assert still.endswith("so the probability ratio stays 1.")


def test_a_value_model_that_explains_nothing_is_not_a_negative_share() -> None:
    found = sentences(val__explained_variance=[-0.001, -0.05, -0.12, -0.12, -0.12])["Value"]
    assert found == (
        "The value model explained none of the return variance at the start, none at the end"
        " (worse than predicting the mean)."
    )
    found = sentences(val__explained_variance=[-0.001, 0.2, 0.3, 0.4, 0.41])["Value"]
    assert found.endswith("none of the return variance at the start, 41% at the end.")


def test_the_tab_counts_the_metrics_that_its_page_lists() -> None:
    """The axis "episode" is no metric of the page, in the tab and in its list alike."""
    tab, page = ((ASSETS / name).read_text() for name in ("main.js", "curves.js"))
    shared = r"Object\.keys\(\w+\.series\)\.filter\(\(n\) => n !== \"episode\"\)"
    assert re.search(shared, tab)
    assert re.search(shared, page)
